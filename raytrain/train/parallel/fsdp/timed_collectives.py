"""The meetings inside the passes of a sharded model, with the seconds that this worker spends in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain.train.parallel.collectives import Workers

#: As torch names them since 2.13, or before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class TimedCollective:
    """What FSDP2 asks of a communication of one's own (`torch.distributed.fsdp`, `set_custom_all_gather`).

    The seconds are added to `Workers.wait_s`. On a CPU a meeting is over when the call returns: FSDP2 waits for it at
    once anyway, as nothing is fetched ahead here. On a GPU the device waits, and the host has only asked for it.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is gathered or summed."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _timed(self, begin: float, work: Any, tensor: Tensor) -> Any:
        if work is not None and tensor.device.type == "cpu":
            work.wait()
        self._workers.wait_s += time.perf_counter() - begin
        return work


class TimedAllGather(TimedCollective):
    """Brings a block's parameters together."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """As `dist.all_gather_single`."""
        begin = time.perf_counter()
        work = _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return self._timed(begin, work, output_tensor)


class TimedReduceScatter(TimedCollective):
    """Sums a block's gradients and leaves each worker its own rows of them."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        """As `dist.reduce_scatter_single`."""
        begin = time.perf_counter()
        work = _scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return self._timed(begin, work, output_tensor)
