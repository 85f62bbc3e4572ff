"""Map-style datasets: items of any nesting, read on demand or kept; their longest row, and whether they vary.

For `data.train` as a Python object. The driver samples a few items before the start to see whether reading twice gives
the same.
"""

from __future__ import annotations

import hashlib
import random
import struct
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raytrain.config.messages import abbreviated
from raytrain.data.rows.collate import (
    CollatedSplit,
    UsersCollate,
    as_row,
    collate_rows,
    leaves,
    tensor_bytes,
    tensor_split,
)
from raytrain.data.rows.contract import Batch, RowSplit, Split, SplitView
from raytrain.data.rows.residency import StreamSplit, tensors_of, to_device
from raytrain.data.rows.splits import RaggedSplit, TensorSplit
from raytrain.errors import InputError
from raytrain.plan.facts import DataFacts

# ---------------------------------------------------------------- map style


SAMPLED_ROWS = 64
"""Items of a dataset that are read to find out whether its rows differ in length."""

NAMED_AT_MOST = 20
COLLATE_DRAWS = 2**63
"""Added to a row's number: what a `collate` function draws is independent of what the items draw."""


class DatasetSplit(RowSplit):
    """A map-style dataset: `len(dataset)` and `dataset[i]`, which gives a dict, an (x, y) pair or one tensor. Items are
    read again in every epoch, so that random transforms stay random.

    A pair becomes {"x", "labels"}, a single tensor {"x"}. Tensors, arrays, numbers and lists of numbers are stacked;
    where rows differ in their first dimension they are padded, and `attention_mask` is added to every batch (`masked`,
    shared by the splits of a source). Dicts, lists, tuples and dataclasses are collated part by part; strings, None and
    other objects are passed on unchanged. The user's own `collate` receives the items as the dataset returns them."""

    def __init__(
        self,
        dataset: Any,
        *,
        rows: np.ndarray | None = None,
        key: str = "data.train",
        collate: UsersCollate | None = None,
        masked: MaskedColumns | None = None,
    ) -> None:
        self.dataset = dataset
        self.rows = np.arange(len(dataset)) if rows is None else rows
        self.key = key
        self.collate = collate
        self.masked = masked or MaskedColumns(self)
        self.classes: Mapping[str, int] | None = None
        """The numbers of string labels; empty where labels are numbers, None before it is known which they are."""
        self._many = getattr(dataset, "__getitems__", None)
        self._generators = own_generators(dataset)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """An estimate: bytes of the tensors of the first item, times the rows. No other item is read."""
        return tensor_bytes(leaves(self.items(np.zeros(1, np.int64))[0])) * len(self.rows)

    def items(self, indices: np.ndarray) -> list[Any]:
        indices = self.rows[indices].tolist()
        return self._many(indices) if self._many is not None else [self.dataset[index] for index in indices]

    def read(self, indices: np.ndarray, *, before: Callable[[int], None] | None = None) -> list[Any]:
        """The items as rows (`as_row`), or as they are for a `collate` of the user's.

        `before` is called with each index before its item is read; only with the first one if the dataset reads
        several items at once (`__getitems__`).
        """
        if before is None or self._many is not None:
            if before is not None and len(indices):
                self._seed(before, int(indices[0]))
            return [self._row(*pair) for pair in zip(self.items(indices), self.rows[indices].tolist(), strict=True)]
        rows = []
        for index in indices.tolist():
            self._seed(before, index)
            at = int(self.rows[index])
            rows.append(self._row(self.dataset[at], at))
        return rows

    def _seed(self, before: Callable[[int], None], index: int) -> None:
        before(index)
        for generator in self._generators:
            generator.bit_generator.state = type(generator.bit_generator)(random.getrandbits(64)).state

    def _row(self, item: Any, number: int) -> Any:
        if self.collate is not None:
            return item
        row = as_row(item, key=self.key)
        if self.classes is None or "labels" not in row:
            return row
        if isinstance(name := row["labels"], str) != bool(self.classes):
            raise mixed_labels(self.key, name, row=number, names=bool(self.classes))
        if not self.classes:
            return row
        if name not in self.classes:
            expected = f"one of {abbreviated(list(self.classes), NAMED_AT_MOST)}"
            raise InputError(self.key, got=f"the label {name!r}", expected=expected)
        return {**row, "labels": torch.tensor(self.classes[name])}

    def batch(self, rows: list[Any]) -> Batch:
        if self.collate is not None:
            return self.collate(rows)
        return collate_rows(rows, key=self.key, masked=self.masked.names)

    def gather(self, indices: np.ndarray) -> Batch:
        return self.batch(self.read(indices))

    def select(self, rows: np.ndarray) -> DatasetSplit:
        made = type(self)(self.dataset, rows=self.rows[rows], key=self.key, collate=self.collate, masked=self.masked)
        made.classes = self.classes
        return made

    def to(self, device: torch.device | str, *, rows: int | None = None) -> Split:
        """Read and convert every item once and keep it, as tensors on `device` if the shapes allow it; or the first
        `rows` items, while the others are read in every epoch. A random transform inside the dataset is then drawn only
        once."""
        if rows is not None:
            return PartialDataset(self, device=torch.device(device), rows=rows)
        read = self.read(np.arange(len(self.rows)))
        self.masked.observe(read)
        return self.kept(read).to(device)

    def kept(self, rows: list[Any]) -> TensorSplit | RaggedSplit | ItemSplit:
        """All rows of this split, read, as a split in memory: a table of tensors if their shapes allow it."""
        table = tensor_split(rows, key=self.key, masked=self.masked.names) if self.collate is None else None
        return table or ItemSplit(rows, key=self.key, collate=self.collate, masked=self.masked)


