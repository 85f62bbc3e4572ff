"""One layer and one micro-batch on its way: rows to the hosts and back, and later their gradients the same way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experts.exchange.worker import ExpertClient
from experts.routing.routes import Route
from experts.transport.protocol import DTYPES, Op


class Call:
    """One layer and one micro-batch: its rows to the hosts and back, and later the gradients on the same way."""

    def __init__(
        self, pool: ExpertClient, layer: int, micro_batch: int, route: Route, dtype: torch.dtype, width: int
    ) -> None:
        self.pool, self.layer, self.micro_batch, self.route = pool, layer, micro_batch, route
        self.dtype, self.width = dtype, width
        self._owed: Tensor | None = None
        self._coming: Any = None
        self._room: Tensor | None = None
        self._back: Any = None
        self._reserved = False
        self._sources: list[list[int]] = []

    @classmethod
    def forward(cls, pool: ExpertClient, layer: int, rows: Tensor, route: Route, *, op: Op) -> Call:
        """Send rows (in the order of the route's segments) on their way through a layer."""
        call = cls(pool, layer, pool.begin_forward(layer, op=op), route, rows.dtype, rows.shape[1])
        call.begin(op, rows)
        return call

    def begin(self, op: Op, rows: Tensor) -> None:
        """Send, compute what is this worker's own, and start to receive."""
        pool = self.pool
        self._reserved = op is Op.RESERVE
        self._note(rows, counted=op in (Op.FORWARD, Op.RESERVE))
        came = self._out(op, rows)
        if pool.shard is None:
            self._receive_from_hosts()
            return
        keep = op in (Op.FORWARD, Op.RECOMPUTE)
        done = pool.shard.forward(self.layer, self.micro_batch, self._arrived(came), self._sources, keep=keep)
        self._return(done)

    def begin_backward(self, grads: Tensor) -> None:
        """The same for the gradients of the outputs."""
        if self._reserved and (self.layer, self.micro_batch) not in self.pool.recomputed:
            # no rows of this worker's: nothing was computed again here, and the others' second pass still needs it
            again = Call(self.pool, self.layer, self.micro_batch, self.route, self.dtype, self.width)
            again.begin(Op.RECOMPUTE, grads.new_empty((0, self.width), dtype=self.dtype))
            again.finish()
        grads = grads.to(self.dtype)
        self._note(grads, counted=False)
        came = self._out(Op.BACKWARD, grads)
        if self.pool.shard is None:
            self._receive_from_hosts()
            return
        done = self.pool.shard.backward(self.layer, self.micro_batch, self._arrived(came), self._sources)
        self._return(done)

    def finish(self) -> Tensor:
        """The rows that came back, in the order in which they were sent."""
        rows = self._arrived(self._back)
        self._ended()
        return rows

    def go_on(self) -> None:
        """Do what the others wait for, where the pass of this call has failed: send what it owes, and answer with rows
        as they came. The order is that of the calls' beginning."""
        if self._owed is not None:
            self._coming = self._exchange_out(self._owed)
            if self.pool.shard is None:
                self._receive_from_hosts()
        if self.pool.shard is not None and self._back is None:
            self._return(self._coming.wait())

    def let_go(self) -> None:
        """Take what comes for a call whose pass has failed, and forget it."""
        self._back.wait()
        self._ended()

    def _ended(self) -> None:
        self._back = self._coming = self._room = None
        self.pool.absence.unfinished.remove(self)

    def _arrived(self, exchange: Any) -> Tensor:
        """What comes to this worker; meanwhile the other micro-batch in flight has the turn."""
        self.pool.interleaver.yield_turn()
        return exchange.wait()

    def _note(self, rows: Tensor, *, counted: bool) -> None:
        row_bytes = self.width * rows.element_size()
        self.pool.traffic.note(self.layer, self.route.host_counts, row_bytes=row_bytes, counted=counted)

    def _out(self, op: Op, rows: Tensor) -> Any:
        """The header, then the rows. Everything that needs memory and can be asked for before the header is: after it
        the others wait for the rows."""
        pool = self.pool
        rows = rows.contiguous()
        self._room = rows.new_empty((sum(self.route.host_counts), self.width))
        code = DTYPES.index(rows.dtype)
        counts = pool.say(
            op, layer=self.layer, micro_batch=self.micro_batch, dtype=code, width=self.width,
            slot_counts=self.route.slot_counts,
        )  # fmt: skip
        if pool.shard is not None:
            slots = len(pool.shard.layers[self.layer].experts)
            self._sources = [row[:slots] for row in counts]
        self._owed = rows
        pool.absence.unfinished.append(self)
        self._coming = self._exchange_out(rows)  # keeps the rows alive until the answer is here
        return self._coming

    def _exchange_out(self, rows: Tensor) -> Any:
        group = self.pool.group
        send = [0] * group.size
        for rank, number in zip(group.holders, self.route.host_counts, strict=True):
            send[rank] = number
        receive = [sum(source) for source in self._sources] or [0] * group.size
        sent = group.exchange(rows, send, receive)
        self._owed = None
        return sent

    def _receive_from_hosts(self) -> None:
        group = self.pool.group
        receive = [0] * group.size
        for rank, number in zip(group.holders, self.route.host_counts, strict=True):
            receive[rank] = number
        assert self._room is not None
        self._back = group.exchange(self._room[:0], [0] * group.size, receive, into=self._room)

    def _return(self, rows: Tensor) -> None:
        send = [sum(source) for source in self._sources]
        self._back = self.pool.group.exchange(rows, send, list(self.route.host_counts), into=self._room)
