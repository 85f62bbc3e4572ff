"""Batch norms over the rows of all workers (`scale.sync_batchnorm`), on any device.

torch's SyncBatchNorm needs a GPU and the same number of passes on every worker. Here a worker without rows takes part
with none, so micro-batches may be unequal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from raytrain.errors import OutOfMemory
from raytrain.train.memory.oom import Shortage
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.reduction import FlatReduction, Result


class SyncedBatchNorm(_BatchNorm):
    """A batch norm that normalises with the mean and variance over all workers' micro-batches of one pass.

    Made from an existing layer by `synchronize`; parameters, buffers and their names stay the same.

    Attributes:
        members: the workers, and whether this one has no rows in the current pass.
    """

    members: Members

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, seen {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, ...) -> the same shape and dtype."""
        idle = self.members.idle
        if not (self.training or idle) or self.members.workers.world_size == 1:
            return super().forward(input)
        self._check_input_dim(input)
        weight = input.new_ones(input.shape[1], dtype=torch.float32) if self.weight is None else self.weight
        bias = torch.zeros_like(weight) if self.bias is None else self.bias
        output, mean, variance, count = _Normalise.apply(input, weight, bias, self.eps, self.members.workers, idle)
        if self.track_running_stats:
            self._record(mean, variance, count)
        return output

    @torch.no_grad()
    def _record(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics as torch does: with the unbiased variance."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        if self.momentum is None:
            share = self.num_batches_tracked.double().reciprocal()
            self.running_mean.add_((share * (mean - self.running_mean)).to(self.running_mean.dtype))
            self.running_var.add_((share * (unbiased - self.running_var)).to(self.running_var.dtype))
        else:
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)


class Members:
    """The workers that share statistics.

    Attributes:
        idle: whether this worker's current pass has no rows that count.
    """

    def __init__(self, workers: Workers) -> None:
        self.workers, self.idle = workers, False

    @contextlib.contextmanager
    def without_rows(self) -> Iterator[None]:
        """This worker takes part in a pass of the others."""
        self.idle = True
        try:
            yield
        finally:
            self.idle = False


class _Normalise(torch.autograd.Function):
    """Statistics are combined in float64 from each worker's mean and variance, in the order of the ranks."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, eps: float, workers: Workers, idle: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels, dims = input.shape[1], [0, *range(2, input.dim())]
        wide = input if input.dtype == torch.float64 else input.float()
        table = torch.zeros(workers.world_size, 2 * channels + 1, dtype=torch.float64, device=input.device)
        if not idle and input.numel():
            variance, mean = torch.var_mean(wide, dims, correction=0)
            own = table[workers.rank]
            own[:channels], own[channels:-1], own[-1] = mean, variance, input.numel() // channels
        workers.all_reduce([table])
        means, variances, counts = table[:, :channels], table[:, channels:-1], table[:, -1:]
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        variance = (counts * (variances + (means - mean).square())).sum(0) / count
        inverse = (variance + eps).rsqrt()
        shape = (1, channels, *[1] * (input.dim() - 2))
        normal = (wide - mean.to(wide.dtype).view(shape)) * inverse.to(wide.dtype).view(shape)
        ctx.save_for_backward(normal, weight, inverse)
        ctx.workers, ctx.idle, ctx.count, ctx.dims, ctx.shape = workers, idle, count, dims, shape
        ctx.dtype = input.dtype
        output = normal * weight.to(wide.dtype).view(shape) + bias.to(wide.dtype).view(shape)
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        normal, weight, inverse = ctx.saved_tensors
        grad = grad.to(normal.dtype)
        if ctx.idle:
            grad = torch.zeros_like(grad)
        sums = torch.stack([grad.sum(ctx.dims).double(), (grad * normal).sum(ctx.dims).double()])
        own = sums.clone()
        ctx.workers.all_reduce([sums])
        of_grad, of_product = ((row / ctx.count).to(normal.dtype).view(ctx.shape) for row in sums)
        scale = (weight.double() * inverse).to(normal.dtype).view(ctx.shape)
        by_input = (grad - of_grad - normal * of_product) * scale
        if ctx.idle:
            by_input = torch.zeros_like(by_input)
        return by_input.to(ctx.dtype), own[1].to(weight.dtype), own[0].to(weight.dtype), None, None, None


def synchronize(module: nn.Module, workers: Workers) -> Members | None:
    """Turn the batch norms of a module into `SyncedBatchNorm`, in place; None where it has none."""
    found = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    members = Members(workers)
    for part in found:
        part.__class__ = SyncedBatchNorm
        assert isinstance(part, SyncedBatchNorm)
        part.members = members
    return members if found else None


class CollectiveReduction(FlatReduction):
    """A `FlatReduction` whose passes contain collectives, which a worker without memory cannot leave: the attempt ends,
    and the next one has half the micro-batch size."""

    def run_or_shortage(self, passes: Callable[[], Result]) -> Result:
        """As in `Reduction`. Raises OutOfMemory."""
        result = super().run_or_shortage(passes)
        if isinstance(result, Shortage):
            raise OutOfMemory(str(result))
        return result
