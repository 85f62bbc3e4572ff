"""Sums a step's gradients over the workers, bucket by bucket: after the last backward, or overlapped with it.

`raytrain.train.step` starts it with the backward of a step's last micro-batch and waits for it before the update.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from raytrain.accelerator import on_gpu
from raytrain.errors import RunError
from raytrain.train.memory.device import Shortage, StepDropped, run_or_shortage, step_dropped
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers, HeldGradients
from raytrain.trainable import Trainable

#: Size at which a bucket is closed, in bytes. On a CPU (gloo, loopback), buckets of 1 MiB took up to
#: three times as long as a single all-reduce, buckets of 4 MiB no longer; the GPU size is that of torch's DDP.
CPU_BUCKET_BYTES, GPU_BUCKET_BYTES = 4 * 2**20, 25 * 2**20


class BucketSums:
    """Sums `gradients.payloads` in place over the workers, once per step.

    The first bucket always starts last: it carries a worker's flags (a non-finite loss, out of memory), which are known
    only after the passes. It is also the last to be complete if modules run in the order of registration.
    """

    def __init__(self, gradients: GradientBuffers, *, workers: Workers) -> None:
        self._gradients, self._workers = gradients, workers
        self._hooks: list[RemovableHandle] = []
        self._order: list[int] | None = None  # of the buckets; no bucket starts early until rank 0 has sent it
        self._late: set[int] = set()  # buckets in which a parameter may receive its gradient in two parts
        self._open = self._last = False
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(parameters) for parameters in self._gradients.members]
        self._received: set[tuple[int, int]] = set()  # (bucket, index in it) of each parameter that has its gradient
        self._complete: list[int] = []  # buckets, in the order of their completion
        self._pending: dict[int, Callable[[], None]] = {}

    @property
    def overlaps(self) -> bool:
        """Whether buckets start inside the last backward. All workers change it together, between two steps."""
        return bool(self._hooks)

    @overlaps.setter
    def overlaps(self, wanted: bool) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        # a bucket must be complete before the passes end, and the first one never starts early
        if wanted and self._workers.world_size > 1 and len(self._gradients.payloads) > 1:
            # a strong reference in the parameters' hooks would keep them alive
            own: weakref.ref[BucketSums] = weakref.ref(self)
            for bucket, parameters in enumerate(self._gradients.members):
                self._hooks += [
                    parameter.register_post_accumulate_grad_hook(partial(_on_gradient, own, bucket, place))
                    for place, parameter in enumerate(parameters)
                ]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context of the passes of a step. An exception drops the pending all-reduces without waiting: once nothing
        refers to them, this worker's connections close, and the other workers see the failure."""
        self._reset()
        self._open, self._last = True, False
        try:
            yield
        except BaseException:
            self._pending.clear()
            raise
        finally:
            self._open = self._last = False

    def last_pass(self) -> None:
        """Announce this worker's last backward of the step; without this call all buckets start after the passes."""
        self._last = self._open and self.overlaps

    def finish(self, *, learn: bool) -> None:
        """Start the remaining buckets and wait for all. Collective. `learn`: this worker completed its passes, so rank
        0 may derive the bucket order from them."""
        for bucket in self._order or range(len(self._missing) - 1, -1, -1):
            if bucket not in self._pending:
                self._start(bucket)
        for wait in self._pending.values():
            wait()
        self._pending.clear()
        if self._order is None and self.overlaps:
            count = len(self._missing)
            early = [bucket for bucket in self._complete if bucket and bucket not in self._late]
            rest = [bucket for bucket in range(count - 1, 0, -1) if bucket not in early]
            self._order = self._workers.broadcast_object(
                [*early, *rest, 0] if (learn and len(self._received) > 0) else None
            )

    def add_gradient(self, bucket: int, place: int, parameter: nn.Parameter) -> None:
        """Record that a parameter received its gradient; called by its hook in every pass. Raises RunError: the second
        part of a gradient arrived while the first was being sent."""
        if not self._last:
            return
        if (bucket, place) in self._received:
            if bucket in self._pending:
                raise RunError(
                    f"a parameter of shape {tuple(parameter.shape)} got its gradient in two parts of one backward, and"
                    " the first was already being sent to the other workers; set scale.overlap: false"
                )
            self._late.add(bucket)
            return
        self._received.add((bucket, place))
        self._missing[bucket] -= 1
        if self._missing[bucket] == 0:
            self._complete.append(bucket)
            for other in self._order or ():
                if other in self._pending:
                    continue
                if other == 0 or self._missing[other] or other in self._late:
                    return
                self._start(other)

    def _start(self, bucket: int) -> None:
        self._pending[bucket] = self._workers.start_all_reduce(self._gradients.payloads[bucket])


