"""Sums of squares of gradients, for the clip norm: their rows in float32, and the sum of the rows in float64.

The sum must not depend on where a gradient lies: each expert's is computed by the process that holds it, at any offset
of any buffer and with any number of threads, and the norm has to be the same for every placement. A gradient is
therefore divided into the rows of its last dimension, which are the same whether it is a part of a stack, of a shard,
or alone. torch reduces a row in one thread and in one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

#: Longest row; a longer one is divided.
ROW = 2**12
#: Elements that a CPU converts to float64 at a time, a multiple of `ROW`. They fit in the cache: converting a large
#: buffer at once costs twice as much as the sum.
PIECE = 2**16
#: Rows whose float64 squares are summed at a time: torch divides a longer sum among its threads.
SUMMED_ROWS = 2**14
#: A smaller sum is computed in float64 throughout: squares that float32 cannot hold could be a noticeable part of it.
SMALLEST = 1e-18


class SquareSum:
    """The sum of squares of tensors whose values change, in their memory.

    Args:
        gradients: contiguous tensors of any shape and floating dtype, at least one. On a CPU, those in float32 are
            summed with a relative error of about 1e-7, all others with that of float64.
    """

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        self._device = gradients[0].device
        in_rows = [one.detach() for one in gradients if one.device.type == "cpu" and one.dtype == torch.float32]
        self._rows = [view for one in _joined(in_rows) for view in _views(one)]
        self._exact = in_rows
        self._others = [
            one.detach().view(-1) for one in gradients if one.device.type != "cpu" or one.dtype != torch.float32
        ]
        counts = [view.shape[:-1].numel() for view in self._rows]
        self._norms = torch.empty(sum(counts))
        self._on_host = np.zeros(())
        self._total = torch.from_numpy(self._on_host)  # the same memory: no step reads a tensor
        outs = self._norms.split(counts) if counts else ()
        self._outs = [out.view(view.shape[:-1]) for out, view in zip(outs, self._rows, strict=True)]

    def __call__(self) -> Tensor:
        """The sum as a float64 scalar on the device of the tensors."""
        if self._device.type != "cpu":
            return sum_on_device(self._others)
        sums = [_exact_sum(one) for one in self._others]
        if self._exact:
            sums.append(self._sum_of_rows())
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _sum_of_rows(self) -> Tensor:
        for view, out in zip(self._rows, self._outs, strict=True):
            torch.linalg.vector_norm(view, dim=-1, out=out)
        squares = self._norms.double().square_()
        sums = [part.sum() for part in squares.split(SUMMED_ROWS)]
        found = sums[0] if len(sums) == 1 else torch.stack(sums).sum()
        self._total.copy_(found)
        if SMALLEST < float(self._on_host) < torch.inf:
            return found
        return torch.stack([_exact_sum(one.view(-1)) for one in self._exact]).sum()


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all gradients, a float64 scalar on the device of the first; see `SquareSum`."""
    return SquareSum(gradients)()


def sum_on_device(gradients: Sequence[Tensor]) -> Tensor:
    """As `sum_of_squares` on a GPU."""
    return _squares(gradients).sum()


def _joined(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor as (rows, length of a row); neighbours in memory with rows of equal length are one, to call torch
    less often."""
    found: list[Tensor] = []
    for gradient in gradients:
        if not gradient.numel():
            continue
        row = gradient.shape[-1] if gradient.ndim else 1
        row = ROW if row % ROW == 0 else row
        view = gradient.view(-1, row)
        last = found[-1] if found else None
        # not long rows: the order of their parts, and so the last bit, would depend on what lies side by side
        if last is not None and last.shape[1] == row <= ROW and _follows(last, view):
            size = (last.shape[0] + view.shape[0], row)
            found[-1] = last.as_strided(size, (row, 1))
        else:
            found.append(view)
    return found


def _follows(one: Tensor, other: Tensor) -> bool:
    end = one.data_ptr() + one.nbytes
    return end == other.data_ptr() and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _views(rows: Tensor) -> list[Tensor]:
    """Views whose last dimension is what is summed at a time: the rows, or parts of long ones."""
    count, length = rows.shape
    if length <= ROW:
        return [rows]
    parts = length // ROW
    begin = rows.storage_offset()
    return [
        rows.as_strided((count, parts, ROW), (length, ROW, 1)),
        rows.as_strided((count, length - parts * ROW), (length, 1), begin + parts * ROW),
    ]


def _exact_sum(flat: Tensor) -> Tensor:
    """The sum in float64 throughout."""
    converted = torch.empty(min(PIECE, flat.numel()), dtype=torch.float64)
    sums = []
    for piece in flat.split(PIECE):
        numbers = piece if piece.dtype == torch.float64 else converted[: piece.numel()].copy_(piece)
        whole = piece.numel() // ROW * ROW
        if whole:
            sums.append(torch.linalg.vector_norm(numbers[:whole].view(-1, ROW), dim=1).square().sum())
        if whole < piece.numel():
            sums.append(torch.linalg.vector_norm(numbers[whole:]).square())
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def squares_of_each(groups: Sequence[Sequence[Tensor]]) -> list[float]:
    """The sum of squares of each group of tensors on one device, at least one in each; see `SquareSum`. One read."""
    if not groups or groups[0][0].device.type == "cpu":
        return [sum_of_squares(group).item() for group in groups]
    return _in_few_kernels(groups)


def _in_few_kernels(groups: Sequence[Sequence[Tensor]]) -> list[float]:
    squares = iter(_squares([one.detach() for group in groups for one in group]).tolist())
    return [sum(next(squares) for _ in group) for group in groups]


def _squares(tensors: Sequence[Tensor]) -> Tensor:
    """Of each tensor, in few kernels, which convert to float64 while they read, and sum in an order that depends on its
    size and alignment only."""
    norms = torch._foreach_norm(list(tensors), 2, torch.float64)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).square()
