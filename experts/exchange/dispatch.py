"""Experts in other processes as a module: dispatch and combine, one autograd function each.

Forward sends the rows in `dispatch` and receives the results in `combine`; backward is the transposed exchange:
`combine` sends the gradients, `dispatch` receives them. A shared expert can run between the two.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from experts.exchange.call import ExpertCall
from experts.exchange.worker import ExpertClient
from experts.routing.grouped import compute_dtype
from experts.routing.routes import Route
from experts.transport.protocol import Op
from raytrain.errors import InputError
from raytrain.train.compute.activation_checkpointing import inside_backward, will_be_recomputed

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
        route = self.client.route(self.layer, splits)
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
        return self.combine(self.dispatch(empty, self.client.idle_route(self.layer))).sum()


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
