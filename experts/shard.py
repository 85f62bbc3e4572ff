"""The experts of one host: weights, gradients, optimizer, and what backward needs. Knows no process and no transport.

The same object serves an expert host and, where experts are colocated, a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experts.expert import GroupedExperts
from experts.placement import Placement
from experts.routes import LayerRoutes
from raytrain.config import OptimConfig
from raytrain.gradients import GradientBuffers
from raytrain.optim import build_optimizers, takes_skip_on_device

Key = tuple[int, int]
"""(layer, logical expert)."""

WEIGHTS = ("w1", "w2", "w3")


@dataclass(frozen=True)
class LayerShape:
    """The experts of one layer."""

    num_experts: int
    width: int
    hidden: int
    activation: str

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def weights(self) -> dict[str, tuple[int, int]]:
        """Name -> shape of each weight of one expert, in the order in which they travel."""
        shapes = {"w1": (self.hidden, self.width), "w2": (self.width, self.hidden)}
        return shapes | ({"w3": (self.hidden, self.width)} if self.activation == "swiglu" else {})

    @property
    def numel(self) -> int:
        """Parameters of one expert."""
        return sum(rows * columns for rows, columns in self.weights().values())


@dataclass(frozen=True)
class Commit:
    """What everybody agreed on, and what an optimizer step needs: all of it host numbers.

    Attributes:
        coefficient: of the clip, 1 where nothing is clipped.
        inverse_scale: of the loss scale, a power of two.
    """

    skip: bool
    coefficient: float
    inverse_scale: float
    lr: float


class LayerShard:
    """One layer on one host: its homes, then its replicas."""

    def __init__(self, shape: LayerShape, routes: LayerRoutes, host: int, *, dtype: torch.dtype, device: Any) -> None:
        self.shape = shape
        self.experts = [expert for expert, _ in routes.slots[host]]
        self.num_homes = routes.homes[host]
        self.homes = _stack(shape, self.num_homes, dtype=dtype, device=device)
        self.replicas = _stack(shape, len(self.experts) - self.num_homes, dtype=dtype, device=device)

    def forward(self, x_RD: Tensor, counts: list[int]) -> Tensor:
        """Rows sorted by slot, `counts` of each; without any row every weight still gets its zero gradient."""
        split = sum(counts[: self.num_homes])
        parts = []
        for stack, rows, own in (
            (self.homes, x_RD[:split], counts[: self.num_homes]),
            (self.replicas, x_RD[split:], counts[self.num_homes :]),
        ):
            if stack is not None:
                parts.append(stack(rows, torch.tensor(own, device=rows.device), own))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def slot(self, expert: int) -> tuple[GroupedExperts, int]:
        """(the stack that holds the expert here, its place in it)."""
        place = self.experts.index(expert)
        stack = self.homes if place < self.num_homes else self.replicas
        assert stack is not None
        return stack, place if place < self.num_homes else place - self.num_homes


def _stack(shape: LayerShape, number: int, *, dtype: torch.dtype, device: Any) -> GroupedExperts | None:
    if number == 0:
        return None
    with torch.device("meta"):  # the weights come from elsewhere: nothing is drawn
        stack = GroupedExperts(number, shape.width, shape.hidden, activation=shape.activation)  # type: ignore[arg-type]
    return stack.to(dtype=dtype).to_empty(device=device)


class ExpertShard:
    """Every layer of one host.

    Args:
        shapes: of the layers.
        host: whose part of `placement` this is.
        optim: kind and constants of the optimizer; the learning rate comes with each commit.
        dtype: of the master weights.
    """

    def __init__(
        self,
        shapes: list[LayerShape],
        placement: Placement,
        host: int,
        *,
        optim: OptimConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shapes, self.placement, self.host = shapes, placement, host
        self.optim, self.dtype, self.device = optim, dtype, device
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._build(placement)

    def _build(self, placement: Placement) -> None:
        self.placement = placement
        self.routes = [LayerRoutes.of(placement, layer) for layer in range(len(self.shapes))]
        self.layers = [
            LayerShard(shape, routes, self.host, dtype=self.dtype, device=self.device)
            for shape, routes in zip(self.shapes, self.routes, strict=True)
        ]
        self.module = nn.ModuleList(layer.homes for layer in self.layers if layer.homes is not None)
        replicas = nn.ModuleList(layer.replicas for layer in self.layers if layer.replicas is not None)
        self.gradients = GradientBuffers(self.module.parameters())
        self.replica_gradients = GradientBuffers(replicas.parameters())
        self.optimizers = build_optimizers(self.module, self.optim, lr=1.0) if len(self.module) else []

    # -- forward and backward ---------------------------------------------------------------------

    def forward(self, layer: int, micro_batch: int, rows: Tensor, sources: list[list[int]], *, keep: bool) -> Tensor:
        """Rows of all workers through their experts.

        Args:
            rows: worker by worker, each sorted by slot; (R, D) in the wire's dtype.
            sources: for each worker the rows of each slot.
            keep: for `backward`.
        Returns:
            (R, D) in the same order.
        """
        x = _by_slot(rows, sources)
        counts = [sum(column) for column in zip(*sources, strict=True)]
        with torch.set_grad_enabled(keep), _autocast(rows, self.dtype), _own_graph():
            x = x.detach().requires_grad_(keep)
            y = self.layers[layer].forward(x, counts) if counts else x
        if keep:
            self._kept[layer, micro_batch] = (x, y)
        return _by_source(y.detach(), sources)

    def backward(self, layer: int, micro_batch: int, grads: Tensor, sources: list[list[int]]) -> Tensor:
        """Gradients of the outputs to gradients of the inputs; those of the weights are added up."""
        x, y = self._kept.pop((layer, micro_batch))
        if y is not x:
            torch.autograd.backward(y, _by_slot(grads, sources).to(y.dtype))
        inner = torch.zeros_like(x) if x.grad is None else x.grad
        return _by_source(inner, sources)

    def discard(self) -> None:
        """Forget gradients and whatever was kept for backward."""
        self._kept.clear()
        self.gradients.zero_()
        self.replica_gradients.zero_()

    # -- the step ---------------------------------------------------------------------------------

    def squares(self) -> dict[Key, float]:
        """Sum of squares of the gradient of each expert at home here, in float64: the same for any placement."""
        keys, totals = self.homes(), []
        for layer, expert in keys:
            stack, place = self.layers[layer].slot(expert)
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for name in self.shapes[layer].weights():
                grad = getattr(stack, name).grad[place]
                total += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
            totals.append(total)
        return dict(zip(keys, torch.stack(totals).tolist(), strict=True)) if totals else {}  # one read for all

    def commit(self, agreed: Commit) -> None:
        """Unscale, clip, step; or skip. Gradients are zero afterwards."""
        if not agreed.skip:
            for factor in (agreed.inverse_scale, agreed.coefficient):
                if factor != 1.0:
                    self.gradients.scale_(torch.tensor(factor, dtype=torch.float64, device=self.device))
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = agreed.lr
                if takes_skip_on_device(optimizer):
                    optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
                optimizer.step()
        self.discard()

    # -- state, by (layer, logical expert) ----------------------------------------------------------

    def homes(self) -> list[Key]:
        """The experts at home here."""
        return [(n, expert) for n, shard in enumerate(self.layers) for expert in shard.experts[: shard.num_homes]]

    def held(self) -> list[Key]:
        """The experts with a copy here, homes and replicas."""
        return [(n, expert) for n, shard in enumerate(self.layers) for expert in shard.experts]

    def weights_of(self, key: Key) -> dict[str, Tensor]:
        """Name -> weight of an expert held here; views."""
        stack, place = self.layers[key[0]].slot(key[1])
        return {name: getattr(stack, name).detach()[place] for name in self.shapes[key[0]].weights()}

    def set_weights(self, key: Key, weights: Mapping[str, Tensor]) -> None:
        """Copy weights in."""
        for name, view in self.weights_of(key).items():
            view.copy_(weights[name])

    def state_of(self, key: Key) -> dict[str, Tensor]:
        """Weights and optimizer state of an expert at home here, by name: "w1", "w1.exp_avg", ...; views where they
        can be, so clone what is kept."""
        stack, place = self.layers[key[0]].slot(key[1])
        state: dict[str, Tensor] = {}
        for name, weight in self.weights_of(key).items():
            state[name] = weight
            for slot, value in self._optimizer_state(getattr(stack, name)).items():
                state[f"{name}.{slot}"] = value[place] if value.shape == getattr(stack, name).shape else value
        return state

    def load_state(self, key: Key, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_of`, into an expert at home here."""
        self.set_weights(key, state)
        stack, place = self.layers[key[0]].slot(key[1])
        for name in self.shapes[key[0]].weights():
            parameter = getattr(stack, name)
            for full, value in state.items():
                if full.startswith(f"{name}."):
                    self._load_slot(parameter, full.partition(".")[2], place, value)

    def _optimizer_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                held = optimizer.state[parameter]
                return {name: value for name, value in held.items() if isinstance(value, Tensor)}
        return {}

    def _load_slot(self, parameter: nn.Parameter, name: str, place: int, value: Tensor) -> None:
        (optimizer,) = self.optimizers
        held = optimizer.state[parameter]
        if value.ndim:
            if name not in held:
                held[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            held[name][place].copy_(value)
        else:
            held[name] = value.clone().to(self.device if value.is_cuda else value.device)


def _autocast(rows: Tensor, master: torch.dtype) -> torch.autocast:
    """Rows that come in half precision are computed in it."""
    half = rows.dtype in (torch.bfloat16, torch.float16) and master == torch.float32
    return torch.autocast(rows.device.type, rows.dtype if half else torch.bfloat16, enabled=half)


def _own_graph() -> torch.autograd.graph.saved_tensors_hooks:
    """What this graph keeps is its own: where experts are colocated, the block around them may be one that is computed
    again, and would take the tensors saved here for its own."""
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _by_slot(rows: Tensor, sources: list[list[int]]) -> Tensor:
    """Worker by worker and in each slot by slot -> slot by slot and in each worker by worker."""
    if len(sources) == 1:
        return rows
    pieces = rows.split([count for source in sources for count in source])
    slots = len(sources[0])
    return torch.cat([pieces[worker * slots + slot] for slot in range(slots) for worker in range(len(sources))])


def _by_source(rows: Tensor, sources: list[list[int]]) -> Tensor:
    """The inverse of `_by_slot`."""
    if len(sources) == 1:
        return rows
    slots = len(sources[0])
    pieces = rows.split([source[slot] for slot in range(slots) for source in sources])
    workers = len(sources)
    return torch.cat([pieces[slot * workers + worker] for worker in range(workers) for slot in range(slots)])
