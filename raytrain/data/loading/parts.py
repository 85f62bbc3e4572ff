"""A column of which the first rows are on the device and the rest on the host: what partial residency is made of."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raytrain.data.loading.transfer import pin, to_device


class PartTensor:
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


Column = Tensor | PartTensor


def _sent(index: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index)).to(device, non_blocking=True)


def take(column: Column, index: np.ndarray) -> Tensor:
    """Rows of a column by number, where the column is."""
    if isinstance(column, PartTensor):
        return column.take(index)
    rows = column.index_select(0, _sent(index.reshape(-1), column.device))
    return rows if index.ndim == 1 else rows.reshape(*index.shape, *rows.shape[1:])


def whole(column: Column) -> Tensor:
    """A column that was not parted, as what it is: parts are made once, of what is to be counted or moved no more."""
    assert isinstance(column, Tensor), "this column is in two parts already"
    return column


def parted(tensor: Tensor, rows: int, device: torch.device | str) -> Column:
    """The first `rows` rows of a host tensor on `device`, the others left where they are."""
    if rows >= tensor.shape[0]:
        return tensor.to(device)
    return PartTensor(tensor[:rows].to(device), tensor[rows:])
