"""OOM drop-out: a worker without memory for its passes leaves the step, and no other member waits for it.

The worker first completes the exchanges that it has started, with rows whose values nobody uses. Then it sends DROP_OUT
in place of its next header, and nothing more until the step has ended for everybody: the passes of the others continue
without it, and all members drop the step at the vote. `OomDropout` is the worker's side; `ActiveWorkers` is the side of
every member that holds experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from experts.member.shard import ExpertShard, rows_by_rank
from experts.transport import DTYPES, FIELDS, HEADER_SIZE, Channel, Exchange, Header, JointGroup, Op, read_headers

if TYPE_CHECKING:
    from experts.exchange.dispatch import ExpertCall


class ActiveWorkers:
    """Receives headers on a member that holds experts, and tracks the workers that have `dropped` out of the step.
    `layers` are names, for messages."""

    def __init__(self, workers: int) -> None:
        self.workers, self.layers = workers, list[str]()
        self.dropped: set[int] = set()

    def receive(
        self, group: JointGroup, rows: Tensor | None, size: int, *, generation: int, version: int
    ) -> tuple[Header | None, list[list[int]]]:
        """Send this member's headers, if it is a worker, and read those that arrive, if it holds experts.

        Args:
            rows: see `JointGroup.headers`. size: of a header with its counts, in int64 words.

        Returns:
            the one header of the active workers (None if none is left), and the counts of every worker; (None, []) on
            a worker that holds no experts.

        Raises:
            HeaderMismatch: the headers differ, or belong to another generation or placement.
        """
        senders = [worker for worker in range(self.workers) if worker not in self.dropped]
        received = group.headers(rows, size, dropped=self.dropped)
        if not received:
            return None, []
        sent = dict(zip(senders, received, strict=True))
        self.dropped |= {worker for worker, row in sent.items() if row[FIELDS.index("op")] == Op.DROP_OUT}
        active = {worker: row for worker, row in sent.items() if worker not in self.dropped}
        checked = active or sent
        header = read_headers(
            list(checked.values()), generation=generation, version=version, workers=list(checked), layers=self.layers
        )
        if not active:
            return None, []
        nothing = [0] * (size - HEADER_SIZE)
        return header, [active[one][HEADER_SIZE:] if one in active else nothing for one in range(self.workers)]


class OomDropout:
    """The worker's side of the drop-out.

    Where experts are colocated, the others still send rows to a worker that has dropped out, which returns them
    unchanged until all others have sent PASSES_DONE. Without that header, a worker that runs out of memory after its
    last exchange would wait for headers of others, which wait for its gradients.

    Args:
        send: sends the header of an operation; returns the counts of each worker if this one holds experts.
        receive: receives headers without sending one.

    Attributes:
        header: the last one received, on a worker that holds experts.
        unfinished: exchanges that others wait for, in the order in which they were started.
    """

    def __init__(
        self, group: JointGroup, workers: int, *, send: Callable[[Op], list[list[int]]],
        receive: Callable[[], list[list[int]]],
    ) -> None:  # fmt: skip
        self._group, self._send, self._receive = group, send, receive
        self.active_workers = ActiveWorkers(workers)
        self.header: Header | None = None
        self.unfinished: list[ExpertCall] = []
        self._everybody_discards = False

    def end_passes(self, shard: ExpertShard | None, *, short: bool) -> None:
        """End this worker's passes of the step; with `short` before their end, for lack of memory."""
        if short:
            for call in self.unfinished:
                call.complete_sends()
            counts = self._send(Op.DROP_OUT)
            if shard is not None:
                self._return_rows(shard, counts)
            while self.unfinished:
                self.unfinished[0].drain()
            self._everybody_discards = True
        elif shard is not None and self._group.size > 1:  # workers that dropped out have returned its rows until now
            self._send(Op.PASSES_DONE)
            self._everybody_discards = bool(self.active_workers.dropped)

    def end_step(self) -> bool:
        """Forget the drop-outs of the step. Returns whether everybody discards it already, without a DISCARD."""
        discards, self._everybody_discards = self._everybody_discards, False
        self.unfinished.clear()
        self.active_workers.dropped.clear()
        return discards

    def _return_rows(self, shard: ExpertShard, counts: list[list[int]]) -> None:
        """Return the others' rows unchanged until all have finished their passes.

        A reply is on its way before the next header is received; all are waited for at the end.
        """
        group, replies = self._group, list[Exchange]()
        while self.header is not None and self.header.op is not Op.PASSES_DONE:
            rows = rows_by_rank(shard.sources(self.header.layer, counts), group.size)
            empty = torch.empty((0, self.header.width), dtype=DTYPES[self.header.dtype], device=shard.device)
            none = [0] * group.size
            received = group.exchange(empty, none, rows, channel=Channel.TO_HOLDERS).wait()
            replies.append(group.exchange(received, rows, none, channel=Channel.TO_WORKERS))
            counts = self._receive()
        for reply in replies:
            reply.wait()
