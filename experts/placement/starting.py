"""The placement that a run begins with, before any load was measured. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experts.placement.policy import Policy, place
from experts.placement.values import Costs, ExpertCost, HostSpec, LayerPlacement, Placement
from experts.shapes import LayerShape

HOME_BYTES = 16
"""Of one parameter at home: weight, gradient and two moments in fp32."""
REPLICA_BYTES = 8
"""Of one parameter of a replica: weight and gradient."""
MEMORY_SHARE = 0.9
"""Of a device's memory may go to experts at home; the rest is the runtime's."""


@dataclass(frozen=True)
class PlacementRules:
    """What the `experts` section says about placement.

    Attributes:
        every: steps between decisions; None keeps the first placement.
    """

    policy: Policy = "auto"
    replicas: int = 0
    every: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> PlacementRules:
        """The inverse of `to_json`."""
        return cls(**row)


def first_placement(num_experts: Sequence[int], *, hosts: int) -> Placement:
    """Consecutive experts on each host, as many on one as on any other give or take one: rows sorted by expert are then
    sorted by host too, and travel without being put in another order. Where they do not divide, the hosts with one more
    are others in the next layer."""
    layers = []
    for layer, number in enumerate(num_experts):
        copies = tuple(((expert * hosts + layer * number % hosts) // number,) for expert in range(number))
        layers.append(LayerPlacement(copies, tuple((1.0,) for _ in range(number))))
    return Placement(version=1, num_hosts=hosts, layers=tuple(layers))


def starting_placement(rules: PlacementRules, shapes: Sequence[LayerShape], hosts: Sequence[HostSpec]) -> Placement:
    """`place_first` for layers of these shapes."""
    return place_first(rules, costs_of(shapes), hosts)


def place_first(rules: PlacementRules, costs: Costs, hosts: Sequence[HostSpec]) -> Placement:
    """Where nothing is known of the load: consecutive experts for equal hosts, experts and no replicas, else by the
    policy, as if every expert got as many rows.

    Raises:
        InputError: hosts that cannot hold the experts.
    """
    alike = len({spec.speed for spec in hosts}) == 1 and all(len(set(layer)) == 1 for layer in costs)
    if alike and not rules.replicas and rules.policy in ("auto", "lpt"):
        first = first_placement([len(layer) for layer in costs], hosts=len(hosts))
        if all(_home_bytes(first, spec.host, costs) <= (spec.memory_bytes or float("inf")) for spec in hosts):
            return first
    even = [[1.0] * len(layer) for layer in costs]
    return place(rules.policy, even, hosts, costs, rules.replicas, version=1)


def _home_bytes(placement: Placement, host: int, costs: Costs) -> int:
    rows = zip(placement.layers, costs, strict=True)
    return sum(
        cost.home_bytes
        for layer, row in rows
        for copies, cost in zip(layer.copies, row, strict=True)
        if copies[0] == host
    )


def costs_of(shapes: Sequence[LayerShape]) -> Costs:
    """Bytes and work of each expert."""
    return [
        [
            ExpertCost(HOME_BYTES * shape.numel(expert), REPLICA_BYTES * shape.numel(expert), shape.row_work(expert))
            for expert in range(shape.num_experts)
        ]
        for shape in shapes
    ]
