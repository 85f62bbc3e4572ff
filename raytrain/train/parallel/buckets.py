"""The sums of a step's gradients over the workers, bucket by bucket: after its last backward, or begun inside it.

A bucket is one of the flat buffers of `raytrain.train.parallel.flat_gradients`, and is one all-reduce either way: what
overlap changes is when it begins, so that every number is the same to the last bit. (torch's DistributedDataParallel
does the same with hooks in C++, and rebuilds its buckets after the first backward, which changes the order of
summation.)

Workers begin the same buckets in the same order, whatever each of them has computed by then: a bucket begins when it is
whole here and all before it have begun, or after the passes. So nothing hangs where workers have different numbers of
passes, parameters without a gradient, or a shortage in the middle: each begins every bucket once in a step, some later.
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

#: Size at which a bucket is closed, by kind of device, in bytes. On a CPU (gloo, loopback) buckets of 1 MiB took up to
#: three times as long as one sum of the whole, those of 4 MiB no longer; on a GPU it is what torch's own takes.
BUCKET_BYTES = {"cpu": 4 * 2**20, "cuda": 25 * 2**20}


def could_overlap(gradients: GradientBuffers, workers: Workers) -> bool:
    """Whether there is another worker, and a bucket that may be whole before the passes are over."""
    return workers.world_size > 1 and len(gradients.payloads) > 1


class BucketSums:
    """Sums `gradients.payloads` in place, once in each step.

    The first bucket is always the last to begin: what a worker says with it (a loss that is not finite, a shortage) is
    known after its passes only. It is the last to be whole as well, where modules run in the order of registration.

    Args:
        gradients: of which every bucket holds whole parameters.
    """

    def __init__(self, gradients: GradientBuffers, *, workers: Workers) -> None:
        self._gradients, self._workers = gradients, workers
        self._hooks: list[RemovableHandle] = []
        self._order: list[int] | None = None  # of the buckets; until rank 0 has told, none begins early
        self._late: set[int] = set()  # in which a parameter may get its gradient in two parts
        self._open = self._last = False
        self._reset()

    def _reset(self) -> None:
        self._left = [len(parameters) for parameters in self._gradients.members]
        self._there: set[tuple[int, int]] = set()  # bucket and place in it, of each parameter with its gradient
        self._whole: list[int] = []  # buckets in the order in which they became so
        self._begun: dict[int, Callable[[], None]] = {}

    @property
    def overlaps(self) -> bool:
        """Whether buckets begin inside the last backward. Changed by all workers between two steps."""
        return bool(self._hooks)

    @overlaps.setter
    def overlaps(self, wanted: bool) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        if wanted and could_overlap(self._gradients, self._workers):
            own: weakref.ref[BucketSums] = weakref.ref(self)  # held by parameters, it would keep them for ever
            for bucket, parameters in enumerate(self._gradients.members):
                self._hooks += [
                    parameter.register_post_accumulate_grad_hook(partial(_tell, own, bucket, place))
                    for place, parameter in enumerate(parameters)
                ]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Around the passes of a step. After an exception nothing is waited for and nothing kept: the others hear of
        the end from this worker's connections, which close when nobody holds what is on its way."""
        self._reset()
        self._open, self._last = True, False
        try:
            yield
        except BaseException:
            self._begun.clear()
            raise
        finally:
            self._open = self._last = False

    def last_pass(self) -> None:
        """The next backward is this worker's last one of the step; without this word all buckets begin after it."""
        self._last = self._open and self.overlaps

    def finish(self, *, learn: bool) -> None:
        """Begin what has not begun, and wait for all. Collective.

        Args:
            learn: this worker came through its passes, so that rank 0 may take the order from what it saw.
        """
        for bucket in self._order or range(len(self._left) - 1, -1, -1):
            if bucket not in self._begun:
                self._begin(bucket)
        for wait in self._begun.values():
            wait()
        self._begun.clear()
        if self._order is None and self.overlaps:
            self._learn(learn and len(self._there) > 0)

    def _learn(self, seen: bool) -> None:
        """Take over rank 0's order: as buckets became whole, those that did not or came in parts, then the first."""
        count = len(self._left)
        early = [bucket for bucket in self._whole if bucket and bucket not in self._late]
        rest = [bucket for bucket in range(count - 1, 0, -1) if bucket not in early]
        self._order = self._workers.broadcast_object([*early, *rest, 0] if seen else None)

    def came(self, bucket: int, place: int, parameter: nn.Parameter) -> None:
        """A parameter has got its gradient, in whatever pass; its hook says so.

        Raises:
            RunError: it got the second part of it when the first was on its way.
        """
        if not self._last:
            return
        if (bucket, place) in self._there:
            if bucket in self._begun:
                raise RunError(
                    f"a parameter of shape {tuple(parameter.shape)} got its gradient in two parts of one backward, and"
                    " the first was on its way to the other workers; set scale.overlap: false"
                )
            self._late.add(bucket)
            return
        self._there.add((bucket, place))
        self._left[bucket] -= 1
        if self._left[bucket] == 0:
            self._whole.append(bucket)
            self._begin_whole()

    def _begin_whole(self) -> None:
        for bucket in self._order or ():
            if bucket in self._begun:
                continue
            if bucket == 0 or self._left[bucket] or bucket in self._late:
                return
            self._begin(bucket)

    def _begin(self, bucket: int) -> None:
        self._begun[bucket] = self._workers.start_all_reduce(self._gradients.payloads[bucket])


def _tell(sums: weakref.ref[BucketSums], bucket: int, place: int, parameter: nn.Parameter) -> None:
    told = sums()
    if told is not None:
        told.came(bucket, place, parameter)
