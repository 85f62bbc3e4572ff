"""Experts in other processes as a module: rows to their holders and back, later their gradients.

`experts.layer` computes with it in place of local experts; one autograd function for each way.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from experts.exchange.worker import ExpertClient
from experts.grouped import compute_dtype
from experts.member.shard import rows_by_rank
from experts.router import Route
from experts.transport import DTYPES, Channel, Op
from raytrain.errors import InputError
from raytrain.train.activation_checkpointing import inside_backward, will_be_recomputed

# ---------------------------------------------------------------- call


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
        """Send everything that the others wait for, other workers' rows unchanged."""
        if self._unsent is not None:
            self._send_rows(self._unsent)
            if self.client.shard is None:
                self._receive_results()
        if self.client.shard is not None and self._returning is None:
            self._return(self._arriving.wait())

    def drain(self) -> None:
        """Receive what is still to arrive, and forget it."""
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


# ---------------------------------------------------------------- dispatch

REMEDY = "experts.hosts 0 keeps the experts inside the workers"


class RemoteExperts(nn.Module):
    """The experts of one layer, on hosts or spread over the workers; replaces `GroupedExperts` in a MoELayer.

    Has no parameters. Every worker must call it for every layer and micro-batch; a worker without rows calls `idle`.
    """

    never_compiled = ("arrange", "dispatch", "combine")
    """Methods that communicate with other processes: torch.compile breaks its graphs around them."""

    w1 = w2 = w3 = b1 = b2 = b3 = runs = property(lambda self: self.refuse_reads())
    """They are elsewhere."""

    def __init__(self, client: ExpertClient, layer: int, given: nn.Module) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in vars(given).items() if not name.startswith("_")})
        self.client, self.layer = client, layer
        self._given = (given,)  # in a tuple: no part of the module
        self._guards = [one.register_hook(self.refuse_reads) for one in given.parameters() if one.requires_grad]
        for parameter in given.parameters():
            parameter.data = parameter.data.new_empty(0)
        self._parameters = HeldElsewhere()
        self._parameters.experts = self
        # an input that always requires a gradient: backward must run on all workers, also where no row requires one
        self._anchor = torch.zeros((), requires_grad=True)

    def given_back(self, experts: nn.Module) -> nn.Module:
        """The module that these experts were in, with the weights of `experts`: its parameters are the same objects."""
        (given,) = self._given
        for guard in self._guards:
            guard.remove()
        for parameter, found in zip(given.parameters(), experts.parameters(), strict=True):
            parameter.data = found.data
        return given

    def refuse_reads(self, _grad: Tensor | None = None) -> Any:
        """Raise InputError: a function of the model's author reads the weights."""
        refuse(self.client, self.layer, "a function of the model that reads the weights of")

    def arrange(self, order_R: Tensor, splits: list[int]) -> tuple[Tensor, Route]:
        """Reorder rows for sending.

        Args:
            order_R: places of the rows, sorted by expert. splits: rows of each expert, (E,).

        Returns:
            (the places in the order in which the rows are sent, the route).
        """
        route = self.client.routes[self.layer].route(splits)
        if route.segments is not None:
            order_R = torch.cat([order_R[begin:end] for begin, end in route.segments])
        return order_R, route

    def dispatch(self, x_RD: Tensor, route: Route) -> PendingRows:
        """Send arranged rows; pass the result to `combine`."""
        if not torch.is_grad_enabled():
            op = Op.EVALUATE
        elif inside_backward():
            op = Op.RECOMPUTE
        else:
            op = Op.RESERVE if will_be_recomputed() else Op.FORWARD
        pending = PendingRows()
        pending.token = _Dispatch.apply(x_RD.to(compute_dtype(x_RD)), self._anchor, self, route, op, pending)
        return pending

    def combine(self, pending: PendingRows) -> Tensor:
        """Receive the results, (R, D), in the order in which the rows were sent."""
        return _Combine.apply(pending.token, pending)

    def idle(self, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Take part in a micro-batch of other workers without rows; returns a scalar zero to call backward on."""
        empty = torch.zeros((0, width), dtype=dtype, device=device)
        no_rows = self.client.routes[self.layer].route([0] * self.client.shapes[self.layer].num_experts)
        return self.combine(self.dispatch(empty, no_rows)).sum()


def refuse(client: ExpertClient, layer: int, what: str) -> NoReturn:
    """Raise the InputError for what the experts of a layer cannot do in other processes."""
    name = client.shapes[layer].name
    got = f"{what} the experts of {name}, which are in other processes or shared out over the workers"
    raise InputError("experts.hosts", got=got, expected="0", remedy=REMEDY)


class HeldElsewhere(dict[str, nn.Parameter | None]):
    """The parameters of experts that are elsewhere: none, which a function of the model's author must not overlook."""

    experts: RemoteExperts

    def items(self) -> Any:
        """As of a dict; a compiler may list them, too."""
        if self.experts.client.users_calls is not None and not TracingContext.try_get():
            self.experts.refuse_reads()
        return super().items()


class PendingRows:
    """Rows in flight: the call, and the token that connects `combine` to `dispatch` in the autograd graph."""

    token: Tensor
    call: ExpertCall


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, anchor: Tensor, experts: RemoteExperts, route: Route, op: Op, pending: PendingRows
    ) -> Tensor:
        pending.call = ctx.call = ExpertCall.forward(experts.client, experts.layer, x_RD, route, op=op)
        return x_RD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.call.finish(), None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, pending: PendingRows) -> Tensor:
        ctx.call = pending.call
        return pending.call.finish()

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        anchor = ctx.next_functions[0][0].next_functions[1][0]
        if not torch._C._will_engine_execute_node(anchor):  # torch.autograd.grad
            # the experts' weights have no graph here, and any backward adds to their gradients
            refuse(ctx.call.client, ctx.call.layer, "gradients by torch.autograd.grad through")
        ctx.call.start_backward(grad_RD)
        return grad_RD.new_empty(0), None