def _on_gradient(sums: weakref.ref[BucketSums], bucket: int, place: int, parameter: nn.Parameter) -> None:
    alive = sums()
    if alive is not None:
        alive.add_gradient(bucket, place, parameter)


# ---------------------------------------------------------------- reduction


Result = TypeVar("Result")


class Passed(NamedTuple):
    """What this worker's passes of a step add up to."""

    loss: Tensor  # its share, as that of the auxiliary losses a float64 scalar on the device
    aux: Tensor
    weight: float = 0.0  # of its micro-batches, by what their losses say they are means over
    told: bool = False  # whether that differs from what the loader has counted


class Summed(NamedTuple):
    """What all workers know after the gradients are summed."""

    own: Passed  # of this worker
    flags: list[int]  # the sums of the workers' flags
    weight: float | None = None  # of the step, where a loss has told another one than the loader; else None


def agreed_weight(
    workers: Workers, gradients: GradientBuffers, own: Passed, unused: Sequence[bool], raised: Sequence[bool]
) -> float | None:
    """Leave out the gradients that no worker has (`unused`: this one's), and return the step's weight where a loss has
    told one. Collective only where something is `raised`, (an unused parameter, a told weight) on any worker."""
    if not any(raised):
        return None
    weights, *absent = zip(*workers.all_gather_floats([own.weight, *map(float, unused)]), strict=True)
    gradients.leave_out([all(column) for column in absent])
    return sum(weights) if raised[1] else None


class Reduction:
    """How gradients are summed: by one all-reduce for each flat buffer, after the passes or as soon as a buffer is
    complete in the last one. Every method but `run_or_shortage`, `last_pass` and, without collectives in the passes,
    `forward_pass` is a collective.

    Attributes:
        gradients: where backward accumulates, and what norm, clip and optimizer use after `passed`.
    """

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        own = [parameter for parameter in trainable.module.parameters() if parameter.requires_grad]
        size = GPU_BUCKET_BYTES if on_gpu(device) else CPU_BUCKET_BYTES
        several = workers.world_size > 1
        self.gradients = GradientBuffers(own, bucket_bytes=size, with_flags=True) if several else HeldGradients(own)
        self.workers = workers
        self.sums = BucketSums(self.gradients, workers=workers)  # runs the all-reduces
        self._trainable, self._device = trainable, device

    def passed(self, passes: Callable[[], Passed], *, flags: Callable[[], list[int]]) -> Summed:
        """Run this worker's passes and sum the gradients over the workers.

        Afterwards `gradients` hold the sum, with a NaN where the loss of a worker was not finite, and without those
        that no worker has computed (`GradientBuffers.leave_out`).

        Raises:
            StepDropped: a worker ran out of memory, and all can retry the step.
            OutOfMemory: this worker ran out of memory, and the others cannot continue without it.
        """
        # What a worker finds in its passes (no memory, ...) travels with the gradients, as a collective of its own
        # would cost some percent of a step: on a CPU inside the first buffer; on a GPU, whose memory the host does not
        # read, among the flags.
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
        """A context around the forward of each pass; where gradients are off, the pass ends with it. `idle`: the pass
        has no rows of this worker."""
        return contextlib.nullcontext()

    def run_or_shortage(self, passes: Callable[[], Result]) -> Result | Shortage:
        """Run passes of this worker; a `Shortage` where memory ran out and the other workers continue without it."""
        result = run_or_shortage(passes, device=self._device, who=f"rank {self.workers.rank}")
        self._trainable.remote.end_passes(short=isinstance(result, Shortage))
        return result

    def dropped(self, result: object) -> StepDropped:
        """The error that all workers raise together where the `result` of one is a `Shortage`; gradients of the others
        are dropped."""
        error = step_dropped(self.workers, result)
        self.gradients.zero_()
        self._trainable.remote.discard()
        return error

    def overlap(self, wanted: bool) -> None:
        """Whether, from the next step on, sums begin inside the last backward of a step where possible."""
        self.sums.overlaps = wanted

    def last_pass(self) -> None:
        """Announce that the next backward is the last of this worker's passes."""
        self.sums.last_pass()

    def sum_of_squares(self) -> Tensor:
        """Of all gradients after `passed`: a float64 scalar on the device, the same on every worker."""
        return self.gradients.sum_of_squares()

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradients are not finite. Reads the device."""
        return self.gradients.nonfinite(self._trainable.module)
