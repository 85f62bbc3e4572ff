"""Records the experts of each token in traced steps; kept on the device until the next logged row, then written."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from experts.routing.router import TopKRouter

#: Traced steps without a logged row whose choices are kept.
MOST_KEPT = 64


class RoutingTrace:
    """Records every N steps the choices of the first micro-batch on rank 0.

    Args:
        routers: of the model, in the order of the layers; each starts to keep its first forward of a step.
        every: N.

    A file is a NumPy archive without pickles: `indices` (L, B, S, K) int16, the experts of each token, best first;
    `weights` of the same shape, zero where the token was dropped; `valid` (B, S), false for padding; `step`. Files are
    written with the logged rows; between two of them, the last `MOST_KEPT` traced steps are kept on the device.
    """

    def __init__(self, routers: Sequence[TopKRouter], *, every: int) -> None:
        self.routers, self.every = list(routers), every
        self._kept: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        for router in self.routers:
            router.traced = True

    def end_step(self, step: int) -> None:
        """Keep the choices of `step` if it is traced. Reads nothing from the device."""
        seen = [router.seen for router in self.routers]
        self.forget()
        found = [one for one in seen if one is not None]
        if step % self.every or len(found) < len(seen) or not found:  # without rows on this worker in this step
            return
        valid = found[0][2]
        self._kept[step] = (
            torch.stack([indices.to(torch.int16) for indices, _, _ in found]),
            torch.stack([weights for _, weights, _ in found]),
            torch.ones_like(found[0][0][..., 0], dtype=torch.bool) if valid is None else valid,
        )
        if len(self._kept) > MOST_KEPT:
            del self._kept[min(self._kept)]

    def forget(self) -> None:
        """Forget the choices since the last step."""
        for router in self.routers:
            router.seen = None

    def take(self) -> dict[int, bytes]:
        """Return step -> file content of the kept steps, and forget them; reads the device."""
        kept, self._kept = self._kept, {}
        return {step: _archive(step, *tensors) for step, tensors in kept.items()}


def _archive(step: int, indices: Tensor, weights: Tensor, valid: Tensor) -> bytes:
    buffer = io.BytesIO()
    tensors = (indices.cpu().numpy(), weights.cpu().numpy(), valid.cpu().numpy())
    np.savez_compressed(buffer, indices=tensors[0], weights=tensors[1], valid=tensors[2], step=np.int64(step))
    return buffer.getvalue()


def build_trace(routers: Sequence[TopKRouter], every: int | None) -> RoutingTrace | None:
    """Build a trace on rank 0; None without `every` and on other ranks."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    return RoutingTrace(routers, every=every) if every is not None and first else None
