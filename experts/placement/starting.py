"""The placement that a run starts with, before any load was measured. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from experts.config import ExpertsConfig
from experts.placement.policy import Policy, new_expert_host, place
from experts.placement.values import Costs, ExpertCost, HostSpec, LayerPlacement, Placement
from experts.shapes import LayerShape, row_work

HOME_BYTES = 16
"""Bytes of one parameter at home: weight, gradient and two moments in fp32."""
REPLICA_BYTES = 8
"""Bytes of one parameter of a replica: weight and gradient in fp32."""
WEIGHT_BYTES = 4
"""Bytes of one parameter of experts that only answer, at home and in a replica."""
MEMORY_SHARE = 0.9
"""Share of a device's memory that experts at home may take; the rest is for the runtime."""


@dataclass(frozen=True)
class PlacementRules:
    """The keys of the `experts` section about placement.

    Attributes:
        every: steps between decisions; None keeps the first placement.
        trains: False if the experts only answer, so that a host needs room for their weights alone.
    """

    policy: Policy = "auto"
    replicas: int = 0
    every: int | None = None
    trains: bool = True

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
    return place_first(rules, costs_of(shapes, trains=rules.trains), hosts)


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


def surviving_placement(
    rules: PlacementRules, shapes: Sequence[LayerShape], hosts: Sequence[HostSpec], *, before: Placement,
    survivors: Sequence[int],
) -> Placement:  # fmt: skip
    """Place the experts after hosts were lost; those of the survivors stay, so a placement by measured load is kept.

    An expert that lost its home gets a replica as its home, or else goes to the least loaded host, the largest first.
    Policies other than ours place all experts again, and so does ours where there is no room for that.

    Args:
        hosts: the survivors.
        before: the placement on all hosts. survivors: the index in it of each of `hosts`.

    Raises:
        InputError: the hosts cannot hold the experts.
    """
    costs = costs_of(shapes, trains=rules.trains)
    if rules.policy in ("auto", "lpt"):
        now = {old: new for new, old in enumerate(survivors)}
        kept = [[[now[host] for host in held if host in now] for held in layer.copies] for layer in before.layers]
        found = _adopt_orphans(kept, before, costs, hosts, now=now)
        if found is not None:
            return found
    return place_first(rules, costs, hosts)


def _adopt_orphans(
    kept: list[list[list[int]]], before: Placement, costs: Costs, hosts: Sequence[HostSpec], *, now: Mapping[int, int]
) -> Placement | None:
    """`kept` ([layer][expert]: hosts that are left) with a host for each expert that has none; None without room."""
    free = [math.inf if spec.memory_bytes is None else spec.memory_bytes for spec in hosts]
    for layer, row in zip(kept, costs, strict=True):
        for held, cost in zip(layer, row, strict=True):
            for position, host in enumerate(held):
                free[host] -= cost.replica_bytes if position else cost.home_bytes
    if min(free) < 0:  # a replica that became a home needs more room
        return None
    layers = []
    for layer, row, old in zip(kept, costs, before.layers, strict=True):
        present = [expert for expert, held in enumerate(layer) if held]
        shares = [_left_shares(*pair, now=now) for pair in zip(old.copies, old.shares, strict=True)]
        partial = Placement(
            0, len(hosts),
            (LayerPlacement(tuple(tuple(layer[e]) for e in present), tuple(shares[e] for e in present)),),
        )  # fmt: skip
        load = [row[expert].work for expert in present]
        orphans = [expert for expert, held in enumerate(layer) if not held]
        for expert in sorted(orphans, key=lambda expert: (-row[expert].work, expert)):
            able = [host for host in range(len(hosts)) if free[host] >= row[expert].home_bytes]
            if not able:
                return None
            host = new_expert_host(partial, 0, load, hosts, work=row[expert].work, able=able)
            partial, load = partial.with_expert(0, host), [*load, row[expert].work]
            free[host] -= row[expert].home_bytes
            layer[expert], shares[expert] = [host], (1.0,)
        layers.append(LayerPlacement(tuple(map(tuple, layer)), tuple(shares)))
    return Placement(before.version + 1, len(hosts), tuple(layers))


def _left_shares(copies: Sequence[int], shares: Sequence[float], *, now: Mapping[int, int]) -> tuple[float, ...]:
    """Shares of the copies that are left, which sum to one again."""
    left = [share for host, share in zip(copies, shares, strict=True) if host in now]
    total = sum(left)
    return tuple(share / total if total > 0 else 1 / len(left) for share in left)


def costs_of(shapes: Sequence[LayerShape], *, trains: bool = True) -> Costs:
    """Bytes and work of each expert of these layers: under an optimizer with two moments, or of its weights alone."""
    sizes = [[shape.numel(expert) for expert in range(shape.num_experts)] for shape in shapes]
    if trains:
        return costs_of_sizes(sizes)
    return [[ExpertCost(WEIGHT_BYTES * n, WEIGHT_BYTES * n, row_work(n)) for n in row] for row in sizes]


def costs_of_sizes(parameters_LE: Sequence[Sequence[int]]) -> Costs:
    """`costs_of`, by the number of parameters of each expert."""
    return [[ExpertCost(HOME_BYTES * n, REPLICA_BYTES * n, row_work(n)) for n in row] for row in parameters_LE]
