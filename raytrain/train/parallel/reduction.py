"""Sums a step's gradients over the workers: the `Reduction` protocol, and `FlatReduction` for replicated models.

`data_parallel` and `expert_parallel` compute their passes without communication between the workers and then sum flat
buffers (`FlatReduction`); `fsdp` sums inside the passes (`raytrain.train.parallel.fsdp.reduction`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from raytrain.train.memory.oom import Shortage, StepDropped, run_or_shortage, step_dropped
from raytrain.train.parallel.buckets import BUCKET_BYTES, BucketSums
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers, HeldGradients
from raytrain.trainable import Trainable

Result = TypeVar("Result")


class Passed(NamedTuple):
    """What this worker's passes of a step add up to.

    Attributes:
        loss, aux: its shares of the loss and of the auxiliary losses; float64 scalars on the device.
        weight: of its micro-batches, by what their losses say they are means over.
        told: whether that differs from what the loader has counted.
    """

    loss: Tensor
    aux: Tensor
    weight: float = 0.0
    told: bool = False


class Summed(NamedTuple):
    """What all workers know after the gradients are summed.

    Attributes:
        own: of this worker.
        flags: the sums of the workers' flags.
        weight: of the step, where a loss has told another one than the loader; else None.
    """

    own: Passed
    flags: list[int]
    weight: float | None = None


class Reduction(Protocol):
    """How gradients are summed. Every method but `run_or_shortage`, `last_pass` and, without
    collectives in the passes, `forward_pass` is a collective.

    Attributes:
        gradients: where backward accumulates, and what norm, clip and optimizer use after `passed`.
    """

    gradients: GradientBuffers

    def passed(self, passes: Callable[[], Passed], *, flags: Callable[[], list[int]]) -> Summed:
        """Run this worker's passes and sum the gradients over the workers.

        Afterwards `gradients` hold the sum, with a NaN where the loss of a worker was not finite, and without those
        that no worker has computed (`GradientBuffers.leave_out`).

        Raises:
            StepDropped: a worker ran out of memory, and all can retry the step.
            OutOfMemory: this worker ran out of memory, and the others cannot continue without it.
        """
        ...

    def forward_pass(self, *, idle: bool = False) -> AbstractContextManager[None]:
        """A context around the forward of each pass; where gradients are off, the pass ends with it.

        Args:
            idle: the pass has no rows of this worker.
        """
        ...

    def run_or_shortage(self, passes: Callable[[], Result]) -> Result | Shortage:
        """Run passes of this worker; a `Shortage` where memory ran out and the other workers continue without it."""
        ...

    def dropped(self, result: object) -> StepDropped:
        """The error that all workers raise together where the `result` of one is a `Shortage`; gradients of the others
        are dropped."""
        ...

    def overlap(self, wanted: bool) -> None:
        """Whether, from the next step on, sums begin inside the last backward of a step where possible."""
        ...

    def last_pass(self) -> None:
        """Announce that the next backward is the last of this worker's passes; no collective."""
        ...

    def sum_of_squares(self) -> Tensor:
        """Of all gradients after `passed`: a float64 scalar on the device, the same on every worker."""
        ...

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradients are not finite. Reads the device."""
        ...


def agreed_weight(
    workers: Workers, gradients: GradientBuffers, own: Passed, unused: Sequence[bool], raised: Sequence[bool]
) -> float | None:
    """Leave out the gradients that no worker has, and return the step's weight where a loss has told one. Collective
    only where something is `raised`, (an unused parameter, a weight that a loss has told) on any worker.

    Args:
        unused: this worker's parameters without a gradient.
    """
    if not any(raised):
        return None
    weights, *absent = zip(*workers.all_gather_floats([own.weight, *map(float, unused)]), strict=True)
    gradients.leave_out([all(column) for column in absent])
    return sum(weights) if raised[1] else None


class FlatReduction:
    """A `Reduction` by one all-reduce for each flat buffer, after the passes or as soon as a buffer is complete in the
    last one (`raytrain.train.parallel.buckets`).

    Attributes:
        sums: runs the all-reduces.
    """

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        own = [parameter for parameter in trainable.module.parameters() if parameter.requires_grad]
        size = BUCKET_BYTES["cpu" if device.type == "cpu" else "cuda"]
        several = workers.world_size > 1
        self.gradients = GradientBuffers(own, bucket_bytes=size, with_flags=True) if several else HeldGradients(own)
        self.workers = workers
        self.sums = BucketSums(self.gradients, workers=workers)
        self._trainable, self._device = trainable, device

    def passed(self, passes: Callable[[], Passed], *, flags: Callable[[], list[int]]) -> Summed:
        """As in `Reduction`.

        What a worker finds in its passes (a shortage of memory, ...) travels with the gradients, as a collective of its
        own would cost some percent of a step: on a CPU inside the first buffer; on a GPU, whose memory the host does
        not read, among the flags.
        """
        workers, inside = self.workers, self._device.type == "cpu"
        pending = workers.start_all_reduce_ints(flags()) if inside else None  # runs while the passes compute
        with self.sums.inside():
            result = self.run_or_shortage(passes)
        short = isinstance(result, Shortage)
        unused = [] if short else self.gradients.unused()
        raised = [short, any(unused), not short and result.told]
        pending = pending or workers.start_all_reduce_ints([*flags(), *map(int, raised)])
        self.gradients.flag(raised)
        if not short:  # the gradients may be finite although the loss is not
            self.gradients.mark_(result.loss + result.aux)
        self.sums.finish(learn=not short)
        summed = pending()
        if not inside:
            summed, raised = summed[: -len(raised)], [count > 0 for count in summed[-len(raised) :]]
        elif workers.world_size > 1:
            raised = self.gradients.flagged()
        if raised[0] or isinstance(result, Shortage):
            raise self.dropped(result)
        return Summed(result, summed, agreed_weight(workers, self.gradients, result, unused, raised[1:]))

    def forward_pass(self, *, idle: bool = False) -> AbstractContextManager[None]:
        """As in `Reduction`: nothing is collective in it."""
        return contextlib.nullcontext()

    def run_or_shortage(self, passes: Callable[[], Result]) -> Result | Shortage:
        """As in `Reduction`."""
        result = run_or_shortage(passes, device=self._device, who=f"rank {self.workers.rank}")
        self._trainable.remote.end_passes(short=isinstance(result, Shortage))
        return result

    def dropped(self, result: object) -> StepDropped:
        """As in `Reduction`."""
        error = step_dropped(self.workers, result)
        self.gradients.zero_()
        self._trainable.remote.discard()
        return error

    def overlap(self, wanted: bool) -> None:
        """As in `Reduction`."""
        self.sums.overlaps = wanted

    def last_pass(self) -> None:
        """As in `Reduction`."""
        self.sums.last_pass()

    def sum_of_squares(self) -> Tensor:
        """As in `Reduction`: each worker has all gradients."""
        return self.gradients.sum_of_squares()

    def nonfinite(self) -> list[str]:
        """As in `Reduction`."""
        return self.gradients.nonfinite(self._trainable.module)
