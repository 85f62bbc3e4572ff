"""Bytes of experts, for the plan and the record: what each holder starts with, and what each expert costs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from cluster.devices.inventory import Device
from experts.config import ExpertsConfig
from experts.placement.starting import MEMORY_SHARE, PlacementRules, costs_of_sizes, place_first
from experts.placement.values import Costs, ExpertCost, HostSpec, equal_hosts
from experts.shapes import LayerShape, row_work
from raytrain.config.sections import OptimConfig
from raytrain.plan.facts import ExpertFacts, HeldExperts
from raytrain.plan.rules.accelerators import is_named, peak_of
from raytrain.plan.rules.hosts import kinds_of_hosts, number_of_hosts
from raytrain.plan.rules.memory import trained_bytes


def shared_out(
    facts: ExpertFacts, experts: ExpertsConfig, gpus: Sequence[Device] = (), *, dtype: str = "fp32"
) -> Callable[[int], list[HeldExperts]]:
    """Return a function: number of holders -> what each of them starts with.

    Args:
        gpus: of the machines, in the order of the workers; empty on CPUs. Holders on different kinds count at their
            data-sheet rates in `dtype` where these are known; in the run they measure themselves.
    """
    rules = PlacementRules.of(experts)
    costs = costs_of_sizes(facts.parameters)
    kinds = kinds_of_hosts(experts.hosts) if isinstance(experts.hosts, dict) else [gpu.name for gpu in gpus]

    def over(holders: int) -> list[HeldExperts]:
        specs = equal_hosts(holders)
        if len(kinds) == holders:
            rates = [peak_of(kind or "", dtype) for kind in kinds]
            if all(rates):
                specs = [replace(spec, speed=rate or 1.0) for spec, rate in zip(specs, rates, strict=True)]
        placement = place_first(rules, costs, specs)
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
    """Check before the start whether the experts fit the GPUs of the hosts: those of the types that `experts.hosts`
    names, else the largest ones.

    Raises:
        InputError: they do not fit; names an expert that is too large for any GPU.
    """
    largest = sorted(devices, key=lambda gpu: -gpu.memory_bytes)
    if isinstance(experts.hosts, dict):
        left, largest = largest, []
        for kind, number in experts.hosts.items():  # two names may mean the same GPUs
            taken = [gpu for gpu in left if is_named(gpu, kind)][:number]
            largest += taken
            left = [gpu for gpu in left if not any(gpu is one for one in taken)]
    largest = largest[:hosts]
    if len(largest) < hosts or not all(gpu.memory_bytes for gpu in largest):  # not always known to Ray
        return
    rules = PlacementRules.of(experts)
    specs = [
        HostSpec(host, 1.0, int(MEMORY_SHARE * gpu.memory_bytes), device=gpu.name) for host, gpu in enumerate(largest)
    ]
    place_first(rules, costs_of_sizes(facts.parameters), specs)


def idle_keys(experts: ExpertsConfig, facts: ExpertFacts | None, *, place: Any, workers: int) -> list[str]:
    """Keys of the section that have no effect, or less than they ask for, where the experts live; one sentence each.

    Args:
        facts: None if the model's sizes are unknown.
        place: from the plan: "none", 0, "colocated", a number of hosts, or numbers by accelerator type.
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


def expert_costs(shapes: Sequence[LayerShape], optim: OptimConfig, *, dtype: str) -> Costs:
    """Bytes and work of each expert under this optimizer. A replica has weights and gradients; a move sends weights and
    optimizer state."""

    def cost(parameters: int) -> ExpertCost:
        used = trained_bytes(parameters, optim, dtype=dtype)
        replica, moved = used.weights + used.gradients, used.weights + used.optimizer
        return ExpertCost(used.kept, replica, row_work(parameters), moved)

    return [[cost(shape.numel(expert)) for expert in range(shape.num_experts)] for shape in shapes]
