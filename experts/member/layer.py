"""One layer's experts on one host: a stack of its homes and one of its replicas, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from experts.routing.grouped import GroupedExperts, UnevenExperts, build_experts
from experts.routing.routes import LayerRoutes
from experts.shapes import LayerShape
from raytrain.train.parallel.flat_gradients import GradientBuffers

Experts = GroupedExperts | UnevenExperts


class LayerShard:
    """The slots of one host in one layer: its homes, then its replicas.

    Args:
        trains: False keeps no gradients.

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
        self.homes = _build(shape, self.experts[: self.num_homes], dtype=dtype, device=device)
        self.replicas = _build(shape, self.experts[self.num_homes :], dtype=dtype, device=device)
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

    def weights_of(self, expert: int) -> dict[str, Tensor]:
        """Weights of an expert held here, by name; views."""
        stack, place = self.slot(expert)
        return stack.weights_of(place)

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
            found += [list(own) for own in each] or [[] for _ in stack.expert_ids]
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


def _build(shape: LayerShape, experts: Sequence[int], *, dtype: torch.dtype, device: Any) -> Experts | None:
    return empty_experts(shape, experts, dtype=dtype, device=device) if experts else None


def empty_experts(shape: LayerShape, experts: Sequence[int], *, dtype: torch.dtype, device: Any) -> Experts:
    """These experts of a layer, stacked, with uninitialised weights, which come from other members."""
    frozen_E = [shape.frozen_E[e] for e in experts] if shape.frozen_E else ()
    with torch.device("meta"):  # draws no random numbers
        stack = build_experts(shape.width, [shape.hidden_E[e] for e in experts], **shape.kind, frozen_E=frozen_E)
    return stack.to(dtype=dtype).to_empty(device=device)


def stacked_names(name: str, layer: int, shape: LayerShape) -> dict[str, list[str]]:
    """Tensors of a layer's experts in a complete module -> the names of their rows in the files of a checkpoint.

    Args:
        name: of the experts in the module.
    """
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
