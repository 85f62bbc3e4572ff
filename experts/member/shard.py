"""The experts of one host: weights, gradients, optimizer, and the activations that backward needs.

One stack of homes and one of replicas in each layer; the time that they compute is measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experts.config import Key, LayerShape
from experts.grouped import GroupedExperts, UnevenExperts, build_experts, load_state, state_of
from experts.lifecycle.changes import scale_steps, scaled_experts
from experts.lifecycle.table import ExpertTable
from experts.placement.values import Placement
from experts.router import LayerRoutes
from raytrain.config.sections import OptimConfig
from raytrain.train.memory.device import Shortage, run_or_shortage
from raytrain.train.optim import build_optimizers, takes_skip_on_device
from raytrain.train.parallel.flat_gradients import GradientBuffers, squares_of_each

# ---------------------------------------------------------------- device timer


class DeviceTimer:
    """Sums the seconds of work on a device: by the clock on a CPU, by events on a GPU, which runs asynchronously."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Add the work inside."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        yield
        pair[1].record()
        self._pairs.append(pair)

    def take(self) -> float:
        """Return the seconds since the last call; waits for a GPU to finish that work."""
        for begin, end in self._pairs:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        taken, self._seconds = self._seconds, 0.0
        self._pairs.clear()
        return taken


# ---------------------------------------------------------------- layer

Experts = GroupedExperts | UnevenExperts


class LayerShard:
    """The slots of one host in one layer: its homes, then its replicas. Without `trains` it keeps no gradients.

    Attributes:
        experts: the expert of each slot.
        homes, replicas: the stacked experts; None if there are none.
        gradients: of the homes. replica_gradients: of the replicas, to be sent to their homes.
    """

    def __init__(
        self, shape: LayerShape, routes: LayerRoutes, host: int, *, dtype: torch.dtype, device: Any,
        trains: bool = True,
    ) -> None:  # fmt: skip
        self.shape = shape
        self.experts = [expert for expert, _ in routes.slots[host]]
        self.num_homes = routes.homes[host]
        held = (self.experts[: self.num_homes], self.experts[self.num_homes :])
        self.homes, self.replicas = (
            empty_experts(shape, own, dtype=dtype, device=device) if own else None for own in held
        )
        stacks = (self.homes, self.replicas) if trains else (None, None)
        self.gradients, self.replica_gradients = (
            GradientBuffers([] if stack is None else [one for one in stack.parameters() if one.requires_grad])
            for stack in stacks
        )

    def forward(self, x_RD: Tensor, counts: list[int]) -> Tensor:
        """Run rows sorted by slot, `counts` of each. Every weight gets a gradient, zero where no row arrived."""
        split = sum(counts[: self.num_homes])
        parts = []
        for stack, rows, own in (
            (self.homes, x_RD[:split], counts[: self.num_homes]),
            (self.replicas, x_RD[split:], counts[self.num_homes :]),
        ):
            if stack is not None:
                parts.append(stack(rows, _counts_on(rows.device, own), own))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def slot(self, expert: int) -> tuple[GroupedExperts, int]:
        """(the stack that holds the expert here, its position in that stack)."""
        place = self.experts.index(expert)
        stack = self.homes if place < self.num_homes else self.replicas
        assert stack is not None
        return stack.slot(place if place < self.num_homes else place - self.num_homes)

    def gradients_of(self, expert: int) -> dict[str, Tensor]:
        """Gradients of the trained weights of an expert held here, by name; views."""
        stack, place = self.slot(expert)
        return {name: getattr(stack, name).grad[place] for name in self.shape.trained(expert)}

    def gradients_of_homes(self) -> list[list[Tensor]]:
        """Gradients of the trained weights of each expert at home here, in the order of `experts`; views."""
        found: list[list[Tensor]] = []
        stacks: Any = () if self.homes is None else getattr(self.homes, "runs", (self.homes,))
        for stack in stacks:
            weights = [getattr(stack, name) for name in stack.names]
            each = zip(*(weight.grad.unbind(0) for weight in weights if weight.requires_grad), strict=True)
            found += [list(own) for own in each] or [[] for _ in stack.hidden_E]
        return found

    def discard(self) -> None:
        """Zero the gradients."""
        self.gradients.zero_()
        self.replica_gradients.zero_()


