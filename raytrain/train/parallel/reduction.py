"""What becomes of gradients between the first backward of a step and its agreement: one object for each strategy.

`data_parallel` and `expert_parallel` compute their passes without communication between the workers and then sum flat
buffers (`FlatReduction`); `fsdp` sums inside the passes (`raytrain.train.parallel.fsdp.reduction`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from raytrain.train.memory.oom import Shortage, StepDropped, run_or_shortage, step_dropped
from raytrain.train.parallel.buckets import BUCKET_BYTES, BucketSums
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers
from raytrain.trainable import Trainable

Made = TypeVar("Made")

Losses = tuple[Tensor, Tensor]
"""This worker's shares of the loss and of the auxiliary losses; float64 scalars on the device."""


class Reduction(Protocol):
    """Every verb but `run_or_shortage` and `last_pass` is one of all workers at the same moment.

    Attributes:
        gradients: where backward accumulates, and what norm, clip and optimizer see after `passed`.
    """

    gradients: GradientBuffers

    def passed(self, passes: Callable[[], Losses], *, flags: Callable[[], list[int]]) -> tuple[Losses, list[int]]:
        """Run this worker's passes; afterwards `gradients` hold the sum over the workers, NaN somewhere if the loss of
        one was not finite. Returns what `passes` did and the sums of the flags.

        Raises:
            StepDropped: a worker had no memory for its passes and all can take the step again.
            OutOfMemory: this worker had none, and the others cannot go on without it.
        """
        ...

    def run_or_shortage(self, passes: Callable[[], Made]) -> Made | Shortage:
        """What passes of this worker return, or that it had no memory for them, where the others go on without it."""
        ...

    def dropped(self, came: object) -> StepDropped:
        """What all workers raise together where one had a shortage; the passes of the others are forgotten."""
        ...

    def overlap(self, wanted: bool) -> None:
        """Whether sums begin inside the last backward of a step, from the next step on, where that can be."""
        ...

    def last_pass(self) -> None:
        """The next backward is the last one of this worker's passes. Its word alone: no meeting."""
        ...

    def sum_of_squares(self) -> Tensor:
        """Of the gradients of all workers after `passed`: a float64 scalar on the device, the same for everybody."""
        ...

    def nonfinite(self) -> list[str]:
        """Names of the parameters whose gradients are not finite. Reads the device."""
        ...


class FlatReduction:
    """Passes without communication, then one sum over the workers, buffer by buffer; or a buffer's sum as soon as the
    last pass has made it whole (`raytrain.train.parallel.buckets`).

    Attributes:
        sums: who adds the buffers up.
    """

    def __init__(self, trainable: Trainable, *, workers: Workers, device: torch.device) -> None:
        own = [parameter for parameter in trainable.module.parameters() if parameter.requires_grad]
        size = BUCKET_BYTES["cpu" if device.type == "cpu" else "cuda"]
        self.gradients = GradientBuffers(own, bucket_bytes=size, with_word=True)
        self.workers = workers
        self.sums = BucketSums(self.gradients, workers=workers)
        self._trainable, self._device = trainable, device

    def passed(self, passes: Callable[[], Losses], *, flags: Callable[[], list[int]]) -> tuple[Losses, list[int]]:
        """As in `Reduction`.

        A shortage is told with the gradients (a meeting of its own would cost some percent of a step): on a CPU inside
        them, on a GPU, whose memory the host does not read, beside them. All raise StepDropped then.
        """
        workers, inside = self.workers, self._device.type == "cpu"
        begun = workers.start_all_reduce_ints(flags()) if inside else None  # travels while the passes compute
        with self.sums.inside():
            came = self.run_or_shortage(passes)
        begun = begun or workers.start_all_reduce_ints([*flags(), int(isinstance(came, Shortage))])
        if isinstance(came, Shortage):
            self.gradients.say_short()
        else:  # its gradients may be finite, the step is none all the same
            self.gradients.mark_(~torch.isfinite(came[0] + came[1]))
        self.sums.finish(learn=not isinstance(came, Shortage))
        summed = begun()
        short = (
            self.gradients.some_were_short() if inside and workers.world_size > 1 else not inside and summed.pop() > 0
        )
        if short or isinstance(came, Shortage):
            raise self.dropped(came)
        return came, summed

    def run_or_shortage(self, passes: Callable[[], Made]) -> Made | Shortage:
        """As in `Reduction`."""
        came = run_or_shortage(passes, device=self._device, who=f"rank {self.workers.rank}")
        if self._trainable.remote is not None:
            self._trainable.remote.end_passes(short=isinstance(came, Shortage))
        return came

    def dropped(self, came: object) -> StepDropped:
        """As in `Reduction`."""
        error = step_dropped(self.workers, came)
        self.gradients.zero_()
        if self._trainable.remote is not None:
            self._trainable.remote.discard()
        return error

    def overlap(self, wanted: bool) -> None:
        """As in `Reduction`."""
        self.sums.overlaps = wanted

    def last_pass(self) -> None:
        """As in `Reduction`."""
        self.sums.last_pass()

    def sum_of_squares(self) -> Tensor:
        """As in `Reduction`: they have been summed, so each worker has all of them."""
        return self.gradients.sum_of_squares()

    def nonfinite(self) -> list[str]:
        """As in `Reduction`."""
        return self.gradients.nonfinite(self._trainable.module)
