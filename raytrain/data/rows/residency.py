"""Where rows are kept: all on the device, the first of them, or none and each batch is moved to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from raytrain.data.rows.contract import Batch, Order, Split
from raytrain.data.transfer import pin, to_device

Storage = Literal["resident", "partial", "pinned", "stream"]


class StreamSplit:
    """A split gathered on the CPU, each batch then moved to the device.

    Args:
        pinned: batches go through pinned memory, so that nobody waits for the copy.
    """

    def __init__(self, split: Split, *, device: torch.device | str, pinned: bool = False) -> None:
        self.split = split
        self.device = torch.device(device)
        self.pinned = pinned
        self.tokens_per_row = split.tokens_per_row

    def __len__(self) -> int:
        return len(self.split)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.split.nbytes

    def order(self, seed: int, epoch: int) -> Order:
        return self.split.order(seed, epoch)

    def eval_order(self) -> np.ndarray:
        return self.split.eval_order()

    def gather(self, indices: np.ndarray) -> Batch:
        return self.moved(self.split.gather(indices))

    def moved(self, host: Batch) -> Batch:
        """A batch of the host on the device."""
        return to_device(pin(host) if self.pinned else host, self.device)

    def weights(self, indices: np.ndarray) -> int | None:
        return self.split.weights(indices)

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        return self.split.lengths(indices)

    def to(self, device: torch.device | str) -> StreamSplit:
        """The same host data, streamed to another device."""
        return StreamSplit(self.split, device=device, pinned=self.pinned)

    def to_partial(self, device: torch.device | str, *, rows: int) -> Split:
        """The same host data, some of it kept on a device."""
        return self.split.to_partial(device, rows=rows)


def place_split(split: Split, storage: Storage, device: torch.device | str, *, resident_rows: int = 0) -> Split:
    """The split as training reads it; order and batches are the same for any storage.

    Args:
        split: as the source opened it, on the host.
        storage: "resident" puts all of it on the device once, "partial" its first `resident_rows`; "stream" moves
            each batch, "pinned" does so through pinned memory.
        device: where batches must be.
    Raises:
        ValueError: a storage that the plan has not resolved to one of these.
    """
    if storage == "resident":
        return split.to(device)
    if storage == "partial":
        return split.to_partial(device, rows=resident_rows)
    if storage in ("stream", "pinned"):
        host = split.split if isinstance(split, StreamSplit) else split
        pinned = storage == "pinned" and torch.device(device).type != "cpu"
        return StreamSplit(host, device=device, pinned=pinned)
    raise ValueError(f"storage is {storage!r}, expected 'resident', 'partial', 'pinned' or 'stream'")


class PartialTensor:
    """Rows (N, ...) in two parts; what is taken of them is always on the device.

    Args:
        head: rows 0..K-1, on the device.
        tail: the rest, on the host.
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
        """Rows by number (any shape of numbers), on the device."""
        flat = index.reshape(-1)
        inside = flat < self.head.shape[0]
        rows = self._rows(flat, inside)
        return rows if index.ndim == 1 else rows.reshape(*index.shape, *rows.shape[1:])

    def _rows(self, flat: np.ndarray, inside: np.ndarray) -> Tensor:
        if inside.all():
            return self.head.index_select(0, _sent(flat, self.device))
        streamed = self.tail.index_select(0, torch.from_numpy(flat[~inside] - self.head.shape[0]))
        streamed = to_device(pin(streamed) if self.device.type == "cuda" else streamed, self.device)
        if not inside.any():
            return streamed
        rows = torch.empty((len(flat), *self.head.shape[1:]), dtype=self.dtype, device=self.device)
        kept = self.head.index_select(0, _sent(flat[inside], self.device))
        rows.index_copy_(0, _sent(np.flatnonzero(inside), self.device), kept)
        return rows.index_copy_(0, _sent(np.flatnonzero(~inside), self.device), streamed)


Column = Tensor | PartialTensor


def _sent(index: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index)).to(device, non_blocking=True)


def take(column: Column, index: np.ndarray) -> Tensor:
    """Rows of a column by number, where the column is."""
    if isinstance(column, PartialTensor):
        return column.take(index)
    rows = column.index_select(0, _sent(index.reshape(-1), column.device))
    return rows if index.ndim == 1 else rows.reshape(*index.shape, *rows.shape[1:])


def full_tensor(column: Column) -> Tensor:
    """A column that was not parted, as what it is: parts are made once, of what is to be counted or moved no more."""
    assert isinstance(column, Tensor), "this column is in two parts already"
    return column


def keep_first(tensor: Tensor, rows: int, device: torch.device | str) -> Column:
    """The first `rows` rows of a host tensor on `device`, the others left where they are."""
    if rows >= tensor.shape[0]:
        return tensor.to(device)
    return PartialTensor(tensor[:rows].to(device), tensor[rows:])


class ReorderedSplit:
    """Rows in memory, in the order of the row groups they came from."""

    def __init__(self, split: Split, order: Callable[[int, int], Order]) -> None:
        self.split, self._order = split, order
        self.tokens_per_row = split.tokens_per_row

    def __len__(self) -> int:
        return len(self.split)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.split.nbytes

    def order(self, seed: int, epoch: int) -> Order:
        """That of the groups; nothing is read for it."""
        return self._order(seed, epoch)

    def eval_order(self) -> np.ndarray:
        return self.split.eval_order()

    def gather(self, indices: np.ndarray) -> Batch:
        return self.split.gather(indices)

    def weights(self, indices: np.ndarray) -> int | None:
        return self.split.weights(indices)

    def lengths(self, indices: np.ndarray) -> np.ndarray | None:
        return self.split.lengths(indices)

    def to(self, device: torch.device | str) -> ReorderedSplit:
        """On another device, in the same order."""
        return ReorderedSplit(self.split.to(device), self._order)

    def to_partial(self, device: torch.device | str, *, rows: int) -> ReorderedSplit:
        """Some of it there."""
        return ReorderedSplit(self.split.to_partial(device, rows=rows), self._order)
