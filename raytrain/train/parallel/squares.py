"""Sums of squares of gradients, for the clip norm: rows of them in float32, the rest in float64.

The sum must not depend on where a gradient lies: each expert's is computed by the process that holds it, at any offset
of any buffer and with any number of threads, and the norm has to be the same to the last bit for every placement.
torch reduces one row of a matrix in one thread and in one order, so the gradients are summed in rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements that a CPU sums in one row.
ROW = 2**12
#: Elements that a CPU converts to float64 at a time, a multiple of `ROW`. They fit in the cache: converting a large
#: buffer at once costs twice as much as the sum.
PIECE = 2**16
#: A smaller sum is computed in float64 throughout: squares that float32 cannot hold could be a noticeable part of it.
SMALLEST = 1e-18


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all gradients, a float64 scalar on the device of the first.

    Args:
        gradients: contiguous tensors of any shape and floating dtype, at least one. On a CPU, those in float32 are
            summed with a relative error of about 1e-7, all others with that of float64.
    """
    sums = [_of_one(gradient.detach().view(-1)) for gradient in gradients]
    return sums[0] if len(sums) == 1 else torch.stack([one.to(sums[0].device) for one in sums]).sum()


def _of_one(flat: Tensor) -> Tensor:
    if flat.device.type != "cpu":  # its kernel converts to float64 while it reads
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
    if flat.dtype == torch.float32:
        found = _in_float32(flat)
        if SMALLEST < found.item() < torch.inf:
            return found
    return _in_float64(flat)


def _in_float32(flat: Tensor) -> Tensor:
    """The sum of squares: rows in float32, their sums in float64. A fifth of the time of `_in_float64`."""
    whole = flat.numel() // ROW * ROW
    norms = [torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1)] if whole else []
    if whole < flat.numel():
        norms.append(torch.linalg.vector_norm(flat[whole:], dim=0, keepdim=True))
    # summed in pieces: torch divides a longer sum among threads
    sums = [part.double().square().sum() for one in norms for part in one.split(PIECE // 4)]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)


def _in_float64(flat: Tensor) -> Tensor:
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
