"""What experts take, for the plan and for the record: who begins with how much, and bytes of each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from cluster.devices.inventory import Device
from experts.config import ExpertsConfig
from experts.placement.starting import HOME_BYTES, MEMORY_SHARE, REPLICA_BYTES, PlacementRules, place_first
from experts.placement.values import Costs, ExpertCost, HostSpec
from experts.shapes import LayerShape
from raytrain.config.sections import OptimConfig
from raytrain.plan.facts import ExpertFacts, HeldExperts
from raytrain.plan.rules.hosts import number_of_hosts
from raytrain.plan.rules.memory import trained_bytes


def shared_out(facts: ExpertFacts, experts: ExpertsConfig) -> Callable[[int], list[HeldExperts]]:
    """Number of equal holders -> what each of them begins with."""
    rules = PlacementRules(experts.placement, experts.replicas, experts.rebalance_every)
    costs = _costs(facts)

    def over(holders: int) -> list[HeldExperts]:
        placement = place_first(rules, costs, [HostSpec(host, 1.0, None) for host in range(holders)])
        homes, replicas, number = [0] * holders, [0] * holders, [0] * holders
        for layer, sizes in zip(placement.layers, facts.parameters, strict=True):
            for hosts, size in zip(layer.copies, sizes, strict=True):
                homes[hosts[0]] += size
                for host in hosts:
                    number[host] += 1
                for host in hosts[1:]:
                    replicas[host] += size
        return [HeldExperts(*row) for row in zip(number, homes, replicas, strict=True)]

    return over


def check_room(facts: ExpertFacts, experts: ExpertsConfig, devices: Iterable[Device], *, hosts: int) -> None:
    """Before anything starts: whether the experts fit the GPUs that hosts may get, the largest ones at best.

    Raises:
        InputError: they do not; the message names an expert too large for any.
    """
    largest = sorted(devices, key=lambda gpu: -gpu.memory_bytes)[:hosts]
    if len(largest) < hosts or not all(gpu.memory_bytes for gpu in largest):  # Ray does not know every GPU's memory
        return
    rules = PlacementRules(experts.placement, experts.replicas, experts.rebalance_every)
    specs = [
        HostSpec(host, 1.0, int(MEMORY_SHARE * gpu.memory_bytes), device=gpu.name) for host, gpu in enumerate(largest)
    ]
    place_first(rules, _costs(facts), specs)


def idle_keys(experts: ExpertsConfig, facts: ExpertFacts | None, *, place: Any, workers: int) -> list[str]:
    """Keys of the section that change nothing, or less than they ask for, where the experts live; each a sentence.

    Args:
        facts: None where nobody knows the model's sizes.
        place: as the plan says: "none", 0, "colocated", a number of hosts, or numbers by accelerator type.
    """
    if place == "none":
        return []
    holders = workers if place == "colocated" else number_of_hosts(place)
    title = "worker" if place in (0, "colocated") else "host"
    why = ""
    if holders < 2:
        why = f"{'every' if place == 0 else 'the one'} {title} holds all experts"
    elif experts.placement == "round_robin":
        why = "experts.placement round_robin neither looks at loads nor makes copies"
    if why:
        asked = {"rebalance_every": experts.rebalance_every, "replicas": experts.replicas}
        return [f"experts.{key} {value} changes nothing: {why}" for key, value in asked.items() if value]
    numbers = [len(layer) for layer in facts.parameters] if facts else [experts.num_experts or 0]
    most = min(numbers, default=0) * (holders - 1)
    if not 0 < most < experts.replicas:
        return []
    return [
        f"experts.replicas {experts.replicas} is more than {holders} {title}s can hold: there is room for {most} in a"
        f" layer, one of each expert on every other {title}"
    ]


def _costs(facts: ExpertFacts) -> Costs:
    return [[ExpertCost(HOME_BYTES * one, REPLICA_BYTES * one, 6.0 * one) for one in row] for row in facts.parameters]


def expert_costs(shapes: Sequence[LayerShape], optim: OptimConfig, *, dtype: str) -> Costs:
    """Bytes and work of each expert under this optimizer; a replica has weights and gradients, a move takes weights
    and optimizer state along."""

    def cost(shape: LayerShape, expert: int) -> ExpertCost:
        taken = trained_bytes(shape.numel(expert), optim, dtype=dtype)
        replica, moved = taken.weights + taken.gradients, taken.weights + taken.optimizer
        return ExpertCost(taken.kept, replica, shape.row_work(expert), moved)

    return [[cost(shape, expert) for expert in range(shape.num_experts)] for shape in shapes]
