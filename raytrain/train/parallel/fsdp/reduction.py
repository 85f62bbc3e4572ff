"""The reduction of `fsdp`: gradients are summed into shards inside each backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytrain.errors import OutOfMemory, lost_in
from raytrain.train.memory.oom import Shortage, StepDropped, run_or_shortage, step_dropped
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.train.parallel.fsdp.passes import ShardedPasses, explained, is_of_a_collective
from raytrain.train.parallel.reduction import Passed, Summed, agreed_weight
from raytrain.trainable import Trainable

Result = TypeVar("Result")


class ShardGradients(GradientBuffers):
    """Flat buffers of this worker's rows of each gradient. FSDP2 adds into a `.grad` that exists already.

    Args:
        used: ids of the parameters that got a gradient (`raytrain.train.parallel.fsdp.passes`).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, used: set[int]) -> None:
        super().__init__(parameters)
        self._used = used

    def unused(self) -> list[bool]:
        """As in `GradientBuffers`; FSDP2 sums zeros for a parameter without a gradient."""
        return [id(parameter) not in self._used for parameter, *_ in self._views]

    def zero_(self) -> None:
        """As in `GradientBuffers`."""
        super().zero_()
        self._used.clear()

    def own(self, parameter: nn.Parameter) -> Tensor:
        """This worker's rows of it."""
        return local(parameter)

    def as_grad(self, parameter: nn.Parameter, view: Tensor) -> Tensor:
        """The view as the gradient of the sharded parameter."""
        return like(parameter, view)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """This worker's rows of a sharded tensor, sharing memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(whole: Tensor, own: Tensor) -> Tensor:
    """`own`, this worker's rows, as a tensor sharded like `whole`, sharing memory; `own` itself where `whole` is not
    sharded. No communication."""
    if not isinstance(whole, DTensor):
        return own
    return DTensor.from_local(
        own, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class ShardedReduction:
    """Each backward reduce-scatters block by block, so that no worker ever holds the gradients of the whole model: kept
    unreduced until the last micro-batch of a step, they would take as much memory as sharding saved on the weights.

    An out-of-memory error inside a pass is fatal, since the other workers wait in a collective that this one has left.
    The attempt ends, and the next one has half the micro-batch size (`raytrain.execution.recovery.failure_policy`).
    """

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device, passes: ShardedPasses) -> None:
        named = [(name, one) for name, one in trainable.module.named_parameters() if one.requires_grad]
        self.gradients: GradientBuffers = ShardGradients([parameter for _, parameter in named], used=passes.used)
        self._names = [name for name, _ in named]
        self._workers, self._device, self._passes = workers, device, passes
        self.order = passes.order
        self._bad = torch.zeros((), dtype=torch.bool, device=device)

    def passed(self, passes: Callable[[], Passed], *, flags: Callable[[], list[int]]) -> Summed:
        """As in `Reduction`; raises OutOfMemory and never StepDropped."""
        result = self.run_or_shortage(passes)
        self._passes.end()
        self._bad = ~torch.isfinite(result.loss + result.aux)
        unused = self.gradients.unused()
        *summed, absent, told = self._workers.all_reduce_ints([*flags(), int(any(unused)), int(result.told)])
        weight = agreed_weight(self._workers, self.gradients, result, unused, [absent > 0, told > 0])
        return Summed(result, summed, weight)

    def forward_pass(self, *, idle: bool = False) -> AbstractContextManager[None]:
        """As in `Reduction`. Raises RunError where another worker calls other blocks."""
        return self._passes.forward_pass(idle=idle)

    def run_or_shortage(self, passes: Callable[[], Result]) -> Result:
        """Run passes of this worker.

        Raises:
            OutOfMemory: memory ran out.
            InputError: the model does something that shards do not allow.
            CollectiveFailed: a collective inside a pass failed, as where another worker has died.
        """
        try:
            with explained():
                result = run_or_shortage(passes, device=self._device, who=f"rank {self._workers.rank}")
        except RuntimeError as error:
            if not is_of_a_collective(error):
                raise
            raise lost_in(f"a collective of {self._workers.world_size} workers inside a pass", error) from error
        if isinstance(result, Shortage):
            raise OutOfMemory(str(result))
        return result

    def dropped(self, result: object) -> StepDropped:
        """As in `Reduction`; for work outside the passes."""
        return step_dropped(self._workers, result)

    def overlap(self, wanted: bool) -> None:
        """As in `Reduction`: each block is summed inside each backward."""

    def last_pass(self) -> None:
        """As in `Reduction`: all passes are alike."""

    def sum_of_squares(self) -> Tensor:
        """As in `Reduction`: over all shards; NaN where the loss of a worker
        was not finite."""
        squares = self.gradients.sum_of_squares()
        squares = torch.where(self._bad, torch.full_like(squares, torch.nan), squares)
        self._workers.all_reduce([squares])
        return squares

    def nonfinite(self) -> list[str]:
        """As in `Reduction`: in the shards of all workers. Collective."""
        bad = self._workers.all_reduce_ints([int(not good) for good in self.gradients.finite()])
        return [name for name, count in zip(self._names, bad, strict=True) if count]
