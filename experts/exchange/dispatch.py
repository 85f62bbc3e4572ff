"""Experts that live elsewhere, as a module: dispatch and combine, one autograd function each.

Forward sends the rows in `dispatch` and takes the results in `combine`; backward is the transposed exchange: `combine`
sends the gradients, `dispatch` takes them. Between the two a shared expert can run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experts.exchange.call import Call
from experts.exchange.worker import ExpertClient
from experts.routing.routes import Route
from experts.transport.protocol import Op
from raytrain.train.compute.activation_checkpointing import inside_backward, will_be_recomputed


class PooledExperts(nn.Module):
    """The experts of one layer, wherever they are; takes the place of `GroupedExperts` in a MoELayer.

    It has no parameters of its own. Every worker must call it for every layer and micro-batch, with no rows where it
    has none (`idle`).
    """

    never_compiled = ("arrange", "dispatch", "combine")
    """Methods that talk to other processes: torch.compile breaks its graphs around them."""

    def __init__(self, pool: ExpertClient, layer: int) -> None:
        super().__init__()
        self.pool, self.layer = pool, layer
        # an input that always wants a gradient: backward must run on all workers, also where the rows want none
        self._anchor = torch.zeros((), requires_grad=True)

    def arrange(self, order_R: Tensor, splits: list[int]) -> tuple[Tensor, Route]:
        """The rows' places, sorted by expert, in the order in which they travel; `splits` (E,) are their counts."""
        route = self.pool.route(self.layer, splits)
        if route.segments is not None:
            order_R = torch.cat([order_R[begin:end] for begin, end in route.segments])
        return order_R, route

    def dispatch(self, x_RD: Tensor, route: Route) -> Sent:
        """Send arranged rows; `combine` of what it returns gives the results."""
        kept = torch.is_grad_enabled()
        if not kept:
            op = Op.EVALUATE
        elif inside_backward():
            op = Op.RECOMPUTE
        else:
            op = Op.RESERVE if will_be_recomputed() else Op.FORWARD
        dtype = _compute_dtype(x_RD)
        sent = Sent()
        sent.token = _Dispatch.apply(x_RD.to(dtype), self._anchor, self, route, op, sent)
        return sent

    def combine(self, sent: Sent) -> Tensor:
        """The results of the rows, in the order in which they were sent; (R, D)."""
        return _Combine.apply(sent.token, sent)

    def idle(self, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """No rows, in a micro-batch of the other workers: a scalar zero whose backward takes part in theirs."""
        nothing = torch.zeros((0, width), dtype=dtype, device=device)
        return self.combine(self.dispatch(nothing, self.pool.idle_route(self.layer))).sum()


class Sent:
    """Rows under way: the call, and the token that ties `combine` to `dispatch` in the graph."""

    token: Tensor
    call: Call


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, anchor: Tensor, experts: PooledExperts, route: Route, op: Op, sent: Sent
    ) -> Tensor:
        sent.call = ctx.call = Call.forward(experts.pool, experts.layer, x_RD, route, op=op)
        return x_RD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.call.finish(), None, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, sent: Sent) -> Tensor:
        ctx.call = sent.call
        return sent.call.finish()

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.call.begin_backward(grad_RD)
        return grad_RD.new_empty(0), None


def _compute_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
