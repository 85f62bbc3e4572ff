"""One micro-batch through the experts of one layer: rows to the holders and back, later their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experts.exchange.worker import ExpertClient
from experts.member.layer import rows_by_rank
from experts.routing.routes import Route
from experts.transport.protocol import DTYPES, Channel, Op


class ExpertCall:
    """One micro-batch in one layer. `start` and `start_backward` send; `finish` returns what comes back."""

    def __init__(
        self, client: ExpertClient, layer: int, micro_batch: int, route: Route, dtype: torch.dtype, width: int
    ) -> None:
        self.client, self.layer, self.micro_batch, self.route = client, layer, micro_batch, route
        self.dtype, self.width = dtype, width
        self._to_holders = [0] * client.group.size
        for rank, rows in zip(client.group.holders, route.host_counts, strict=True):
            self._to_holders[rank] = rows
        self._recompute_in_backward = False
        self._sources: list[list[int]] = []
        self._unsent: Tensor | None = None
        self._arriving: Any = None
        self._results: Tensor | None = None
        self._returning: Any = None

    @classmethod
    def forward(cls, client: ExpertClient, layer: int, rows: Tensor, route: Route, *, op: Op) -> ExpertCall:
        """Start a forward of `rows`, in the order of the route's segments."""
        call = cls(client, layer, client.begin_forward(layer, op=op), route, rows.dtype, rows.shape[1])
        call.start(op, rows)
        return call

    def start(self, op: Op, rows: Tensor) -> None:
        """Send the rows, compute the part of this worker's own experts, and start to receive the results."""
        self._recompute_in_backward = op is Op.RESERVE
        self._record_traffic(rows, counted=op in (Op.FORWARD, Op.RESERVE))
        self._send(op, rows)
        shard = self.client.shard
        if shard is None:
            self._receive_results()
            return
        keep = op in (Op.FORWARD, Op.RECOMPUTE)
        self._return(shard.forward(self.layer, self.micro_batch, self._arrived(), self._sources, keep=keep))

    def start_backward(self, grads: Tensor) -> None:
        """Send the gradients of the results, and start to receive those of the rows."""
        if self._recompute_in_backward and (self.layer, self.micro_batch) not in self.client.recomputed:
            # this worker had no rows, so nothing was recomputed here; the other workers' recomputation still needs it
            again = ExpertCall(self.client, self.layer, self.micro_batch, self.route, self.dtype, self.width)
            again.start(Op.RECOMPUTE, grads.new_empty((0, self.width), dtype=self.dtype))
            again.finish()
        grads = grads.to(self.dtype)
        self._record_traffic(grads, counted=False)
        self._send(Op.BACKWARD, grads)
        shard = self.client.shard
        if shard is None:
            self._receive_results()
            return
        self._return(shard.backward(self.layer, self.micro_batch, self._arrived(), self._sources))

    def finish(self) -> Tensor:
        """Wait for the rows that come back, in the order in which they were sent."""
        self.client.interleaver.yield_turn()
        rows = self._returning.wait()
        self._end()
        return rows

    def complete_sends(self) -> None:
        """See `UnfinishedExchange`: send what this call owes, and return other workers' rows unchanged."""
        if self._unsent is not None:
            self._send_rows(self._unsent)
            if self.client.shard is None:
                self._receive_results()
        if self.client.shard is not None and self._returning is None:
            self._return(self._arriving.wait())

    def drain(self) -> None:
        """See `UnfinishedExchange`."""
        self._returning.wait()
        self._end()

    def _end(self) -> None:
        self._returning = self._arriving = self._results = None
        self.client.dropout.unfinished.remove(self)

    def _arrived(self) -> Tensor:
        """Wait for the rows sent to this worker; the other micro-batch in flight runs meanwhile."""
        self.client.interleaver.yield_turn()
        return self._arriving.wait()

    def _record_traffic(self, rows: Tensor, *, counted: bool) -> None:
        row_bytes = self.width * rows.element_size()
        self.client.traffic.add(self.layer, self.route.host_counts, row_bytes=row_bytes, counted=counted)

    def _send(self, op: Op, rows: Tensor) -> None:
        """Send the header, then the rows. Memory is allocated before the header: after it the others wait for rows."""
        client, rows = self.client, rows.contiguous()
        self._results = rows.new_empty((sum(self.route.host_counts), self.width))
        counts = client.send_header(
            op, layer=self.layer, micro_batch=self.micro_batch, dtype=DTYPES.index(rows.dtype), width=self.width,
            slot_counts=self.route.slot_counts,
        )  # fmt: skip
        if client.shard is not None:
            self._sources = client.shard.sources(self.layer, counts)
        self._unsent = rows
        client.dropout.unfinished.append(self)
        self._send_rows(rows)

    def _send_rows(self, rows: Tensor) -> None:
        """The pending exchange keeps the rows alive until the results are here."""
        group = self.client.group
        receive = rows_by_rank(self._sources, group.size)
        self._arriving = group.exchange(rows, self._to_holders, receive, channel=Channel.TO_HOLDERS)
        self._unsent = None

    def _receive_results(self) -> None:
        group = self.client.group
        assert self._results is not None
        nothing, into = self._results[:0], self._results
        self._returning = group.exchange(
            nothing, [0] * group.size, self._to_holders, channel=Channel.TO_WORKERS, into=into
        )

    def _return(self, rows: Tensor) -> None:
        group = self.client.group
        sources = rows_by_rank(self._sources, group.size)
        self._returning = group.exchange(
            rows, sources, self._to_holders, channel=Channel.TO_WORKERS, into=self._results
        )