def _counts_on(device: torch.device, counts: list[int]) -> Tensor:
    """These counts on the device, without waiting for it: from pageable memory, CUDA copies only once the device has
    done everything before, so that the next header would be received after the rows of this one."""
    if device.type != "cuda":
        return torch.tensor(counts, device=device)
    return torch.tensor(counts, pin_memory=True).to(device, non_blocking=True)


def empty_experts(shape: LayerShape, experts: Sequence[int], *, dtype: torch.dtype, device: Any) -> Experts:
    """These experts of a layer, stacked, with uninitialised weights, which come from other members."""
    frozen_E = [shape.frozen_E[e] for e in experts] if shape.frozen_E else ()
    with torch.device("meta"):  # draws no random numbers
        stack = build_experts(shape.width, [shape.hidden_E[e] for e in experts], **shape.kind, frozen_E=frozen_E)
    return stack.to(dtype=dtype).to_empty(device=device)


def stacked_names(name: str, layer: int, shape: LayerShape) -> dict[str, list[str]]:
    """Tensors of a layer's experts, `name` in a complete module -> the names of their rows in the files of a
    checkpoint."""
    with torch.device("meta"):
        experts = build_experts(shape.width, shape.hidden_E, **shape.kind, frozen_E=shape.frozen_E)
    prefixes = {id(part): f"{name}.{path}." if path else f"{name}." for path, part in experts.named_modules()}
    found: dict[str, list[str]] = {}
    for expert in range(shape.num_experts):
        stack, _ = experts.slot(expert)
        for field in stack.names:
            found.setdefault(f"{prefixes[id(stack)]}{field}", []).append(f"{layer}.{expert}.{field}")
    return found


def by_slot(rows: Tensor, sources: list[list[int]]) -> Tensor:
    """Reorder rows from worker-major (within it by slot) to slot-major (within it by worker)."""
    if len(sources) == 1 or not sources[0]:  # a host may hold no expert of a layer
        return rows
    pieces = rows.split([count for source in sources for count in source])
    slots = len(sources[0])
    return torch.cat([pieces[worker * slots + slot] for slot in range(slots) for worker in range(len(sources))])


def by_source(rows: Tensor, sources: list[list[int]]) -> Tensor:
    """The inverse of `by_slot`."""
    if len(sources) == 1 or not sources[0]:  # a host may hold no expert of a layer
        return rows
    slots, workers = len(sources[0]), len(sources)
    pieces = rows.split([source[slot] for slot in range(slots) for source in sources])
    return torch.cat([pieces[slot * workers + worker] for worker in range(workers) for slot in range(slots)])


def rows_by_rank(sources: list[list[int]], size: int) -> list[int]:
    """Rows of each worker, and zero for the other ranks of a group of `size`."""
    return [sum(source) for source in sources] + [0] * (size - len(sources))


