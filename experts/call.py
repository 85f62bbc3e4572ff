"""One layer and one micro-batch on its way: rows to the hosts and back, and later their gradients the same way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experts.pool import ExpertPool
from experts.routes import Route
from experts.transport.protocol import DTYPES, Op


class Call:
    """One layer and one micro-batch: its rows to the hosts and back, and later the gradients on the same way."""

    def __init__(
        self, pool: ExpertPool, layer: int, micro_batch: int, route: Route, dtype: torch.dtype, width: int
    ) -> None:
        self.pool, self.layer, self.micro_batch, self.route = pool, layer, micro_batch, route
        self.dtype, self.width = dtype, width
        self._back: Any = None
        self._reserved = False
        self._sources: list[list[int]] = []

    @classmethod
    def forward(cls, pool: ExpertPool, layer: int, rows: Tensor, route: Route, *, op: Op) -> Call:
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
            self._receive_from_hosts(rows)
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
            self._receive_from_hosts(grads)
            return
        done = self.pool.shard.backward(self.layer, self.micro_batch, self._arrived(came), self._sources)
        self._return(done)

    def finish(self) -> Tensor:
        """The rows that came back, in the order in which they were sent."""
        back, self._back = self._back, None
        return self._arrived(back)

    def _arrived(self, exchange: Any) -> Tensor:
        """What comes to this worker; meanwhile the other micro-batch in flight has the turn."""
        self.pool.turns.give()
        return exchange.wait()

    def _note(self, rows: Tensor, *, counted: bool) -> None:
        row_bytes = self.width * rows.element_size()
        self.pool.traffic.note(self.layer, self.route.host_counts, row_bytes=row_bytes, counted=counted)

    def _out(self, op: Op, rows: Tensor) -> Any:
        pool, group = self.pool, self.pool.group
        code = DTYPES.index(rows.dtype)
        counts = pool.say(
            op, layer=self.layer, micro_batch=self.micro_batch, dtype=code, width=self.width,
            slot_counts=self.route.slot_counts,
        )  # fmt: skip
        send, receive = [0] * group.size, [0] * group.size
        for rank, number in zip(group.holders, self.route.host_counts, strict=True):
            send[rank] = number
        if pool.shard is not None:
            slots = len(pool.shard.layers[self.layer].experts)
            self._sources = [row[:slots] for row in counts]
            receive = [sum(source) for source in self._sources]
        sent = group.exchange(rows, send, receive)
        if pool.shard is None:
            self._sent = sent  # keeps the rows alive until the answer is here
        return sent

    def _receive_from_hosts(self, like: Tensor) -> None:
        group = self.pool.group
        receive = [0] * group.size
        for rank, number in zip(group.holders, self.route.host_counts, strict=True):
            receive[rank] = number
        nothing = torch.empty((0, self.width), dtype=self.dtype, device=like.device)
        self._back = group.exchange(nothing, [0] * group.size, receive)

    def _return(self, rows: Tensor) -> None:
        send = [sum(source) for source in self._sources]
        self._back = self.pool.group.exchange(rows, send, list(self.route.host_counts))
