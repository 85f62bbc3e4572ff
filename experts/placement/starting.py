"""The placement that a run starts with, before any load was measured. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experts.config import ExpertsConfig
from experts.placement.policy import Policy, place
from experts.placement.values import Costs, ExpertCost, HostSpec, LayerPlacement, Placement
from experts.shapes import LayerShape, row_work

HOME_BYTES = 16
"""Bytes of one parameter at home: weight, gradient and two moments in fp32."""
REPLICA_BYTES = 8
"""Bytes of one parameter of a replica: weight and gradient in fp32."""
MEMORY_SHARE = 0.9
"""Share of a device's memory that experts at home may take; the rest is for the runtime."""


@dataclass(frozen=True)
class PlacementRules:
    """The keys of the `experts` section about placement.

    Attributes:
        every: steps between decisions; None keeps the first placement.
    """

    policy: Policy = "auto"
    replicas: int = 0
    every: int | None = None

    @classmethod
    def of(cls, config: ExpertsConfig) -> PlacementRules:
        """Read them from the section."""
        return cls(config.placement, config.replicas, config.rebalance_every)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> PlacementRules:
        """The inverse of `to_json`."""
        return cls(**row)


def first_placement(num_experts: Sequence[int], *, hosts: int) -> Placement:
    """Place consecutive experts on each host, in equal numbers up to one.

    Rows sorted by expert are then sorted by host too, and need no reordering. If the numbers do not divide, other hosts
    get one more in the next layer.
    """
    layers = []
    for layer, number in enumerate(num_experts):
        copies = tuple(((expert * hosts + layer * number % hosts) // number,) for expert in range(number))
        layers.append(LayerPlacement(copies, tuple((1.0,) for _ in range(number))))
    return Placement(version=1, num_hosts=hosts, layers=tuple(layers))


def starting_placement(rules: PlacementRules, shapes: Sequence[LayerShape], hosts: Sequence[HostSpec]) -> Placement:
    """`place_first` for layers of these shapes."""
    return place_first(rules, costs_of(shapes), hosts)


def place_first(rules: PlacementRules, costs: Costs, hosts: Sequence[HostSpec]) -> Placement:
    """Place experts whose load is unknown.

    Equal hosts and experts without replicas get `first_placement`; otherwise the policy decides, as if every expert got
    equally many rows.

    Raises:
        InputError: the hosts cannot hold the experts.
    """
    alike = len({spec.speed for spec in hosts}) == 1 and all(len(set(layer)) == 1 for layer in costs)
    if alike and not rules.replicas and rules.policy in ("auto", "lpt"):
        first = first_placement([len(layer) for layer in costs], hosts=len(hosts))
        if first.fits(hosts, costs):
            return first
    even = [[1.0] * len(layer) for layer in costs]
    return place(rules.policy, even, hosts, costs, rules.replicas, version=1)


def costs_of(shapes: Sequence[LayerShape]) -> Costs:
    """Bytes and work of each expert of these layers, under an optimizer with two moments."""
    return costs_of_sizes([[shape.numel(expert) for expert in range(shape.num_experts)] for shape in shapes])


def costs_of_sizes(parameters_LE: Sequence[Sequence[int]]) -> Costs:
    """`costs_of`, by the number of parameters of each expert."""
    return [[ExpertCost(HOME_BYTES * n, REPLICA_BYTES * n, row_work(n)) for n in row] for row in parameters_LE]
