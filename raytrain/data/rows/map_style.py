"""Map-style datasets: items of any nesting, read on demand, or read once and kept.

What a dataset draws at random depends on (seed, epoch, row) only. Python's, numpy's and torch's global generators are
seeded for each item, in the training process as in a loader process, so that the draws are the same for any number of
processes, workers and micro-batches, and after a resume. A dataset that reads many items at once (`__getitems__`) finds
the generators seeded by the first row of its batch. A dataset's own generators are not touched. The generators of the
training process are restored afterwards: what the model draws does not depend on who reads the data.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from raytrain.data.rows.collate import as_row, collate_rows, tensor_bytes, tensor_split
from raytrain.data.rows.contract import Batch, RowSplit, Split, SplitView, row_order
from raytrain.data.transfer import to_device


class DatasetSplit:
    """A map-style dataset: `len(dataset)` and `dataset[i]`, which gives a dict, an (x, y) pair or one tensor.

    A pair becomes {"x", "labels"}, a single tensor {"x"}. Tensors, arrays, numbers and lists of numbers are
    stacked; where rows differ in their first dimension they are padded, and `attention_mask` is added to
    that batch. Dicts, lists, tuples and dataclasses are collated part by part; strings, None and other
    objects are passed on unchanged.

    Args:
        dataset: items are read again in every epoch, so that random transforms stay random.
        rows: the items that belong to this split; all of them if None.
        key: what an error names.
    """

    tokens_per_row: int | None = None

    def __init__(self, dataset: Any, *, rows: np.ndarray | None = None, key: str = "data.train") -> None:
        self.dataset = dataset
        self.rows = np.arange(len(dataset)) if rows is None else rows
        self.key = key
        self._many = getattr(dataset, "__getitems__", None)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def nbytes(self) -> int:
        """An estimate: bytes of the tensors of the first item, times the rows. No other item is read."""
        return tensor_bytes(as_row(self.items(np.zeros(1, np.int64))[0], key=self.key)) * len(self.rows)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return row_order(len(self.rows), seed=seed, epoch=epoch)

    def eval_order(self) -> np.ndarray:
        return np.arange(len(self.rows))

    def items(self, indices: np.ndarray) -> list[Any]:
        """The items as the dataset returns them."""
        indices = self.rows[indices].tolist()
        return self._many(indices) if self._many is not None else [self.dataset[index] for index in indices]

    def read(self, indices: np.ndarray, *, before: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """The items as rows (`as_row`).

        `before` is called with each index before its item is read; only with the first one if the dataset reads
        several items at once (`__getitems__`).
        """
        if before is None or self._many is not None:
            if before is not None and len(indices):
                before(int(indices[0]))
            return [as_row(item, key=self.key) for item in self.items(indices)]
        rows = []
        for index in indices:
            before(int(index))
            rows.append(as_row(self.dataset[int(self.rows[index])], key=self.key))
        return rows

    def gather(self, indices: np.ndarray) -> Batch:
        return collate_rows(self.read(indices), key=self.key)

    def weights(self, indices: np.ndarray) -> None:
        """Not known without reading the items."""

    def lengths(self, indices: np.ndarray) -> None:
        """Not known without reading the items."""

    def select(self, rows: np.ndarray) -> DatasetSplit:
        return DatasetSplit(self.dataset, rows=self.rows[rows], key=self.key)

    def to(self, device: torch.device | str) -> RowSplit:
        """Read and convert every item once and keep it: as tensors on `device` if the shapes allow it.

        A random transform inside the dataset is drawn only once. (`raytrain.data.loading.prepare.read_dataset` does
        the same with progress events and seeded draws.)
        """
        rows = self.read(np.arange(len(self.rows)))
        split = tensor_split(rows, key=self.key) or ItemSplit(rows, key=self.key)
        return split.to(device)

    def to_partial(self, device: torch.device | str, *, rows: int) -> PartialDataset:
        """Convert the first `rows` items once and keep them on `device`; the others are read in every epoch."""
        return PartialDataset(self, device=torch.device(device), rows=rows)


class PartialDataset(SplitView):
    """A dataset whose first items are converted once and kept on a device; the others are read in every epoch.

    Args:
        before: see `DatasetSplit.read`; for the items that are kept.
    """

    def __init__(
        self, split: DatasetSplit, *, device: torch.device, rows: int, before: Callable[[int], None] | None = None
    ) -> None:
        super().__init__(split)
        self._dataset, self.device, self.key = split, device, split.key
        first = split.read(np.arange(min(rows, len(split))), before=before)
        self._kept = [to_device(row, device) for row in first]

    def read(self, indices: np.ndarray, *, before: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """Rows on the device. `before` is as in `DatasetSplit.read`, for the items that are not kept."""
        others = iter(self._dataset.read(indices[indices >= len(self._kept)], before=before))
        kept = self._kept
        return [
            kept[index] if index < len(kept) else to_device(next(others), self.device) for index in indices.tolist()
        ]

    def gather(self, indices: np.ndarray) -> Batch:
        return collate_rows(self.read(indices), key=self.key)


class ItemSplit(DatasetSplit):
    """Items that do not fit a table of tensors (nested, or with strings), converted once and kept on a device."""

    def gather(self, indices: np.ndarray) -> Batch:
        return collate_rows([self.dataset[index] for index in self.rows[indices].tolist()], key=self.key)

    def select(self, rows: np.ndarray) -> ItemSplit:
        return ItemSplit(self.dataset, rows=self.rows[rows], key=self.key)

    def to(self, device: torch.device | str) -> ItemSplit:
        return ItemSplit([to_device(item, device) for item in self.dataset], rows=self.rows, key=self.key)


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


def seeded_batch(split: DatasetSplit | PartialDataset, rows: np.ndarray, *, seed: int, epoch: int) -> Batch:
    """A batch whose items draw from generators seeded by (seed, epoch, row); the generators are not restored."""
    return collate_rows(split.read(rows, before=partial(seed_item, seed, epoch)), key=split.key)


def gathered(split: Split, rows: np.ndarray, *, seed: int, epoch: int) -> Batch:
    """A batch of any split, read in this process. A user's dataset draws from seeds; all generators are restored."""
    if type(split) not in (DatasetSplit, PartialDataset):  # items that are kept draw nothing
        return split.gather(rows)
    assert isinstance(split, (DatasetSplit, PartialDataset))
    with generators_kept():
        return seeded_batch(split, rows, seed=seed, epoch=epoch)
