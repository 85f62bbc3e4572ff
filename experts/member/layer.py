"""One layer's experts on one host: stacks of its homes and of its replicas, with their gradients."""

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

    Attributes:
        experts: of each slot.
        homes, replicas: their weights; None where there are none.
        gradients: of the homes. replica_gradients: of the replicas, which the homes are owed.
    """

    def __init__(self, shape: LayerShape, routes: LayerRoutes, host: int, *, dtype: torch.dtype, device: Any) -> None:
        self.shape = shape
        self.experts = [expert for expert, _ in routes.slots[host]]
        self.num_homes = routes.homes[host]
        self.homes = _built(shape, self.experts[: self.num_homes], dtype=dtype, device=device)
        self.replicas = _built(shape, self.experts[self.num_homes :], dtype=dtype, device=device)
        self.gradients = GradientBuffers([] if self.homes is None else self.homes.parameters())
        self.replica_gradients = GradientBuffers([] if self.replicas is None else self.replicas.parameters())

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
        return stack.slot(place if place < self.num_homes else place - self.num_homes)

    def weights_of(self, expert: int) -> dict[str, Tensor]:
        """Name -> weight of an expert held here; views."""
        stack, place = self.slot(expert)
        return stack.weights_of(place)

    def gradients_of(self, expert: int) -> dict[str, Tensor]:
        """Name -> gradient of an expert held here; views."""
        stack, place = self.slot(expert)
        return {name: getattr(stack, name).grad[place] for name in stack.names}

    def discard(self) -> None:
        """Forget the gradients."""
        self.gradients.zero_()
        self.replica_gradients.zero_()


def _built(shape: LayerShape, experts: Sequence[int], *, dtype: torch.dtype, device: Any) -> Experts | None:
    if not experts:
        return None
    with torch.device("meta"):  # the weights come from elsewhere: nothing is drawn
        stack = build_experts(shape.width, [shape.hidden_E[e] for e in experts], **shape.kind)
    return stack.to(dtype=dtype).to_empty(device=device)


def by_slot(rows: Tensor, sources: list[list[int]]) -> Tensor:
    """Worker by worker and in each slot by slot -> slot by slot and in each worker by worker."""
    if len(sources) == 1:
        return rows
    pieces = rows.split([count for source in sources for count in source])
    slots = len(sources[0])
    return torch.cat([pieces[worker * slots + slot] for slot in range(slots) for worker in range(len(sources))])


def by_source(rows: Tensor, sources: list[list[int]]) -> Tensor:
    """The inverse of `by_slot`."""
    if len(sources) == 1:
        return rows
    slots = len(sources[0])
    pieces = rows.split([source[slot] for slot in range(slots) for source in sources])
    workers = len(sources)
    return torch.cat([pieces[slot * workers + worker] for worker in range(workers) for slot in range(slots)])
