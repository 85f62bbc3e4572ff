"""The collectives inside the passes of a sharded model, timed on this worker."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.train.parallel.collectives import Workers

#: The names since torch 2.13, or the older ones.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TimedCollective:
    """Interface of a custom FSDP2 collective (`torch.distributed.fsdp`, `set_custom_all_gather`).

    Adds the seconds of each call to `Workers.wait_s`. On a CPU the collective has finished when the call returns; FSDP2
    would wait for it immediately anyway, since nothing is prefetched. On a GPU the stream of the collective waits, and
    neither the host nor the stream of the computation.

    Args:
        meet: called before each collective (`raytrain.train.parallel.order`).
    """

    def __init__(self, workers: Workers, meet: Callable[[], None]) -> None:
        self._workers, self._meet = workers, meet

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the buffer of a collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _timed(self, start: float, work: Any, tensor: Tensor) -> Any:
        if work is not None and tensor.device.type == "cpu":
            work.wait()
        self._workers.wait_s += time.perf_counter() - start
        return work


class TimedAllGather(TimedCollective):
    """Gathers the parameters of a block."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Same signature and result as `dist.all_gather_single`."""
        start = time.perf_counter()
        self._meet()
        work = _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return self._timed(start, work, output_tensor)


class TimedReduceScatter(TimedCollective):
    """Sums the gradients of a block and leaves each worker its own rows."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """Same signature and result as `dist.reduce_scatter_single`."""
        start = time.perf_counter()
        self._meet()
        work = _scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return self._timed(start, work, output_tensor)
