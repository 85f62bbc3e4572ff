"""Whether hosts have room for the experts, by what is known of their memory. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from experts.config import ExpertsConfig
from experts.placement import Costs, ExpertCost, HostSpec, Placement
from experts.plan import EXPERT_BUILDERS, check_experts, expert_parameters
from experts.policy import place
from experts.starting import first_placement

if TYPE_CHECKING:
    from experts.shard import LayerShape

HOME_BYTES = 16
"""Of one parameter at home, at least: the fp32 master, its gradient, and AdamW's two moments."""
REPLICA_BYTES = 8
"""Of a replica: the weight and its gradient."""
FREE = 0.9
"""Of a device's memory; the rest is the runtime's."""


def costs_of(shapes: Sequence[LayerShape]) -> list[list[ExpertCost]]:
    """What each expert of each layer takes."""
    return [[_cost(shape.numel)] * shape.num_experts for shape in shapes]


def _cost(parameters: int) -> ExpertCost:
    return ExpertCost(HOME_BYTES * parameters, REPLICA_BYTES * parameters, float(parameters))


def check_room(
    builder: str, keys: Mapping[str, Any], experts: ExpertsConfig, memory: Sequence[tuple[str, int]], *, hosts: int
) -> None:
    """Before anything starts: whether a built-in model's experts fit the hosts.

    Args:
        keys: of the `model` section.
        memory: (name, bytes, 0 where they are not known) of each device that a host may get; the largest are taken.

    Raises:
        InputError: they do not; the message names an expert too large for any.
    """
    known = EXPERT_BUILDERS.get(builder)
    if known is None or len(memory) < hosts or not all(size for _, size in memory):
        return
    sizes = {**known.defaults, **keys}
    largest = sorted(memory, key=lambda device: -device[1])[:hosts]
    specs = [
        HostSpec(host, speed=1.0, memory_bytes=int(FREE * size), device=name)
        for host, (name, size) in enumerate(largest)
    ]
    costs = [[_cost(expert_parameters(sizes["width"], experts))] * check_experts(experts)] * sizes["layers"]
    _placed(specs, costs, version=1)


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
    return _placed(specs, costs_of(shapes), version=version)


def _placed(specs: Sequence[HostSpec], costs: Costs, *, version: int) -> Placement:
    first = first_placement([len(row) for row in costs], hosts=len(specs), version=version)
    if all(_needs(first, spec.host, costs) <= (spec.memory_bytes or float("inf")) for spec in specs):
        return first
    return place("auto", [[0.0] * len(row) for row in costs], specs, costs, 0, version=version)


def _needs(placement: Placement, host: int, costs: Costs) -> int:
    """Bytes of the experts at home there."""
    return sum(
        cost.home_bytes
        for layer, row in zip(placement.layers, costs, strict=True)
        for copies, cost in zip(layer.copies, row, strict=True)
        if copies[0] == host
    )
