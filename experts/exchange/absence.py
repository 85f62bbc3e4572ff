"""A worker that has no memory for its passes leaves them to the others, and no one waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from experts.exchange.attendance import Attendance
from experts.member.shard import ExpertShard
from experts.transport.protocol import DTYPES, Header, Op, PendingExchange, Transport


class Unfinished(Protocol):
    """An exchange of rows that others wait for; `experts.exchange.call.Call`."""

    def go_on(self) -> None:
        """Do what the others wait for."""
        ...

    def let_go(self) -> None:
        """Take what still comes."""
        ...


class Absence:
    """One worker's side of it.

    What it has begun, it ends, with rows that mean nothing; then it says OUT instead of the next header. Where experts
    are colocated the others still send it rows until they have come through, which they say in a header of its own: it
    answers them as they came. One that falls out behind its last exchange would otherwise wait for a header of others
    who wait for its gradients.

    Args:
        say: sends the header of an operation; returns the counts of each worker where this one holds experts.
        hear: the same without a header to send.

    Attributes:
        unfinished: exchanges that others wait for, in the order of their beginning.
    """

    def __init__(
        self,
        group: Transport,
        workers: int,
        *,
        say: Callable[[Op], list[list[int]]],
        hear: Callable[[], list[list[int]]],
    ) -> None:
        self._group, self._say, self._hear = group, say, hear
        self._attendance = Attendance(workers)
        self._heard: Header | None = None
        self._discarded = False
        self.unfinished: list[Unfinished] = []

    @property
    def out(self) -> set[int]:
        """Workers that take no further part, as far as this one knows: where it holds experts."""
        return self._attendance.out

    def read(self, came: list[list[int]], *, generation: int, version: int) -> list[list[int]]:
        """The counts of each worker in the headers that came. Raises HeaderMismatch."""
        self._heard, counts = self._attendance.read(came, generation=generation, version=version)
        return counts

    def end_passes(self, shard: ExpertShard | None, *, short: bool) -> None:
        """This worker has come through its passes, or, `short`, takes no further part in them."""
        if short:
            self._step_out(shard)
        elif shard is not None and self._group.size > 1:  # those who are out have served this worker until now
            self._say(Op.THROUGH)
            self._discarded = bool(self.out)

    def all_again(self) -> bool:
        """The step is over for everybody; whether this worker has said so already."""
        said, self._discarded = self._discarded, False
        self.unfinished.clear()
        self._attendance.all_again()
        return said

    def _step_out(self, shard: ExpertShard | None) -> None:
        for call in self.unfinished:
            call.go_on()
        for answer in list(self._answers(shard, self._say(Op.OUT))):
            answer.wait()
        while self.unfinished:
            self.unfinished[0].let_go()
        self._discarded = True

    def _answers(self, shard: ExpertShard | None, counts: list[list[int]]) -> Iterator[PendingExchange]:
        """To the others' rows, until they have come through. An answer is on its way when the next header comes."""
        group = self._group
        while shard is not None and self._heard is not None and self._heard.op is not Op.THROUGH:
            slots = len(shard.layers[self._heard.layer].experts)
            rows = [sum(row[:slots]) for row in counts]
            dtype = DTYPES[self._heard.dtype]
            nothing = torch.empty((0, self._heard.width), dtype=dtype, device=shard.device)
            came = group.exchange(nothing, [0] * group.size, rows).wait()
            yield group.exchange(came, rows, [0] * group.size)
            counts = self._hear()
