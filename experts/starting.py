"""The placement that a run begins with, before any load was measured. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from experts.placement import LayerPlacement, Placement


def first_placement(num_experts: Sequence[int], *, hosts: int, version: int = 1) -> Placement:
    """Consecutive experts on each host, as many on one as on any other give or take one: rows sorted by expert are then
    sorted by host too, and travel without being put in another order."""
    layers = []
    for number in num_experts:
        copies = tuple((expert * hosts // number,) for expert in range(number))
        layers.append(LayerPlacement(copies, tuple((1.0,) for _ in range(number))))
    return Placement(version=version, num_hosts=hosts, layers=tuple(layers))
