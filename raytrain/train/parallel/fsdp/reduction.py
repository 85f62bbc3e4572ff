"""The step's reduction under `fsdp`: gradients are summed into shards inside each backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raytrain.errors import CollectiveFailed, OutOfMemory, first_line
from raytrain.train.memory.oom import Shortage, StepDropped, run_or_shortage, step_dropped
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.train.parallel.reduction import Losses
from raytrain.trainable import Trainable

Made = TypeVar("Made")


class ShardGradients(GradientBuffers):
    """FSDP2 adds what it reduces into a `.grad` that is there: these are, from before the first backward on."""

    def own(self, parameter: nn.Parameter) -> Tensor:
        """This worker's rows of it."""
        return local(parameter)

    def as_grad(self, parameter: nn.Parameter, view: Tensor) -> Tensor:
        """The view as a gradient of the whole parameter."""
        return like(parameter, view)


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """What this worker holds of a tensor: its rows of a sharded one, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(whole: Tensor, own: Tensor) -> Tensor:
    """`own`, this worker's rows, as a tensor sharded as `whole` is, sharing memory; itself where that is not sharded.
    No communication."""
    if not isinstance(whole, DTensor):
        return own
    return DTensor.from_local(
        own, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class ShardedReduction:
    """Each backward reduce-scatters block by block, so that no worker ever holds the gradients of the whole model: kept
    unreduced until the last of a step's micro-batches, they would take as much as the weights that sharding saved.

    An out-of-memory inside a pass cannot be undone: the others sit in a collective that this worker has left. It is
    raised, the attempt ends, and the next one has half the micro-batch (`raytrain.execution.failure_policy`).
    """

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        named = [(name, one) for name, one in trainable.module.named_parameters() if one.requires_grad]
        self.gradients: GradientBuffers = ShardGradients([parameter for _, parameter in named])
        self._names = [name for name, _ in named]
        self._workers, self._device = workers, device
        self._bad = torch.zeros((), dtype=torch.bool, device=device)

    def passed(self, passes: Callable[[], Losses], *, flags: Callable[[], list[int]]) -> tuple[Losses, list[int]]:
        """As in `raytrain.train.parallel.reduction.Reduction`. Raises OutOfMemory alone."""
        early = self._workers.start_all_reduce_ints(flags()) if self._device.type == "cpu" else None
        came = self.run_or_shortage(passes)
        self._bad = ~torch.isfinite(came[0] + came[1])
        return came, (early or self._workers.start_all_reduce_ints(flags()))()

    def run_or_shortage(self, passes: Callable[[], Made]) -> Made:
        """What the passes return.

        Raises:
            OutOfMemory: they had no memory.
            CollectiveFailed: another worker is gone; no fault of what was computed, though torch raises RuntimeError.
        """
        try:
            came = run_or_shortage(passes, device=self._device, who=f"rank {self._workers.rank}")
        except RuntimeError as error:
            if not _is_of_a_meeting(error):
                raise
            text = f"a meeting of {self._workers.world_size} workers inside a pass failed: {first_line(error)}"
            raise CollectiveFailed(text) from error
        if isinstance(came, Shortage):
            raise OutOfMemory(str(came))
        return came

    def dropped(self, came: object) -> StepDropped:
        """As in `raytrain.train.parallel.reduction.Reduction`: of what is done outside the passes."""
        return step_dropped(self._workers, came)

    def overlap(self, wanted: bool) -> None:
        """As in `raytrain.train.parallel.reduction.Reduction`: each block is summed inside each backward anyway."""

    def last_pass(self) -> None:
        """As in `raytrain.train.parallel.reduction.Reduction`: every pass is alike."""

    def sum_of_squares(self) -> Tensor:
        """As in `raytrain.train.parallel.reduction.Reduction`: over all shards, and not finite where the loss of a
        worker was not."""
        squares = self.gradients.sum_of_squares()
        squares = torch.where(self._bad, torch.full_like(squares, torch.nan), squares)
        self._workers.all_reduce([squares])
        return squares

    def nonfinite(self) -> list[str]:
        """As in `raytrain.train.parallel.reduction.Reduction`: in the shard of any worker. Collective."""
        bad = self._workers.all_reduce_ints([int(not good) for good in self.gradients.finite()])
        return [name for name, count in zip(self._names, bad, strict=True) if count]


def _is_of_a_meeting(error: RuntimeError) -> bool:
    """NCCL's failures have a type; gloo's are plain ones, with the place in gloo where a connection ended."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