def mixed_labels(key: str, value: Any, *, row: int, names: bool) -> InputError:
    """The error for a label that is no name among `names`, or a name among numbers."""
    seen = value.tolist() if isinstance(value, torch.Tensor) else value
    return InputError(
        key, got=f"{seen!r} in column 'labels' row {row}",
        expected=f"{'a name' if names else 'a number'}, as in row 0 of the training data",
        remedy="rows are numbered from 0; write all labels as names (strings) or all as numbers",
    )  # fmt: skip


class PartialDataset(SplitView):
    """A dataset whose first items are converted once and kept on a device; the others are read in every epoch.
    `before`: see `DatasetSplit.read`; for the items that are kept."""

    def __init__(
        self, split: DatasetSplit, *, device: torch.device, rows: int, before: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(split)
        self._dataset, self.device, self.key, self.collate = split, device, split.key, split.collate
        first = split.read(np.arange(min(rows, len(split))), before=before)
        self._kept = [self._moved(row) for row in first]

    def _moved(self, row: Any) -> Any:
        """A row on the device; on the host for a `collate` of the user's."""
        return to_device(row, self.device) if self.collate is None else row

    def read(self, indices: np.ndarray, *, before: Callable[[int], None] | None = None) -> list[Any]:
        """Rows on the device. `before` is as in `DatasetSplit.read`, for the items that are not kept."""
        others = iter(self._dataset.read(indices[indices >= len(self._kept)], before=before))
        kept = self._kept
        return [kept[index] if index < len(kept) else self._moved(next(others)) for index in indices.tolist()]

    def batch(self, rows: list[Any]) -> Batch:
        batch = self._dataset.batch(rows)
        return batch if self.collate is None else to_device(batch, self.device)

    def gather(self, indices: np.ndarray) -> Batch:
        return self.batch(self.read(indices))


class ItemSplit(DatasetSplit):
    """Items that do not fit a table of tensors (nested, or with strings), converted once and kept on a device.

    Those for a `collate` of the user's stay on the host; each batch is moved.
    """

    def read(self, indices: np.ndarray, *, before: Callable[[int], None] | None = None) -> list[Any]:
        """The rows, which are converted already; nothing is drawn."""
        return [self.dataset[index] for index in self.rows[indices].tolist()]

    def to(self, device: torch.device | str, *, rows: int | None = None) -> Split:
        if rows is not None:
            return super().to(device, rows=rows)
        if self.collate is not None:
            return StreamSplit(self, device=device)
        moved = [to_device(item, device) for item in self.dataset]
        return ItemSplit(moved, rows=self.rows, key=self.key, masked=self.masked)


class MaskedColumns:
    """The columns of a dataset whose rows differ in length, so that every batch has `attention_mask`, or none has.

    Decided when first asked: from all rows where they were read (`observe`), else from at most `SAMPLED_ROWS` items
    of each split, spread evenly; the random generators are restored. In a dataset whose sampled rows have equal
    lengths, only a batch with padding has a mask. `splits`: of one source."""

    def __init__(self, *splits: DatasetSplit) -> None:
        self._splits = splits
        self._lengths: dict[str, set[int]] = {}
        self._names: tuple[str, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        if self._names is None:
            for split in self._splits if not self._lengths else ():
                with generators_kept():
                    sampled = spread_rows(len(split), SAMPLED_ROWS)
                    self.observe(split.read(sampled, before=partial(seed_item, 0, 0)))
            self._names = tuple(name for name, found in self._lengths.items() if len(found) > 1)
        return self._names

    def observe(self, rows: list[Any]) -> None:
        """Take note of rows that were read; those for a `collate` of the user's tell nothing."""
        for name, value in (pair for row in rows if isinstance(row, dict) for pair in row.items()):
            if isinstance(value, torch.Tensor) and value.ndim:
                self._lengths.setdefault(name, set()).add(value.shape[0])


def spread_rows(rows: int, most: int) -> np.ndarray:
    """At most `most` indices below `rows`, spread evenly, with the first and the last."""
    return np.unique(np.linspace(0, rows - 1, most).astype(np.int64))


def own_generators(value: Any, depth: int = 4) -> list[np.random.Generator]:
    """numpy's generators that a dataset holds, in its attributes or in those of its transforms."""
    if isinstance(value, np.random.Generator):
        return [value]
    parts = value if isinstance(value, list | tuple) else list(getattr(value, "__dict__", {}).values())
    return [one for part in parts for one in own_generators(part, depth - 1)] if depth and len(parts) <= 64 else []


def seed_item(seed: int, epoch: int, row: int) -> None:
    """Seed Python's, numpy's and torch's generators of this process for one item."""
    packed = struct.pack("<QQQ", seed % 2**64, epoch, row)
    drawn = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    random.seed(drawn)
    np.random.seed(drawn % 2**32)
    torch.default_generator.manual_seed(drawn % 2**63)


@contextmanager
def generators_kept() -> Generator[None]:
    """Restore the random generators of this process on exit, whatever was drawn or seeded inside."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)


def first_row(split: Split) -> Batch:
    """The first row as a batch; a dataset of which one item is read has no mask. Random generators are restored if the
    user's `collate` makes the batch."""
    index = split.eval_order()[:1]
    if isinstance(split, DatasetSplit) and split.collate is None:
        return collate_rows(split.read(index), key=split.key)
    users = users_rows(split)
    with generators_kept() if users is not None and users.collate is not None else nullcontext():
        return split.gather(index)


UsersRows = DatasetSplit | PartialDataset | CollatedSplit
"""A split whose batches are made by the user's code: a dataset, a `collate` function, or both."""


def users_rows(split: Split) -> UsersRows | None:
    """The split, if its batches are made by the user's code; None for rows in memory that are collated by raytrain."""
    if not isinstance(split, UsersRows) or (isinstance(split, ItemSplit) and split.collate is None):
        return None
    return split


def seeded_batch(split: UsersRows, rows: np.ndarray, *, seed: int, epoch: int) -> Batch:
    """A batch whose items draw from generators seeded by (seed, epoch, row), and its `collate` from generators seeded
    by (seed, epoch, first row); they are not restored."""
    read = split.read(rows, before=partial(seed_item, seed, epoch))
    if split.collate is not None:
        seed_item(seed, epoch, COLLATE_DRAWS + int(rows[0]))
    return split.batch(read)


def gathered(split: Split, rows: np.ndarray, *, seed: int, epoch: int) -> Batch:
    """A batch of any split, read in this process. The user's code draws from seeds; all generators are restored."""
    users = users_rows(split)
    if users is None:
        return split.gather(rows)
    with generators_kept():
        return seeded_batch(users, rows, seed=seed, epoch=epoch)


# ---------------------------------------------------------------- longest
# The longest row of a split: the length that a micro-batch is padded to at most.


#: Items of a user's dataset that are read to find the longest, spread evenly.
LENGTH_SAMPLE = 256


class LongestRow(NamedTuple):
    """Index and size of a row: elements of its ragged columns, or bytes of an item of a dataset."""

    row: int
    size: int


def longest_row(split: Split) -> LongestRow | None:
    """The longest row; None if all have the same length. The random generators are restored after reading items."""
    while isinstance(split, SplitView):
        split = split.split
    if isinstance(split, RaggedSplit):
        lengths = np.stack([np.diff(column.offsets) for column in split.ragged.values()]).sum(0)
        index = int(lengths.argmax())
        return LongestRow(index, int(lengths[index]))
    if isinstance(split, DatasetSplit):
        indices = spread_rows(len(split), LENGTH_SAMPLE)
        with generators_kept():
            sizes = [_size(leaves(row)) for row in split.read(indices)]
        at = int(np.argmax(sizes))
        return LongestRow(int(indices[at]), sizes[at]) if min(sizes) < max(sizes) else None
    return None


def _size(row: Any) -> int:
    """Bytes of a row's tensors, and characters of its strings, of which a `collate` function may make tokens."""
    if isinstance(row, (str, bytes)):
        return len(row)
    if isinstance(row, (Mapping, list, tuple)):
        return sum(map(_size, row.values() if isinstance(row, Mapping) else row))
    return tensor_bytes(row)


# ---------------------------------------------------------------- variation
# What reading some items of a map-style dataset shows: how long it takes, and whether a second reading differs, as with
# random transforms.


#: So many items are read, each so many times. A transform that changes one reading of ten goes unnoticed in one dataset
#: of 800.
VARIATION_SAMPLE, VARIATION_READINGS = 8, 8
#: After this long no further item is read, once one was read twice.
VARIATION_LIMIT_S = 0.5


def observed_facts(facts: DataFacts, train: Split) -> DataFacts:
    """The facts with `varies` and `item_s` of a map-style dataset; those of other data are unchanged.

    The random generators of this process are restored. An error of the dataset is left to those who read all items.
    """
    if facts.kind != "items" or not isinstance(train, DatasetSplit) or not len(train):
        return facts
    began, reads, varies = time.perf_counter(), 0, False
    with generators_kept():
        try:
            for first, again in _pairs(train):
                reads += 1
                varies = not _same(first, again)
                if varies or (reads > 1 and time.perf_counter() - began > VARIATION_LIMIT_S):
                    break
        except Exception:  # whatever the code of the user raises
            return facts
    return replace(facts, varies=varies, item_s=(time.perf_counter() - began) / reads)


def _pairs(split: DatasetSplit) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """For every reading of an item: its first reading, and this one."""
    for index in spread_rows(len(split), VARIATION_SAMPLE):
        first = _tensors(split, index)
        yield first, first
        for _ in range(VARIATION_READINGS - 1):
            yield first, _tensors(split, index)


def _tensors(split: DatasetSplit, index: np.int64) -> list[Tensor]:
    return [tensor.clone() for _, tensor in tensors_of(leaves(split.read(np.array([index]))[0]), "")]


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)
        for one, other in zip(left, right, strict=True)
    )
