"""The mixture-of-experts layer: route, sort once, run the experts, then restore the order and weight the results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from experts.exchange.dispatch import RemoteExperts
from experts.grouped import GroupedExperts
from experts.router import Routing, TopKRouter

__all__ = ["MoELayer", "combine", "dispatch", "worst_case_routing"]


class MoELayer(nn.Module):
    """A feed-forward of several experts, of which a router chooses some for each token.

    Args:
        router: chooses the experts of each token.
        experts: `experts(x_RD sorted by expert, counts_E, splits) -> (R, D)`, e.g. GroupedExperts; or RemoteExperts,
            if they are in other processes.
        shared: an expert that every token visits, or None.

    Example:
        >>> import torch
        >>> from experts.layer import MoELayer
        >>> from experts.grouped import GroupedExperts
        >>> from experts.router import TopKRouter
        >>> layer = MoELayer(TopKRouter(8, 4, 2), GroupedExperts(4, 8, 16))  # width 8, 4 experts, 2 for each token
        >>> output, aux = layer(torch.randn(2, 5, 8))
        >>> output.shape, aux.shape
        (torch.Size([2, 5, 8]), torch.Size([]))
        >>> layer.eval()(torch.randn(2, 5, 8))[1] is None  # the balance loss is for training
        True
    """

    def __init__(self, router: TopKRouter, experts: nn.Module, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(
        self, x_BSD: Tensor, valid_BS: Tensor | None = None, weight_BS: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return an output of the shape and dtype of `x_BSD`, and the router's auxiliary loss (None in evaluation).

        `valid_BS` is false for padding; `weight_BS` is the weight of each token in the auxiliary loss. Neither may
        depend on anything that generation does not know if the output is to be the same there; see `TopKRouter`.
        """
        routing = self.router(x_BSD, valid_BS, weight_BS)
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        y_TD, shared_TD = self._route(x_TD, routing)
        if shared_TD is not None:
            y_TD = y_TD + shared_TD
        return y_TD.to(x_BSD.dtype).view_as(x_BSD), routing.aux

    def _route(self, x_TD: Tensor, routing: Routing) -> tuple[Tensor, Tensor | None]:
        flat, top_k, splits = routing.indices_TK.flatten(), self.router.top_k, None
        masked = routing.kept_TK is not None and isinstance(self.experts, GroupedExperts) and self.experts.groups(x_TD)
        if isinstance(self.experts, RemoteExperts) or (routing.kept_TK is not None and not masked):
            splits = routing.counts_E.tolist()
        if routing.kept_TK is not None:  # dropped choices sort behind the last expert, and are cut off or masked below
            flat = torch.where(routing.kept_TK.flatten(), flat, self.router.num_experts)
        order = flat.argsort(stable=True)
        order = order if splits is None else order[: sum(splits)]
        if masked:  # grouped products leave the rows behind the last expert's as they were in memory
            used_R1 = (torch.arange(len(order), device=order.device) < routing.counts_E.sum()).unsqueeze(1)
            x_RD = torch.where(used_R1, dispatch(x_TD, order, top_k=top_k), 0)  # for their gradients, too
            y_RD = torch.where(used_R1, self.experts(x_RD, routing.counts_E), 0)
            return combine(y_RD, order, routing.weights_TK), self._share(x_TD)
        if not isinstance(self.experts, RemoteExperts):
            y_RD = self.experts(dispatch(x_TD, order, top_k=top_k), routing.counts_E, splits)
            return combine(y_RD, order, routing.weights_TK), self._share(x_TD)
        order, route = self.experts.arrange(order, splits or [])
        pending = self.experts.dispatch(dispatch(x_TD, order, top_k=top_k), route)
        shared_TD = self._share(x_TD)  # while the rows are in flight
        return combine(self.experts.combine(pending), order, routing.weights_TK), shared_TD

    def _share(self, x_TD: Tensor) -> Tensor | None:
        return None if self.shared is None else self.shared(x_TD)


