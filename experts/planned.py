"""What the plan asks of the experts: who begins with how much. No torch."""

from __future__ import annotations

from collections.abc import Callable

from experts.config import ExpertsConfig
from experts.placement import ExpertCost, HostSpec
from experts.starting import HOME_BYTES, REPLICA_BYTES, PlacementRules, place_first
from raytrain.plan_values import ExpertFacts, Held


def shared_out(facts: ExpertFacts, experts: ExpertsConfig) -> Callable[[int], list[Held]]:
    """Number of equal holders -> what each of them begins with."""
    rules = PlacementRules(experts.placement, experts.replicas, experts.rebalance_every)
    costs = [[ExpertCost(HOME_BYTES * one, REPLICA_BYTES * one, 6.0 * one) for one in row] for row in facts.parameters]

    def over(holders: int) -> list[Held]:
        placement = place_first(rules, costs, [HostSpec(host, 1.0, None) for host in range(holders)])
        homes, replicas, number = [0] * holders, [0] * holders, [0] * holders
        for layer, sizes in zip(placement.layers, facts.parameters, strict=True):
            for hosts, size in zip(layer.copies, sizes, strict=True):
                homes[hosts[0]] += size
                for host in hosts:
                    number[host] += 1
                for host in hosts[1:]:
                    replicas[host] += size
        return [Held(*row) for row in zip(number, homes, replicas, strict=True)]

    return over
