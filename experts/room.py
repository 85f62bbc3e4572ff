"""Whether hosts have room for the experts, by what is known of their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experts.placement import ExpertCost, HostSpec, Placement
from experts.policy import place
from experts.shard import LayerShape
from experts.starting import first_placement

HOME_BYTES = 16
"""Of one parameter at home, at least: the fp32 master, its gradient, and AdamW's two moments."""
REPLICA_BYTES = 8
"""Of a replica: the weight and its gradient."""
FREE = 0.9
"""Of a device's memory; the rest is the runtime's."""


def costs_of(shapes: Sequence[LayerShape]) -> list[list[ExpertCost]]:
    """What each expert of each layer takes."""
    return [
        [ExpertCost(HOME_BYTES * shape.numel, REPLICA_BYTES * shape.numel, float(shape.numel))] * shape.num_experts
        for shape in shapes
    ]


def placement_for(shapes: Sequence[LayerShape], about: Sequence[Mapping[str, Any]], *, version: int = 1) -> Placement:
    """Consecutive experts on each host where they fit; by memory where they do not.

    Args:
        about: what each host is: {"memory_bytes" (None: no limit is known), "name", "node"}.

    Raises:
        InputError: the hosts cannot hold the experts; the message names an expert too large for any.
    """
    specs = [
        HostSpec(
            index,
            speed=1.0,
            memory_bytes=None if row.get("memory_bytes") is None else int(FREE * row["memory_bytes"]),
            node=str(row.get("node", "")),
            device=str(row.get("name", "")),
        )
        for index, row in enumerate(about)
    ]
    costs = costs_of(shapes)
    first = first_placement([shape.num_experts for shape in shapes], hosts=len(specs), version=version)
    if all(_needs(first, spec.host, costs) <= (spec.memory_bytes or float("inf")) for spec in specs):
        return first
    return place("auto", [[0.0] * len(row) for row in costs], specs, costs, 0, version=version)


def _needs(placement: Placement, host: int, costs: Sequence[Sequence[ExpertCost]]) -> int:
    """Bytes of the experts at home there."""
    return sum(
        cost.home_bytes
        for layer, row in zip(placement.layers, costs, strict=True)
        for copies, cost in zip(layer.copies, row, strict=True)
        if copies[0] == host
    )
