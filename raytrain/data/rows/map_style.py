"""Map-style datasets: items of any nesting, read when their turn comes, or once and kept.

What a user's dataset draws at random: from (seed, epoch, row), whoever reads it.

Each item finds Python's, numpy's and torch's global generators seeded for it alone, in the training process as in a
loader process: the same for any number of processes, workers and micro-batches, and after a resume. A dataset that
reads many items at once (`__getitems__`) finds them seeded by the first row of its batch. Generators of its own are its
own affair. The training process gets its generators back as they were: what the model draws does not depend on who
reads.
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
from raytrain.data.rows.contract import Batch, RowSplit, Split, row_order
from raytrain.data.transfer import to_device


class DatasetSplit:
    """A map-style dataset: `len(dataset)` and `dataset[i]`, which gives a dict, an (x, y) pair or one tensor.

    A pair becomes {"x", "labels"}, a single tensor {"x"}. Tensors, arrays, numbers and lists of numbers are
    stacked; where rows differ in their first dimension they are padded, and `attention_mask` is added to
    that batch. Dicts, lists, tuples and dataclasses are collated part by part; strings, None and other
    objects come as they are.

    Args:
        dataset: items are asked for again each epoch, so that random transforms stay random.
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
        """Bytes of the tensors of the first item, times the rows: an estimate, nothing else is read."""
        return tensor_bytes(as_row(self.items(np.zeros(1, np.int64))[0], key=self.key)) * len(self.rows)

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return row_order(len(self.rows), seed=seed, epoch=epoch)

    def eval_order(self) -> np.ndarray:
        return np.arange(len(self.rows))

    def items(self, indices: np.ndarray) -> list[Any]:
        """The items as the dataset gives them."""
        indices = self.rows[indices].tolist()
        return self._many(indices) if self._many is not None else [self.dataset[index] for index in indices]

    def read(self, indices: np.ndarray, *, before: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """The items as rows (`as_row`). `before` is called with each index before its item is asked for; with the
        first one alone where the dataset reads many at once."""
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
        """Every item read and converted once, then kept: as tensors on `device` where the shapes allow it.

        A random transform inside the dataset is drawn once and for all by this.
        (`raytrain.data.loading.prepare.read_whole` does it with progress, and draws from seeds.)
        """
        rows = self.read(np.arange(len(self.rows)))
        split = tensor_split(rows, key=self.key) or ItemSplit(rows, key=self.key)
        return split.to(device)

    def to_partial(self, device: torch.device | str, *, rows: int) -> PartialDataset:
        """The first `rows` items read and converted once and kept on `device`; the others are asked for each epoch."""
        return PartialDataset(self, device=torch.device(device), rows=rows)


class PartialDataset:
    """A dataset whose first items are kept on a device, converted, and whose others are read when their turn comes.

    Args:
        before: see `DatasetSplit.read`, for the items that are kept.
    """

    tokens_per_row: int | None = None

    def __init__(
        self, split: DatasetSplit, *, device: torch.device, rows: int, before: Callable[[int], None] | None = None
    ) -> None:
        self.split, self.device, self.key = split, device, split.key
        first = split.read(np.arange(min(rows, len(split))), before=before)
        self._kept = [to_device(row, device) for row in first]

    def __len__(self) -> int:
        return len(self.split)

    @property
    def nbytes(self) -> int:
        """Of the whole split, estimated as its own."""
        return self.split.nbytes

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return self.split.order(seed, epoch)

    def eval_order(self) -> np.ndarray:
        return self.split.eval_order()

    def read(self, indices: np.ndarray, *, before: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """Rows on the device; `before` as in `DatasetSplit.read`, for those that are not kept."""
        others = iter(self.split.read(indices[indices >= len(self._kept)], before=before))
        kept = self._kept
        return [
            kept[index] if index < len(kept) else to_device(next(others), self.device) for index in indices.tolist()
        ]

    def gather(self, indices: np.ndarray) -> Batch:
        return collate_rows(self.read(indices), key=self.key)

    def weights(self, indices: np.ndarray) -> None:
        """Not known without reading the items."""

    def lengths(self, indices: np.ndarray) -> None:
        """Not known without reading the items."""

    def to(self, device: torch.device | str) -> RowSplit:
        """All of it."""
        return self.split.to(device)

    def to_partial(self, device: torch.device | str, *, rows: int) -> PartialDataset:
        """With another part kept."""
        return self.split.to_partial(device, rows=rows)


class ItemSplit(DatasetSplit):
    """Items that fit no table of tensors (nested, or with strings), converted once and kept on a device."""

    def gather(self, indices: np.ndarray) -> Batch:
        return collate_rows([self.dataset[index] for index in self.rows[indices].tolist()], key=self.key)

    def select(self, rows: np.ndarray) -> ItemSplit:
        return ItemSplit(self.dataset, rows=self.rows[rows], key=self.key)

    def to(self, device: torch.device | str) -> ItemSplit:
        return ItemSplit([to_device(item, device) for item in self.dataset], rows=self.rows, key=self.key)


def seed_item(seed: int, epoch: int, row: int) -> None:
    """Seed Python's, numpy's and torch's generators of this process for one item."""
    told = struct.pack("<QQQ", seed % 2**64, epoch, row)
    drawn = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
    random.seed(drawn)
    np.random.seed(drawn % 2**32)
    torch.default_generator.manual_seed(drawn % 2**63)


@contextmanager
def generators_kept() -> Generator[None]:
    """Whatever is drawn or seeded inside, the generators of this process come back as they were."""
    python, arrays, tensors = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
        torch.set_rng_state(tensors)


def seeded_batch(split: DatasetSplit | PartialDataset, rows: np.ndarray, *, seed: int, epoch: int) -> Batch:
    """A batch whose items draw from generators seeded by (seed, epoch, row), in a process that draws nothing else."""
    return collate_rows(split.read(rows, before=partial(seed_item, seed, epoch)), key=split.key)


def gathered(split: Split, rows: np.ndarray, *, seed: int, epoch: int) -> Batch:
    """A batch of any split, read here: seeded where a user's dataset reads it, and no generator is touched."""
    if type(split) not in (DatasetSplit, PartialDataset):  # items that are kept draw nothing any more
        return split.gather(rows)
    assert isinstance(split, (DatasetSplit, PartialDataset))
    with generators_kept():
        return seeded_batch(split, rows, seed=seed, epoch=epoch)
