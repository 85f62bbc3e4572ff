"""Sums of squares of gradients in float64, for the clip norm.

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


def sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of all gradients, a float64 scalar on the device of the first.

    Args:
        gradients: contiguous tensors of any shape and floating dtype, at least one.
    """
    sums = [_of_one(gradient.detach().view(-1)) for gradient in gradients]
    return sums[0] if len(sums) == 1 else torch.stack([one.to(sums[0].device) for one in sums]).sum()


def _of_one(flat: Tensor) -> Tensor:
    if flat.device.type != "cpu":  # its kernel converts to float64 while it reads
        return torch.linalg.vector_norm(flat, dtype=torch.float64).square()
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
