"""Batch norms over the rows of all workers (`scale.sync_batchnorm`), on any device.

torch's SyncBatchNorm cannot take its place: it needs a GPU and the same number of passes on every worker. Here a worker
without rows takes part with none, so micro-batches may be unequal.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from raytrain.config.messages import abbreviated
from raytrain.errors import InputError, OutOfMemory
from raytrain.train.memory.device import Shortage
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.order import NORMS_RULE, BlockOrder
from raytrain.train.parallel.reduction import Reduction, Result
from raytrain.trainable import Trainable

KEY = "scale.sync_batchnorm"
AVERAGES, SUMS = "averages", "averages the gradients of"
_ARGUMENTS = inspect.signature(torch.nn.functional.batch_norm)


class SyncedForward:
    """The forward of a batch norm, with mean and variance over all workers' micro-batches of one pass while it trains.

    The layer keeps its class and its code: only the call of `torch.nn.functional.batch_norm` inside it computes
    something else, so that what a subclass does around it (an activation, a dropout) stays.
    """

    def __init__(self, part: _BatchNorm, own: Callable[..., Any], members: Members, name: str) -> None:
        self.own, self._part, self._members, self._name = own, part, members, name
        self._reached = False

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """As the layer's forward. Raises InputError: its code computes batch statistics in another way, which cannot be
        synchronized."""
        part, idle = self._part, self._members.idle
        if self._members.workers.world_size == 1 or not (part in self._members.training if idle else part.training):
            return self.own(*inputs, **named)
        mode = _OverWorkers(self._members, self._name)
        before, part.training = part.training, True  # without rows too: it counts its passes as on the other workers
        try:
            with mode:
                output = self.own(*inputs, **named)
        finally:
            part.training = before
        self._reached = self._reached or mode.reached
        if not self._reached:
            raise _not_synchronized(part, self._name, "does not call torch.nn.functional.batch_norm")
        return output


def _not_synchronized(part: nn.Module, name: str, why: str) -> InputError:
    kind = type(part).__name__
    return InputError(
        KEY, got=f"true with the batch norm {name} ({kind}), whose forward {why}",
        expected="batch norms that call torch.nn.functional.batch_norm, as torch.nn.BatchNorm does",
        remedy=f"call it in {kind}.forward, or {KEY} false",
    )  # fmt: skip


class _OverWorkers(TorchFunctionMode):
    """Inside, batch norms that compute statistics do so over all workers; `reached`: whether one was computed."""

    def __init__(self, members: Members, name: str) -> None:
        super().__init__()
        self._members, self._name, self.reached = members, name, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.nn.functional.batch_norm:
            return func(*args, **(kwargs or {}))
        self.reached = True
        given = _ARGUMENTS.bind(*args, **(kwargs or {}))
        given.apply_defaults()
        return self._batch_norm(**given.arguments) if given.arguments["training"] else func(*args, **(kwargs or {}))

    def _batch_norm(
        self, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None,
        bias: Tensor | None, training: bool, momentum: float, eps: float,
    ) -> Tensor:  # fmt: skip
        """As `torch.nn.functional.batch_norm`: (N, C, ...) -> the same shape and dtype."""
        if weight is None:
            weight = input.new_ones(input.shape[1], dtype=torch.float32)
        bias = torch.zeros_like(weight) if bias is None else bias
        members, name = self._members, self._name
        members.meet(name, AVERAGES)
        meet = partial(members.meet, name, SUMS)
        output, mean, variance, count = _Normalise.apply(input, weight, bias, eps, members.workers, members.idle, meet)
        with torch.no_grad():
            if running_mean is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            if running_var is not None:  # the unbiased variance, as torch does
                unbiased = variance * (count / (count - 1).clamp(min=1))
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        return output


class Members:
    """The workers that share statistics.

    Attributes:
        idle: whether this worker's current pass has no rows that count.
        training: the parts that train in such a pass: those of the workers with rows, which are not in eval mode.
    """

    def __init__(self, workers: Workers, parts: list[_BatchNorm]) -> None:
        self.workers, self.parts, self.idle = workers, parts, False
        self.training: set[_BatchNorm] = set()
        self._order: BlockOrder | None = None
        self._calls: dict[tuple[str, str], int] = {}

    def watch(self, order: BlockOrder, names: Iterable[str]) -> None:
        """Compare the collectives of the norms of these names with those of the other workers."""
        self._order = order
        self._calls = {(name, verb): order.call_of(name, verb) for name in names for verb in (AVERAGES, SUMS)}

    def meet(self, name: str, verb: str) -> None:
        """Before a collective of a norm. Raises RunError where another worker calls something else."""
        if self._order is not None:
            self._order.meet(self._calls[name, verb])

    @contextlib.contextmanager
    def without_rows(self) -> Iterator[None]:
        """This worker takes part in a pass of the others; entered before the module is put into eval mode for it."""
        self.idle, self.training = True, {part for part in self.parts if part.training}
        try:
            yield
        finally:
            self.idle = False


class _Normalise(torch.autograd.Function):
    """Statistics are combined in float64 from each worker's mean and variance, in the order of the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        workers: Workers,
        idle: bool,
        meet: Callable[[], None],
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
        ctx.dtype, ctx.meet = input.dtype, meet
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
        ctx.meet()
        ctx.workers.all_reduce([sums])
        of_grad, of_product = ((row / ctx.count).to(normal.dtype).view(ctx.shape) for row in sums)
        scale = (weight.double() * inverse).to(normal.dtype).view(ctx.shape)
        by_input = (grad - of_grad - normal * of_product) * scale
        if ctx.idle:
            by_input = torch.zeros_like(by_input)
        return by_input.to(ctx.dtype), own[1].to(weight.dtype), own[0].to(weight.dtype), None, None, None, None


