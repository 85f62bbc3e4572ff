"""Where rows are kept: all on the device, some of them, or none and each batch is moved to it."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raytrain.data.rows.contract import Batch, Order, Split, SplitView
from raytrain.data.transfer import pin, to_device

Storage = Literal["resident", "partial", "pinned", "stream"]


class StreamSplit(SplitView):
    """A split gathered on the CPU; each batch is then moved to the device.

    Args:
        pinned: move batches through pinned memory, so that the host does not wait for the copy.
    """

    def __init__(self, split: Split, *, device: torch.device | str, pinned: bool = False) -> None:
        super().__init__(split)
        self.device = torch.device(device)
        self.pinned = pinned

    def gather(self, indices: np.ndarray) -> Batch:
        token = _INTO_PINNED.set(self.pinned)
        try:
            return self.moved(self.split.gather(indices))
        finally:
            _INTO_PINNED.reset(token)

    def moved(self, host: Batch) -> Batch:
        """A batch of the host, on the device."""
        return to_device(pin(host) if self.pinned else host, self.device)

    def to(self, device: torch.device | str, *, rows: int | None = None) -> Split:
        """The same host data, streamed to another device."""
        if rows is not None:
            return self.split.to(device, rows=rows)
        return StreamSplit(self.split, device=device, pinned=self.pinned)


class ReorderedSplit(SplitView):
    """Rows in memory in the order that a function of (seed, epoch) returns, such as that of their row groups."""

    def __init__(self, split: Split, order: Callable[[int, int], Order]) -> None:
        super().__init__(split)
        self._order = order

    def order(self, seed: int, epoch: int) -> Order:
        return self._order(seed, epoch)

    def to(self, device: torch.device | str, *, rows: int | None = None) -> ReorderedSplit:
        return ReorderedSplit(self.split.to(device, rows=rows), self._order)


def place_split(split: Split, storage: Storage, device: torch.device | str, *, resident_rows: int = 0) -> Split:
    """The split with its rows where training reads them. Order and batches are the same for every storage.

    Args:
        split: as the source opened it, on the host.
        storage: "resident" keeps all rows on the device, "partial" the first `resident_rows`; "stream" moves each
            batch, "pinned" moves it through pinned memory.
        device: where batches must be.

    Raises:
        ValueError: another storage, such as an `auto` that the plan has not resolved.
    """
    if storage in ("resident", "partial"):
        return split.to(device, rows=resident_rows if storage == "partial" else None)
    if storage in ("stream", "pinned"):
        host = split.split if isinstance(split, StreamSplit) else split
        pinned = storage == "pinned" and torch.device(device).type != "cpu"
        return StreamSplit(host, device=device, pinned=pinned)
    raise ValueError(f"storage is {storage!r}, expected 'resident', 'partial', 'pinned' or 'stream'")


# -- columns in two parts ---------------------------------------------------------------------------


class PartialTensor:
    """A column (N, ...) whose first rows are on the device and the others on the host.

    Rows that are taken from it are always on the device.

    Args:
        head: rows 0 to K - 1, on the device.
        tail: the others, on the host.
    """

    def __init__(self, head: Tensor, tail: Tensor) -> None:
        self.head, self.tail = head, tail
        self.device = head.device
        self.dtype = head.dtype
        self.shape = torch.Size([head.shape[0] + tail.shape[0], *head.shape[1:]])

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def element_size(self) -> int:
        return self.head.element_size()

    def is_floating_point(self) -> bool:
        return self.head.is_floating_point()

    def is_complex(self) -> bool:
        return self.head.is_complex()

    def take(self, index: np.ndarray) -> Tensor:
        """Rows by index (an array of any shape), on the device."""
        flat = index.reshape(-1)
        rows = self._take_flat(flat, flat < self.head.shape[0])
        return rows if index.ndim == 1 else rows.reshape(*index.shape, *rows.shape[1:])

    def _take_flat(self, flat: np.ndarray, in_head: np.ndarray) -> Tensor:
        if in_head.all():
            return self.head.index_select(0, _index_tensor(flat, self.device))
        streamed = _select(self.tail, flat[~in_head] - self.head.shape[0], pinned=self.device.type == "cuda")
        streamed = to_device(streamed, self.device)
        if not in_head.any():
            return streamed
        rows = torch.empty((len(flat), *self.head.shape[1:]), dtype=self.dtype, device=self.device)
        kept = self.head.index_select(0, _index_tensor(flat[in_head], self.device))
        rows.index_copy_(0, _index_tensor(np.flatnonzero(in_head), self.device), kept)
        return rows.index_copy_(0, _index_tensor(np.flatnonzero(~in_head), self.device), streamed)


Column = Tensor | PartialTensor


def _index_tensor(index: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index)).to(device, non_blocking=True)


_INTO_PINNED: ContextVar[bool] = ContextVar("into_pinned", default=False)
"""Whether rows that this thread gathers on the host are on their way through pinned memory."""


def _select(column: Tensor, index: np.ndarray, *, pinned: bool) -> Tensor:
    """Rows of a column; `pinned`: written to pinned memory at once, of which torch reuses blocks. Gathered to ordinary
    memory first, a batch of 256 MiB took 42 ms on an H200's host: new pages, and a second copy."""
    to = torch.empty((len(index), *column.shape[1:]), dtype=column.dtype, pin_memory=True) if pinned else None
    return torch.index_select(column, 0, _index_tensor(index, column.device), out=to)


def take(column: Column, index: np.ndarray) -> Tensor:
    """Rows of a column by index (an array of any shape), on the device of the column."""
    if isinstance(column, PartialTensor):
        return column.take(index)
    rows = _select(column, index.reshape(-1), pinned=_INTO_PINNED.get() and column.device.type == "cpu")
    return rows if index.ndim == 1 else rows.reshape(*index.shape, *rows.shape[1:])


def full_tensor(column: Column) -> Tensor:
    """The column, which must not be in two parts: it is split only after everything in it is counted."""
    assert isinstance(column, Tensor), "this column is in two parts already"
    return column


def placed_column(column: Column, device: torch.device | str, *, rows: int | None) -> Column:
    """A host column on `device`; with `rows` only its first rows, while the others stay where they are."""
    tensor = full_tensor(column)
    if rows is None or rows >= tensor.shape[0]:
        return tensor.to(device)
    return PartialTensor(tensor[:rows].to(device), tensor[rows:])
