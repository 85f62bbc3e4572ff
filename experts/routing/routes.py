"""Divides rows over hosts by a router's counts: how many go to each host, and in which order. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from experts.placement.values import LayerPlacement, Placement


@dataclass(frozen=True)
class Route:
    """How this worker's rows of one micro-batch and layer are divided over the hosts.

    Attributes:
        host_counts: rows for each host, (H,).
        slot_counts: for each host the rows of each of its slots.
        segments: (start, stop) pieces of the rows sorted by expert, in the order in which they are sent; None if that
            is the order they already have.
    """

    host_counts: list[int]
    slot_counts: list[list[int]]
    segments: list[tuple[int, int]] | None


@dataclass(frozen=True)
class LayerRoutes:
    """One layer's placement in the form that passes use.

    A host's *slots* are its homes, ascending, then its replicas, ascending.

    Attributes:
        slots: for each host (expert, index of the copy) of each slot.
        homes: for each host the number of its slots that are homes.
    """

    placed: LayerPlacement
    slots: tuple[tuple[tuple[int, int], ...], ...]
    homes: tuple[int, ...]

    @classmethod
    def of(cls, placement: Placement, layer: int) -> LayerRoutes:
        """The routes of `layer`."""
        placed = placement.layers[layer]
        slots, homes = [], []
        for host in range(placement.num_hosts):
            held = placement.slots(layer, host)
            own = [expert for expert in held if placed.copies[expert][0] == host]
            rest = [expert for expert in held if placed.copies[expert][0] != host]
            slots.append(tuple((expert, placed.copies[expert].index(host)) for expert in (*own, *rest)))
            homes.append(len(own))
        return cls(placed, tuple(slots), tuple(homes))

    @cached_property
    def in_order(self) -> bool:
        """Whether rows sorted by expert are also sorted by host and slot."""
        experts = [expert for held in self.slots for expert, _ in held]
        return experts == sorted(set(experts)) and self.placed.replicas == 0

    def route(self, counts: Sequence[int]) -> Route:
        """Divide rows over the hosts; `counts` (E,) are those of each expert. Deterministic, in pure Python."""
        parts = self.placed.split(counts)
        slot_counts = [[parts[expert][copy] for expert, copy in held] for held in self.slots]
        host_counts = [sum(rows) for rows in slot_counts]
        if self.in_order:
            return Route(host_counts, slot_counts, None)
        starts, total = [], 0
        for count in counts:
            starts.append(total)
            total += count
        segments: list[tuple[int, int]] = []
        for held, rows in zip(self.slots, slot_counts, strict=True):
            for (expert, copy), number in zip(held, rows, strict=True):
                if number:
                    begin = starts[expert] + sum(parts[expert][:copy])
                    _append(segments, begin, begin + number)
        return Route(host_counts, slot_counts, None if segments in ([], [(0, total)]) else segments)


def _append(segments: list[tuple[int, int]], begin: int, end: int) -> None:
    """Add a piece; joins it to the last one if it continues that."""
    if segments and segments[-1][1] == begin:
        segments[-1] = (segments[-1][0], end)
    else:
        segments.append((begin, end))