def synchronize(module: nn.Module, workers: Workers) -> Members | None:
    """Let the batch norms of a module compute over all workers, in place; None where it has none."""
    found = {name: part for name, part in module.named_modules() if isinstance(part, _BatchNorm)}
    members = Members(workers, list(found.values()))
    for name, part in found.items():
        own = part.forward
        if isinstance(own, SyncedForward):  # of an earlier session of this module
            own = own.own
        elif getattr(own, "__func__", None) is nn.SyncBatchNorm.forward:  # needs a GPU, and equally many passes
            own = partial(_BatchNorm.forward, part)
        elif isinstance(part, nn.SyncBatchNorm):
            raise _not_synchronized(part, name, "may communicate by itself")
        part.forward = SyncedForward(part, own, members, name)  # type: ignore[method-assign]
    return members if found else None


def refuse_torchs_own(module: nn.Module, workers: Workers) -> None:
    """Raise InputError for torch's SyncBatchNorm on several workers without `scale.sync_batchnorm`: it waits for the
    other workers in each pass, and they may have fewer."""
    own = [name for name, part in module.named_modules() if isinstance(part, nn.SyncBatchNorm)]
    if own and workers.world_size > 1:
        raise InputError(
            KEY, got=f"false with torch.nn.SyncBatchNorm ({abbreviated(own, 3)}) on {workers.world_size} workers",
            expected="true, which computes it on any device and for unequal micro-batches",
            remedy=f"set {KEY} true, or use torch.nn.BatchNorm",
        )  # fmt: skip


class CollectiveReduction(Reduction):
    """A `Reduction` whose passes contain collectives, which a worker without memory cannot leave: the attempt ends,
    and the next one has half the micro-batch size.

    Attributes:
        order: compares the collectives of batch norms with those of the other workers.
    """

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        super().__init__(trainable, workers=workers, device=device)
        self.order = BlockOrder(workers, device=device, rule=NORMS_RULE)

    def overlap(self, wanted: bool) -> None:
        """As in `Reduction`: sums must not interleave with the collectives of a backward."""

    @contextlib.contextmanager
    def forward_pass(self, *, idle: bool = False) -> Iterator[None]:
        """As in `Reduction`. Raises RunError where another worker calls other batch norms."""
        self.order.begin()
        yield
        if not torch.is_grad_enabled():
            self.order.end()

    def run_or_shortage(self, passes: Callable[[], Result]) -> Result:
        """As in `Reduction`. Raises OutOfMemory, and RunError as `forward_pass`."""
        result = super().run_or_shortage(passes)
        if isinstance(result, Shortage):
            raise OutOfMemory(str(result))
        self.order.end()
        return result