@contextlib.contextmanager
def worst_case_routing(module: nn.Module) -> Iterator[None]:
    """Force the routing that takes the most memory in this process, for passes that only measure it.

    Every token goes to the widest experts, whose intermediate values are the largest. With a capacity, tokens go to all
    experts in turn, so that none is dropped. Layers whose experts are in other processes route as usual: the rows sent
    there take no memory here.

    Example:
        >>> import torch
        >>> from experts.config import ExpertsConfig
        >>> from experts.layer import worst_case_routing
        >>> from experts.models import moe_layer
        >>> layer = moe_layer(8, ExpertsConfig(num_experts=3, top_k=1, hidden=[4, 4, 32]))
        >>> with worst_case_routing(layer):
        ...     layer.router(torch.randn(1, 6, 8)).counts_E.tolist()  # all tokens go to the widest expert
        [0, 0, 6]
    """
    layers = [
        part for part in module.modules() if isinstance(part, MoELayer) and not isinstance(part.experts, RemoteExperts)
    ]
    for layer in layers:
        widths = getattr(layer.experts, "hidden_E", (0,) * layer.router.num_experts)
        layer.router.forced = sorted(range(len(widths)), key=lambda e, widths=widths: -widths[e])
    try:
        yield
    finally:
        for layer in layers:
            layer.router.forced = None


def dispatch(x_TD: Tensor, order_R: Tensor, *, top_k: int) -> Tensor:
    """Gather the rows for the experts: row r is token order[r] // top_k. `order_R`: distinct places in T x K.

    Example:
        >>> import torch
        >>> from experts.layer import dispatch
        >>> tokens = torch.tensor([[1.0, 1.0], [2.0, 2.0]])  # (T 2, D 2)
        >>> experts = torch.tensor([[1, 0], [0, 1]])  # the K 2 choices of each token
        >>> order = experts.flatten().argsort(stable=True)  # the rows of expert 0, then those of expert 1
        >>> dispatch(tokens, order, top_k=2)[:, 0].tolist()
        [1.0, 2.0, 1.0, 2.0]
    """
    return _LocalDispatch.apply(x_TD, order_R, top_k)


class _LocalDispatch(torch.autograd.Function):
    """A gather whose backward sums a token's K gradients in the order of its choices.

    The backward of a plain gather adds them in the order of the rows; on CUDA the order is undefined.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_R: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.shape = (x_TD.shape[0], top_k, x_TD.shape[1])
        return x_TD.index_select(0, order_R // top_k)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (order_R,) = ctx.saved_tensors
        T, K, D = ctx.shape
        first_TD, *rest_TD = _put_back(grad_RD, order_R, T * K).view(T, K, D).unbind(1)
        grad_TD = first_TD.clone()
        for other_TD in rest_TD:  # several times faster than a sum over K on a CPU
            grad_TD += other_TD
        return grad_TD, None, None


def combine(y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
    """Weighted sum of each token's rows, (T, D), in the order of its choices; zero for a dropped row.

    Computed in the weights' dtype, float32 at least.

    Example:
        >>> import torch
        >>> from experts.layer import combine, dispatch
        >>> tokens, weights = torch.randn(5, 8), torch.full((5, 2), 0.5)
        >>> order = torch.randint(3, (5, 2)).flatten().argsort(stable=True)
        >>> rows = dispatch(tokens, order, top_k=2)  # experts that return what they get
        >>> torch.equal(combine(rows, order, weights), tokens)
        True
    """
    return _LocalCombine.apply(y_RD, order_R, weights_TK)


class _LocalCombine(torch.autograd.Function):
    """Written out so that neither forward nor backward allocates an unneeded (T, K, D) tensor."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, order_R: Tensor, weights_TK: Tensor) -> Tensor:
        T, K = weights_TK.shape
        y_TKD = _put_back(y_RD, order_R, T * K).view(T, K, y_RD.shape[1])
        ctx.save_for_backward(y_TKD, order_R, weights_TK)
        out_TD = y_TKD[:, 0] * weights_TK[:, :1]
        for k in range(1, K):
            out_TD.addcmul_(y_TKD[:, k].to(out_TD.dtype), weights_TK[:, k : k + 1])
        return out_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y_TKD, order_R, weights_TK = ctx.saved_tensors
        grad_T1D = grad_TD.unsqueeze(1)
        grad_TKD = (grad_T1D * weights_TK.unsqueeze(-1)).to(y_TKD.dtype)
        grad_RD = grad_TKD.view(-1, y_TKD.shape[2]).index_select(0, order_R)
        return grad_RD, None, (grad_T1D * y_TKD).sum(-1)


def _put_back(rows_RD: Tensor, order_R: Tensor, size: int) -> Tensor:
    """Put row r at place order[r] of `size` places; places are distinct, so nothing is summed."""
    if len(rows_RD) < size:  # some were dropped
        return rows_RD.new_zeros((size, rows_RD.shape[1])).index_copy_(0, order_R, rows_RD)
    # a gather by the inverse takes a third of the time of an index_copy, in bf16 a sixth (CPU)
    inverse_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(size, device=order_R.device))
    return rows_RD.index_select(0, inverse_R)
