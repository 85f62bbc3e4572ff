"""Splits stored as tensors: rows of fixed shape, and windows of one long text."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from raytrain.data.rows.contract import IGNORED_LABEL, Batch, RowSplit, Split, generator, nonfinite
from raytrain.data.rows.residency import Column, PartialTensor, full_tensor, placed_column, take
from raytrain.errors import InputError


def is_integer(tensor: Column) -> bool:
    """Whether `tensor` has an integer or bool dtype (the rule by which `raytrain.trainable` counts labels)."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def host_tensor(values: ArrayLike | Tensor) -> Tensor:
    """Return an array, tensor or list of numbers as a CPU tensor, sharing memory if possible.

    Raises:
        TypeError, ValueError: not numbers, or ragged.
    """
    if isinstance(values, Tensor):
        return values.detach().cpu()
    array = np.ascontiguousarray(values) if isinstance(values, np.ndarray) else np.asarray(values)
    if not isinstance(values, np.ndarray) and array.dtype == np.float64:
        array = array.astype(np.float32)  # torch's own default for Python floats
    if array.dtype == np.uint16:
        array = array.astype(np.int32)  # torch cannot index uint16 everywhere
    if array.dtype.kind not in "biufc":
        raise TypeError(f"values of type {array.dtype}")
    return torch.from_numpy(array if array.flags.writeable else array.copy()).reshape(np.shape(values))


def check_finite(name: str, tensor: Tensor, *, key: str, rows: np.ndarray | None = None) -> None:
    """Raise InputError, naming column and row, if a float tensor (rows, ...) holds NaN or infinity.

    `rows` are the offsets (rows + 1) if `tensor` holds the concatenated values of ragged rows.
    """
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return
    at = int((~torch.isfinite(tensor)).reshape(-1).to(torch.uint8).argmax())
    place = at // max(tensor[0].numel(), 1)
    row = place if rows is None else int(np.searchsorted(rows, place, side="right")) - 1
    raise nonfinite(key, value=float(tensor.reshape(-1)[at]), column=name, row=row)


def label_counts(labels: Tensor | None) -> np.ndarray | None:
    """Count the labels other than -100 of each row (int64), once on the host.

    None if every row has weight 1: one label per row, no labels, or labels that are not class numbers.
    """
    if labels is None or not is_integer(labels):
        return None
    counts = (labels != IGNORED_LABEL).reshape(labels.shape[0], -1).sum(1).numpy()
    return None if bool((counts == 1).all()) else counts