# ---------------------------------------------------------------- shard


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
        host: its index in `placement`.
        optim: kind and constants of the optimizer; the learning rate comes with each commit.
        dtype: of the master weights.
        trains: False keeps no gradients and no optimizer: only `forward` without `keep` is called.

    Attributes:
        timer: seconds that the experts have computed.
        short: the shortage of memory since the last step, if any; everybody drops that step.
        used: layers with a backward since the last step.
        table: of the experts, where they come and go.
        dropping: rows are returned unchanged, nothing is computed: the step will be dropped anyway.
    """

    def __init__(
        self, shapes: list[LayerShape], placement: Placement, host: int, *, optim: OptimConfig, dtype: torch.dtype,
        device: torch.device, trains: bool = True,
    ) -> None:  # fmt: skip
        self.shapes, self.placement, self.host = shapes, placement, host
        self._trains = trains
        self.optim, self.dtype, self.device = optim, dtype, device
        self.timer = DeviceTimer(device)
        self.short: Shortage | None = None
        self.dropping = False
        self.table: ExpertTable | None = None
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
        optimizers = build_optimizers(homes, optim, lr=1.0, blocks=[homes]) if trained else []

        def scaled() -> list[tuple[nn.Parameter, int, float]]:
            return [] if self.table is None else scaled_experts(self.slot, self.table, set(self.homes()).__contains__)

        scale_steps(scaled, optimizers)
        return optimizers

    def slot(self, key: Key) -> tuple[GroupedExperts, int]:
        """(the stack that holds the expert here, its position in that stack)."""
        return self.layers[key[0]].slot(key[1])

    # -- forward and backward ---------------------------------------------------------------------

    def forward(self, layer: int, micro_batch: int, rows: Tensor, sources: list[list[int]], *, keep: bool) -> Tensor:
        """Run the rows of all workers through their experts.

        Args:
            rows: worker by worker, each sorted by slot; (R, D) in the payload's dtype, as the result.
            sources: for each worker the rows of each slot.
            keep: keep the activations for `backward`.
        """
        return self._unless_dropped(rows, lambda: self._forward(layer, micro_batch, rows, sources, keep=keep))

    def _forward(self, layer: int, micro_batch: int, rows: Tensor, sources: list[list[int]], *, keep: bool) -> Tensor:
        half = rows.dtype in (torch.bfloat16, torch.float16) and self.dtype == torch.float32
        x = by_slot(rows, sources)
        counts = [sum(column) for column in zip(*sources, strict=True)]
        with (
            torch.set_grad_enabled(keep),
            torch.autocast(rows.device.type, rows.dtype if half else torch.bfloat16, enabled=half),
            # tensors of its own: where experts are colocated, an outer block under activation checkpointing would
            # otherwise count what this graph saves
            torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        ):
            x = x.detach().requires_grad_(keep)
            y = self.layers[layer].forward(x, counts) if counts else x
        if keep:
            self._kept[layer, micro_batch] = (x, y)
        return by_source(y.detach(), sources)

    def backward(self, layer: int, micro_batch: int, grads: Tensor, sources: list[list[int]]) -> Tensor:
        """Return the gradients of the inputs; accumulates those of the weights. Arguments as `forward`."""
        return self._unless_dropped(grads, lambda: self._backward(layer, micro_batch, grads, sources))

    def _backward(self, layer: int, micro_batch: int, grads: Tensor, sources: list[list[int]]) -> Tensor:
        self.used.add(layer)
        x, y = self._kept.pop((layer, micro_batch))
        if y is not x:
            torch.autograd.backward(y, by_slot(grads, sources).to(y.dtype))
        inner = torch.zeros_like(x) if x.grad is None else x.grad
        return by_source(inner, sources)

    def _unless_dropped(self, rows: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of `compute`; from the first shortage of any member on, the rows unchanged."""

        def timed() -> Tensor:
            with self.timer.measure():
                return compute()

        if not self.dropping:
            result = run_or_shortage(timed, device=self.device, who=f"expert host {self.host}")
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

    def homes(self) -> list[Key]:
        return [(n, expert) for n, shard in enumerate(self.layers) for expert in shard.experts[: shard.num_homes]]

    def held(self) -> list[Key]:
        """The experts with a copy here, homes and replicas."""
        return [(n, expert) for n, shard in enumerate(self.layers) for expert in shard.experts]

    def weights_of(self, key: Key) -> dict[str, Tensor]:
        """Weights of an expert held here, by name; views."""
        stack, place = self.slot(key)
        return stack.weights_of(place)

    def set_weights(self, key: Key, weights: Mapping[str, Tensor]) -> None:
        for name, view in self.weights_of(key).items():
            view.copy_(weights[name])

    def state_of(self, key: Key) -> dict[str, Tensor]:
        """Weights and optimizer state of an expert at home here, by name: "w1", "w1.exp_avg", ...; mostly views, so
        clone what you keep."""
        return state_of(*self.slot(key), self.optimizers)

    def load_state(self, key: Key, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state_of`, into an expert at home here."""
        load_state(*self.slot(key), self.optimizers, state)

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
        kept, gradients = {}, {}  # states that stay at home here, gradients of all whose new home is here
        for layer in changed:
            own = self.layers[layer]
            for expert in own.experts:
                if placement.home_of(layer, expert) != self.host:
                    continue
                if self.placement.home_of(layer, expert) == self.host:
                    kept[layer, expert] = {n: value.clone() for n, value in self.state_of((layer, expert)).items()}
                gradients[layer, expert] = {n: value.clone() for n, value in own.gradients_of(expert).items()}
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
