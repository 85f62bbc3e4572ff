"""The experts of one host: weights, gradients, optimizer, and the activations that backward needs.

Independent of processes and transport: used on an expert host and, where experts are colocated, on a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experts.member.device_timer import DeviceTimer
from experts.member.layer import LayerShard, by_slot, by_source
from experts.placement.values import Placement
from experts.routing.routes import LayerRoutes
from experts.shapes import Key, LayerShape
from raytrain.config.sections import OptimConfig
from raytrain.train.memory.oom import Shortage, run_or_shortage
from raytrain.train.optim.build import build_optimizers, takes_skip_on_device
from raytrain.train.parallel.squares import squares_of_each


@dataclass(frozen=True)
class CommitDecision:
    """What all members agreed on about a step, as an optimizer needs it; Python numbers only.

    Attributes:
        coefficient: factor of gradient clipping, 1 if nothing is clipped.
        inverse_scale: inverse of the loss scale, a power of two.
    """

    skip: bool
    coefficient: float
    inverse_scale: float
    lr: float


class ExpertShard:
    """The experts of one host, in every layer.

    Args:
        shapes: of the layers.
        host: its index in `placement`.
        optim: kind and constants of the optimizer; the learning rate comes with each commit.
        dtype: of the master weights.
        trains: False keeps no gradients and no optimizer: only `forward` without `keep` is called.

    Attributes:
        timer: seconds that the experts have computed.
        short: the shortage of memory since the last step, if any; everybody drops that step.
        used: layers with a backward since the last step.
        dropping: rows are returned unchanged, nothing is computed: the step will be dropped anyway.
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
        trains: bool = True,
    ) -> None:
        self.shapes, self.placement, self.host = shapes, placement, host
        self._trains = trains
        self.optim, self.dtype, self.device = optim, dtype, device
        self.timer = DeviceTimer(device)
        self.short: Shortage | None = None
        self.dropping = False
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.used: set[int] = set()
        self.layers = [self._build_layer(layer) for layer in range(len(shapes))]
        self.optimizers = self._build_optimizers()

    def _build_layer(self, layer: int) -> LayerShard:
        routes = LayerRoutes.of(self.placement, layer)
        return LayerShard(
            self.shapes[layer], routes, self.host, dtype=self.dtype, device=self.device, trains=self._trains
        )

    def _build_optimizers(self) -> list[torch.optim.Optimizer]:
        if not self._trains:
            return []
        homes = nn.ModuleList(layer.homes for layer in self.layers if layer.homes is not None)
        trained = [one for one in homes.parameters() if one.requires_grad]
        optim = self.optim
        if optim.name == "muon" and all(one.ndim < 3 for one in trained):  # only vectors are: AdamW's, as elsewhere
            optim = optim.model_copy(update={"name": "adamw"})
        return build_optimizers(homes, optim, lr=1.0, blocks=[homes]) if trained else []

    # -- forward and backward ---------------------------------------------------------------------

    def forward(self, layer: int, micro_batch: int, rows: Tensor, sources: list[list[int]], *, keep: bool) -> Tensor:
        """Run the rows of all workers through their experts.

        Args:
            rows: worker by worker, each sorted by slot; (R, D) in the payload's dtype.
            sources: for each worker the rows of each slot.
            keep: keep the activations for `backward`.

        Returns:
            (R, D) in the same order.
        """
        return self._unless_dropped(rows, lambda: self._forward(layer, micro_batch, rows, sources, keep=keep))

    def _forward(self, layer: int, micro_batch: int, rows: Tensor, sources: list[list[int]], *, keep: bool) -> Tensor:
        with self.timer.measure():
            x = by_slot(rows, sources)
            counts = [sum(column) for column in zip(*sources, strict=True)]
            with torch.set_grad_enabled(keep), _autocast(rows, self.dtype), _separate_graph():
                x = x.detach().requires_grad_(keep)
                y = self.layers[layer].forward(x, counts) if counts else x
            if keep:
                self._kept[layer, micro_batch] = (x, y)
            return by_source(y.detach(), sources)

    def backward(self, layer: int, micro_batch: int, grads: Tensor, sources: list[list[int]]) -> Tensor:
        """Return the gradients of the inputs; accumulates those of the weights. Arguments as `forward`."""
        return self._unless_dropped(grads, lambda: self._backward(layer, micro_batch, grads, sources))

    def _unless_dropped(self, rows: Tensor, work: Callable[[], Tensor]) -> Tensor:
        """Return the result of `work`; from the first shortage of any member on, the rows unchanged."""
        if not self.dropping:
            result = run_or_shortage(work, device=self.device, who=f"expert host {self.host}")
            if not isinstance(result, Shortage):
                return result
            self.ran_out(result)
        return rows

    def sources(self, layer: int, counts: list[list[int]]) -> list[list[int]]:
        """Rows of each slot of a layer from each worker; `counts` from the workers' headers."""
        slots = len(self.layers[layer].experts)
        return [row[:slots] for row in counts]

    def ran_out(self, short: Shortage) -> None:
        """Record that memory ran out: nothing more of this step is computed here."""
        self.short, self.dropping = self.short or short, True
        self._kept.clear()

    def _backward(self, layer: int, micro_batch: int, grads: Tensor, sources: list[list[int]]) -> Tensor:
        with self.timer.measure():
            self.used.add(layer)
            x, y = self._kept.pop((layer, micro_batch))
            if y is not x:
                torch.autograd.backward(y, by_slot(grads, sources).to(y.dtype))
            inner = torch.zeros_like(x) if x.grad is None else x.grad
            return by_source(inner, sources)

    def discard(self) -> None:
        """Forget gradients, and activations kept for backward."""
        self._kept.clear()
        self.used.clear()
        self.short, self.dropping = None, False
        for layer in self.layers:
            layer.discard()

    # -- the step ---------------------------------------------------------------------------------

    def squares(self) -> dict[Key, float]:
        """Sum of squares of the gradient of each expert at home here, in float64: equal for any placement."""
        gradients = [own for layer in self.layers for own in layer.gradients_of_homes()]
        trained = {key: own for key, own in zip(self.homes(), gradients, strict=True) if own}
        return dict(zip(trained, squares_of_each(list(trained.values())), strict=True))

    def commit(self, decision: CommitDecision, *, layers: Set[int] | None = None) -> None:
        """Unscale, clip and step, or skip; zeroes the gradients.

        Args:
            layers: to step; None = all. The others have no gradients, and stay as they are.
        """
        if not decision.skip:
            for number, layer in enumerate(self.layers):
                if layers is not None and number not in layers and layer.homes is not None:
                    layer.homes.zero_grad(set_to_none=True)  # until `discard`
            for factor in (decision.inverse_scale, decision.coefficient):
                if factor != 1.0:
                    for layer in self.layers:
                        layer.gradients.scale_(factor)
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = decision.lr
                if takes_skip_on_device(optimizer):
                    optimizer.found_inf = optimizer.grad_scale = None  # type: ignore[attr-defined]
                optimizer.step()
        self.discard()

    # -- state, by (layer, logical expert) ----------------------------------------------------------

    def numel(self, key: Key) -> int:
        """Number of parameters of an expert."""
        return self.shapes[key[0]].numel(key[1])

    def homes(self) -> list[Key]:
        """The experts at home here."""
        return [(n, expert) for n, shard in enumerate(self.layers) for expert in shard.experts[: shard.num_homes]]

    def held(self) -> list[Key]:
        """The experts with a copy here, homes and replicas."""
        return [(n, expert) for n, shard in enumerate(self.layers) for expert in shard.experts]

    def weights_of(self, key: Key) -> dict[str, Tensor]:
        """Weights of an expert held here, by name; views."""
        return self.layers[key[0]].weights_of(key[1])

    def set_weights(self, key: Key, weights: Mapping[str, Tensor]) -> None:
        """Copy weights in."""
        for name, view in self.weights_of(key).items():
            view.copy_(weights[name])

    def state_of(self, key: Key) -> dict[str, Tensor]:
        """Weights and optimizer state of an expert at home here, by name: "w1", "w1.exp_avg", ...; mostly views, so
        clone what you keep."""
        stack, place = self.layers[key[0]].slot(key[1])
        state: dict[str, Tensor] = {}
        for name, weight in self.weights_of(key).items():
            state[name] = weight
            parameter = getattr(stack, name)
            for slot, value in self._optimizer_state(parameter).items():
                state[f"{name}.{slot}"] = value[place] if value.shape == parameter.shape else value
        return state

    def load_state(self, key: Key, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_of`, into an expert at home here."""
        self.set_weights(key, state)
        stack, place = self.layers[key[0]].slot(key[1])
        for full, value in state.items():
            name, dot, slot = full.partition(".")
            if dot and getattr(stack, name).requires_grad:
                self._load_slot(getattr(stack, name), slot, place, value)

    def _optimizer_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        for optimizer in self.optimizers:
            if parameter in optimizer.state:
                held = optimizer.state[parameter]
                return {name: value for name, value in held.items() if isinstance(value, Tensor)}
        return {}

    def _optimizer_of(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        groups = ((own, group) for own in self.optimizers for group in own.param_groups)
        return next(own for own, group in groups if any(parameter is one for one in group["params"]))

    def _load_slot(self, parameter: nn.Parameter, name: str, place: int, value: Tensor) -> None:
        optimizer = self._optimizer_of(parameter)
        held = optimizer.state[parameter]
        if value.ndim:
            if name not in held:
                held[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            held[name][place].copy_(value)
        else:
            held[name] = _scalar_for(optimizer, parameter, value)

    # -- switch to another placement ----------------------------------------------------------------

    def switch(self, placement: Placement, arrived: Mapping[Key, Mapping[str, Tensor]]) -> None:
        """Adopt another placement, between the last backward of a step and its vote.

        An expert that stays at home here keeps weights, optimizer state and gradient; one that was a replica here and
        is at home now keeps its gradient. New replicas are empty: they get their weights after the commit.

        Args:
            arrived: state of each expert whose new home is here.
        """
        changed = [
            layer
            for layer, (old, new) in enumerate(zip(self.placement.layers, placement.layers, strict=True))
            if old.copies != new.copies
        ]
        kept, gradients = self._carried(placement, changed)
        states = {parameter: held for optimizer in self.optimizers for parameter, held in optimizer.state.items()}
        self.placement = placement
        for layer in changed:
            self.layers[layer] = self._build_layer(layer)
        self.optimizers = self._build_optimizers()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter in states:
                        optimizer.state[parameter] = states[parameter]
        for key, state in {**kept, **arrived}.items():
            self.load_state(key, state)
        for (layer, expert), values in gradients.items():
            for name, view in self.layers[layer].gradients_of(expert).items():
                view.copy_(values[name])

    def _carried(
        self, placement: Placement, changed: list[int]
    ) -> tuple[dict[Key, dict[str, Tensor]], dict[Key, dict[str, Tensor]]]:
        """Copies of (state of the experts that stay at home here, gradients of all whose new home is here)."""
        kept, gradients = {}, {}
        for layer in changed:
            own = self.layers[layer]
            for expert in own.experts:
                if placement.home_of(layer, expert) != self.host:
                    continue
                if self.placement.home_of(layer, expert) == self.host:
                    kept[layer, expert] = {n: value.clone() for n, value in self.state_of((layer, expert)).items()}
                gradients[layer, expert] = {n: value.clone() for n, value in own.gradients_of(expert).items()}
        return kept, gradients


def _autocast(rows: Tensor, master: torch.dtype) -> torch.autocast:
    """Compute rows that arrive in half precision in that dtype."""
    half = rows.dtype in (torch.bfloat16, torch.float16) and master == torch.float32
    return torch.autocast(rows.device.type, rows.dtype if half else torch.bfloat16, enabled=half)


def _separate_graph() -> torch.autograd.graph.saved_tensors_hooks:
    """Keep the tensors saved by this graph apart. Where experts are colocated, an outer block under activation
    checkpointing would otherwise count them as its own."""
    return torch.autograd.graph.saved_tensors_hooks(_identity, _identity)


def _scalar_for(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, value: Tensor) -> Tensor:
    """A copy of a scalar of the optimizer state, such as the step count, as this optimizer keeps it.

    Fused kernels read the step on the parameter's device, always in float32; other kernels read it on the CPU. It comes
    from a checkpoint or another host, whose device may differ. `load_state_dict` of torch has the same rule.
    """
    group = next(group for group in optimizer.param_groups if any(parameter is one for one in group["params"]))
    if group.get("fused") or group.get("capturable"):
        return value.detach().to(dtype=torch.float32, device=parameter.device, copy=True)
    return value.detach().to(device="cpu", copy=True)


def _identity(tensor: Tensor) -> Tensor:
    return tensor