class TensorSplit(RowSplit):
    """Columns of tensors (rows, ...) with equal row counts. Batches have the same column names.

    Integer `labels` become int64 in the batch; every other column keeps its dtype.

    Args:
        columns: the tensor of each column; not copied.
        divisors: columns stored in a compact dtype that become `float32 / divisor` in the batch.
        counts: `label_counts` of the rows, if already known (`counted`); otherwise counted here.
        tokens_per_row: see `Split`.
    """

    def __init__(
        self,
        columns: Mapping[str, Column],
        *,
        divisors: Mapping[str, float] | None = None,
        counts: np.ndarray | None = None,
        counted: bool = False,
        tokens_per_row: int | None = None,
    ) -> None:
        self.tokens_per_row = tokens_per_row
        self.columns = dict(columns)
        self.divisors = dict(divisors or {})
        self._rows = next(iter(self.columns.values())).shape[0]
        labels = self.columns.get("labels")
        self.counts = counts if counted else label_counts(None if labels is None else full_tensor(labels))
        self.returns_views = False
        self.device = next(iter(self.columns.values())).device
        self._widen = labels is not None and is_integer(labels) and labels.dtype != torch.int64

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of all columns as stored."""
        return sum(column.numel() * column.element_size() for column in self.columns.values())

    def gather(self, indices: np.ndarray) -> Batch:
        """See `Split`. With `returns_views`, contiguous rows are returned as views of the columns, without a copy."""
        batch = self._views(indices) or {name: take(column, indices) for name, column in self.columns.items()}
        for name, divisor in self.divisors.items():
            batch[name] = batch[name].to(torch.float32).div_(divisor)
        if self._widen:
            batch["labels"] = batch["labels"].to(torch.int64)
        return batch

    def _views(self, indices: np.ndarray) -> Batch | None:
        first, count = int(indices[0]), len(indices)
        if (
            not self.returns_views
            or self.divisors
            or int(indices[-1]) - first != count - 1
            or (np.diff(indices) != 1).any()
        ):
            return None
        columns = self.columns.items()
        return {name: column.narrow(0, first, count) for name, column in columns if isinstance(column, Tensor)}

    def weights(self, indices: np.ndarray) -> int:
        return len(indices) if self.counts is None else int(self.counts[indices].sum())

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        """Tokens of each row, the width of `input_ids`; None for rows without tokens."""
        tokens = self.columns.get("input_ids")
        return None if tokens is None or tokens.ndim < 2 else np.full(len(indices), tokens.shape[1])

    def select(self, rows: np.ndarray) -> TensorSplit:
        chosen = {name: take(column, rows) for name, column in self.columns.items()}
        counts = None if self.counts is None else self.counts[rows]
        return TensorSplit(
            chosen, divisors=self.divisors, counts=counts, counted=True, tokens_per_row=self.tokens_per_row
        )

    def to(self, device: torch.device | str, *, rows: int | None = None) -> TensorSplit:
        """Returns self if every column is there already."""
        moved = {name: placed_column(column, device, rows=rows) for name, column in self.columns.items()}
        if all(moved[name] is column for name, column in self.columns.items()):
            return self
        return TensorSplit(
            moved, divisors=self.divisors, counts=self.counts, counted=True, tokens_per_row=self.tokens_per_row
        )


class TextSplit(Split):
    """Windows of `context` tokens of one text; an index is the position of the window's first token.

    Batches: `input_ids` (B, T) int64 and `labels` (B, T) int64, the next tokens. Tokens are
    stored in a compact dtype and widened in the batch.

    Training windows of one epoch do not overlap: an offset below `context` and an order are drawn from
    (seed, epoch); every epoch has the same number of windows. Evaluation covers the text from its first token;
    less than one window remains at the end.

    Args:
        tokens: (N,) uint8, uint16 or int32 array, or a tensor.
        context: T, tokens per window.
        key: the config key that the error for a too short text names.
        same_labels: labels equal the input_ids, with the first of each row -100, for a model that shifts them.
    Raises:
        InputError: the text is shorter than one window plus one token.
    """

    def __init__(
        self, tokens: np.ndarray | Tensor, *, context: int, key: str = "data.path", same_labels: bool = False
    ) -> None:
        self.same_labels = same_labels
        self.tokens = tokens if isinstance(tokens, Tensor) else torch.from_numpy(compact_tokens(tokens))
        self.context = self.tokens_per_row = context
        self._length = self.tokens.shape[0]
        if self._length < context + 1:
            raise InputError(
                key,
                got=f"a text of {self._length} tokens",
                expected=f"at least {context + 1}: one window of model.context {context} and a token",
                remedy="give more text, a smaller model.context, or data.eval_fraction 0 for no evaluation",
            )
        self.device = self.tokens.device
        self._windows: Column = self.tokens.unfold(0, context, 1)

    def __len__(self) -> int:
        """Windows of one training epoch; the same for every offset."""
        return (self._length - self.context) // self.context

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens as stored."""
        return self._length * self.tokens.element_size()

    def order(self, seed: int, epoch: int) -> np.ndarray:
        draw = generator(seed, epoch)
        offset = int(draw.integers(self.context))
        return offset + draw.permutation(len(self)) * self.context

    def eval_order(self) -> np.ndarray:
        return np.arange((self._length - 1) // self.context) * self.context

    def gather(self, indices: np.ndarray) -> Batch:
        if self.same_labels:
            ids = take(self._windows, indices).to(torch.int64)
            labels = ids.clone()
            labels[:, 0] = IGNORED_LABEL
            return {"input_ids": ids, "labels": labels}
        return {
            "input_ids": take(self._windows, indices).to(torch.int64),
            "labels": take(self._windows, indices + 1).to(torch.int64),
        }

    def weights(self, indices: np.ndarray) -> int:
        return len(indices) * (self.context - self.same_labels)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return np.full(len(indices), self.context)

    def to(self, device: torch.device | str, *, rows: int | None = None) -> TextSplit:
        """Returns self if the tokens are there already. With `rows` the text of the first windows is moved."""
        kept = self._length if rows is None else max(rows, 1) * self.context
        whole = self.tokens if kept < self._length else self.tokens.to(device)
        if whole is self.tokens and kept >= self._length:
            return self
        split = TextSplit(whole, context=self.context, same_labels=self.same_labels)
        if kept < self._length:
            inside = kept - self.context + 1
            head, tail = self.tokens[:kept].to(device), self.tokens[inside:]  # the host holds windows across the border
            split._windows = PartialTensor(head.unfold(0, self.context, 1), tail.unfold(0, self.context, 1))
        return split


def compact_tokens(tokens: np.ndarray) -> np.ndarray:
    """Return a writable array of a dtype that torch can index on every device: uint8, int16, int32, or as given."""
    if tokens.dtype == np.uint16:
        small = not len(tokens) or int(tokens.max()) < 2**15
        tokens = tokens.view(np.int16) if small else tokens.astype(np.int32)
    return tokens if tokens.flags.writeable else tokens.copy()
