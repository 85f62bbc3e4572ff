"""The interfaces of splits and sources, and the two pure rules they share: order and hold-out. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np

from raytrain.errors import InputError
from raytrain.plan.facts import DataFacts

if TYPE_CHECKING:
    import torch

Batch = dict[str, Any]
IGNORED_LABEL = -100
HOLDOUT_SEED = 0


class Order(Protocol):
    """The row indices of an epoch in their order: an array, or an object that computes slices on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> np.ndarray: ...


class Split(ABC):
    """Rows that can be put in order and gathered into batches.

    A row is identified by its index (int64): its number, or for text the position where its window of tokens starts.
    Everything but `gather` happens on the host and reads no device value."""

    tokens_per_row: int | None = None  # tokens of every row, None where rows differ or have none

    @abstractmethod
    def __len__(self) -> int:
        """Rows of one training epoch."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the rows as they are stored."""

    def order(self, seed: int, epoch: int) -> Order:
        """Every index of this epoch, shuffled: a pure function of (seed, epoch)."""
        return row_order(len(self), seed=seed, epoch=epoch)

    def eval_order(self) -> np.ndarray:
        return np.arange(len(self))

    @abstractmethod
    def gather(self, indices: np.ndarray) -> Batch:
        """The rows as one batch of tensors (B, ...)."""

    def weights(self, indices: np.ndarray) -> int | None:
        """What a mean loss over these rows averages over (labels, tokens or rows); None where only reading them
        tells."""
        return None

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        """Tokens of each of these rows; None where only reading them tells."""
        return None

    @abstractmethod
    def to(self, device: torch.device | str, *, rows: int | None = None) -> Split:
        """The same split, kept on `device` and gathered there; with `rows` only its first rows, while the others stay
        on the host."""


class SplitView(Split):
    """A split that forwards to the split inside it; subclasses replace what differs."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.tokens_per_row = split.tokens_per_row

    def __len__(self) -> int:
        return len(self.split)

    @property
    def nbytes(self) -> int:
        return self.split.nbytes

    def order(self, seed: int, epoch: int) -> Order:
        return self.split.order(seed, epoch)

    def eval_order(self) -> np.ndarray:
        return self.split.eval_order()

    def gather(self, indices: np.ndarray) -> Batch:
        return self.split.gather(indices)

    def weights(self, indices: np.ndarray) -> int | None:
        return self.split.weights(indices)

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        return self.split.lengths(indices)

    def to(self, device: torch.device | str, *, rows: int | None = None) -> Split:
        return self.split.to(device, rows=rows)


class RowSplit(Split):
    """A split of independent rows, so that some of them can be held out."""

    @abstractmethod
    def select(self, rows: np.ndarray) -> Self:
        """A split of these rows only."""


Rows = TypeVar("Rows", bound=RowSplit)


@dataclass(frozen=True)
class Source:
    """Opened data: both splits, what is known about them, and how tokens turn into text."""

    train: Split
    eval: Split | None  # the evaluation split, or None where there is none
    facts: DataFacts  # the sizes, for the plan
    vocab_size: int | None = None  # number of tokens for text, else None
    decode: Callable[[list[int]], str] | None = None  # tokens to text, for text only
    encode: Callable[[str], list[int]] | None = None  # text to tokens, for text only
    describe: str = ""  # one line for people
    classes: int | None = None  # number of classes where the labels are class numbers
    # names of the classes where the labels were strings, in the order of their numbers
    class_names: tuple[str, ...] | None = None
    worker_data: Any = None  # what the driver sends to the workers instead of the source, else None
    placed: bool = False  # whether the splits are where training reads them (`raytrain.data.prepare`)
    tokenizer: str | None = None  # folder of the tokenizer that made the tokens
    # the first label of each row is -100: a model that shifts labels itself never reads it
    first_labels_ignored: bool = False
    # how rows of other files become the same batches, for inference: {"characters"} of a text's vocabulary, or
    # {"stacked", "named"} columns of a table; empty where nothing has to be known
    reads: Mapping[str, Any] = field(default_factory=dict)


def generator(seed: int, epoch: int) -> np.random.Generator:
    """The generator of one epoch; its bit generator is fixed, so that a change of numpy's default changes no order."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed % 2**64, epoch])))


def row_order(rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """A permutation of range(rows): the same for every process, rank and world size."""
    return generator(seed, epoch).permutation(rows)


def holdout(rows: int, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows for training and rows held out, each in file order.

    The last `fraction` (rounded down) of one permutation of seed 0: it never depends on the job's seed, so
    that runs with different seeds are scored on the same rows.
    """
    held = int(rows * fraction)
    order = row_order(rows, seed=HOLDOUT_SEED, epoch=0)
    return np.sort(order[: rows - held]), np.sort(order[rows - held :])


def split_off(split: Rows, fraction: float) -> tuple[Rows, Rows | None]:
    """(train, eval) of a split of rows; eval is None if `fraction` of the rows is less than one row."""
    train_rows, eval_rows = holdout(len(split), fraction)
    if not len(eval_rows):
        return split, None
    return split.select(train_rows), split.select(eval_rows)


def facts_of(train: Split, evaluation: Split | None, *, reason: str, vocab_size: int | None = None) -> DataFacts:
    """The sizes of two opened splits; `row_bytes` is a row as it is stored, not as it is gathered."""
    return DataFacts(
        train_rows=len(train),
        eval_rows=0 if evaluation is None else len(evaluation.eval_order()),
        row_bytes=-(-train.nbytes // max(len(train), 1)),
        tokens_per_row=train.tokens_per_row,
        total_bytes=train.nbytes + (0 if evaluation is None else evaluation.nbytes),
        vocab_size=vocab_size,
        reason=reason,
    )


def nonfinite(key: str, *, value: float, column: str, row: int) -> InputError:
    seen = "NaN" if value != value else ("inf" if value > 0 else "-inf")
    return InputError(
        key,
        got=f"{seen} in column '{column}' row {row}",
        expected="finite numbers",
        remedy="rows count from 0; fill these values or leave the rows out",
    )
