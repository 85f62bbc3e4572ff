"""All-reduces of a step's gradients, bucket by bucket: after the last backward, or overlapped with it.

A bucket is one of the flat buffers of `raytrain.train.parallel.flat_gradients` and always takes one all-reduce. Overlap
changes only when it starts, so the results are identical to the last bit. (torch's DistributedDataParallel does the
same with hooks in C++, but rebuilds its buckets after the first backward, which changes the order of summation.)

All workers start the same buckets in the same order, whatever each has computed so far: a bucket starts when it is
complete on this worker and all buckets before it have started, or after the passes. Each worker therefore starts every
bucket once per step, and nothing hangs when workers differ in their number of passes or in the parameters without a
gradient, or when one runs out of memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial

from torch import nn
from torch.utils.hooks import RemovableHandle

from raytrain.errors import RunError
from raytrain.train.parallel.collectives import Workers
from raytrain.train.parallel.flat_gradients import GradientBuffers

#: Size at which a bucket is closed, in bytes, by device type. On a CPU (gloo, loopback), buckets of 1 MiB took up to
#: three times as long as a single all-reduce, buckets of 4 MiB no longer; the GPU size is that of torch's DDP.
BUCKET_BYTES = {"cpu": 4 * 2**20, "cuda": 25 * 2**20}


def could_overlap(gradients: GradientBuffers, workers: Workers) -> bool:
    """Whether there are other workers, and a bucket that can be complete before the passes end."""
    return workers.world_size > 1 and len(gradients.payloads) > 1


class BucketSums:
    """Sums `gradients.payloads` in place over the workers, once per step.

    The first bucket always starts last: it carries a worker's flags (a non-finite loss, out of memory), which are known
    only after the passes. It is also the last to be complete if modules run in the order of registration.

    Args:
        gradients: the buffers; each bucket holds complete parameters.
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
        if wanted and could_overlap(self._gradients, self._workers):
            own: weakref.ref[BucketSums] = weakref.ref(
                self
            )  # a strong reference in the parameters' hooks would keep them alive
            for bucket, parameters in enumerate(self._gradients.members):
                self._hooks += [
                    parameter.register_post_accumulate_grad_hook(partial(_on_gradient, own, bucket, place))
                    for place, parameter in enumerate(parameters)
                ]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Context of the passes of a step.

        An exception drops the pending all-reduces without waiting: once nothing refers to them, this worker's
        connections close, and the other workers see the failure.
        """
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
        """Start the remaining buckets and wait for all. Collective.

        Args:
            learn: this worker completed its passes, so rank 0 may derive the bucket order from them.
        """
        for bucket in self._order or range(len(self._missing) - 1, -1, -1):
            if bucket not in self._pending:
                self._start(bucket)
        for wait in self._pending.values():
            wait()
        self._pending.clear()
        if self._order is None and self.overlaps:
            self._learn(learn and len(self._received) > 0)

    def _learn(self, seen: bool) -> None:
        """Adopt rank 0's order: buckets by completion, then incomplete and late ones, then the first bucket."""
        count = len(self._missing)
        early = [bucket for bucket in self._complete if bucket and bucket not in self._late]
        rest = [bucket for bucket in range(count - 1, 0, -1) if bucket not in early]
        self._order = self._workers.broadcast_object([*early, *rest, 0] if seen else None)

    def add_gradient(self, bucket: int, place: int, parameter: nn.Parameter) -> None:
        """Record that a parameter received its gradient; called by its hook in every pass.

        Raises:
            RunError: the second part of a gradient arrived while the first was being sent.
        """
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
            self._start_complete()

    def _start_complete(self) -> None:
        for bucket in self._order or ():
            if bucket in self._pending:
                continue
            if bucket == 0 or self._missing[bucket] or bucket in self._late:
                return
            self._start(bucket)

    def _start(self, bucket: int) -> None:
        self._pending[bucket] = self._workers.start_all_reduce(self._gradients.payloads[bucket])


def _on_gradient(sums: weakref.ref[BucketSums], bucket: int, place: int, parameter: nn.Parameter) -> None:
    alive = sums()
    if alive is not None:
        alive.add_gradient(bucket, place, parameter)
