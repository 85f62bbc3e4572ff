"""What experts take, for the plan and for the record: who begins with how much, and bytes of each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from experts.config import ExpertsConfig
from experts.placement import Costs, ExpertCost, HostSpec
from experts.shapes import LayerShape
from experts.starting import HOME_BYTES, REPLICA_BYTES, PlacementRules, place_first
from raytrain.config import OptimConfig
from raytrain.plan_memory import trained_bytes
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


def expert_costs(shapes: Sequence[LayerShape], optim: OptimConfig, *, dtype: str) -> Costs:
    """Bytes and work of each expert under this optimizer; a replica has weights and gradients."""

    def cost(shape: LayerShape, expert: int) -> ExpertCost:
        taken = trained_bytes(shape.numel(expert), optim, dtype=dtype)
        return ExpertCost(taken.kept, taken.weights + taken.gradients, shape.row_work(expert))

    return [[cost(shape, expert) for expert in range(shape.num_experts)] for shape in shapes]
