"""The published EPLB policy, reimplemented from its description for comparison.

github.com/deepseek-ai/EPLB (MIT): pack groups of experts onto nodes, add replicas in each node to the expert with the
largest load per copy, pack the copies onto the node's GPUs, largest first, with equal slots everywhere. If groups do
not divide by nodes, there is one node and one group (the global policy). It ignores speeds, memory and the old
placement, gives every copy an equal share, and may put two copies of an expert on one GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

Weights = Sequence[Sequence[float]]


def eplb_physical(
    weight: Weights, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> list[list[int]]:
    """Return the logical expert of every slot: (L, num_replicas); GPU g has the slots g x S to (g + 1) x S - 1.

    Args:
        weight: load of each expert, (L, E).
        num_replicas: slots of all GPUs together.
        num_groups: groups of experts; nodes matter only if it is a multiple of `num_nodes`.

    Raises:
        ValueError: the slots do not divide equally by the GPUs, or are fewer than the experts.
    """
    if num_replicas % num_gpus or num_gpus % num_nodes:
        raise ValueError(f"{num_replicas} slots, {num_gpus} GPUs and {num_nodes} nodes do not divide")
    if any(len(row) > num_replicas for row in weight):
        raise ValueError(f"{max(map(len, weight))} experts do not fit {num_replicas} slots")
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    return [_layer([float(load) for load in row], num_replicas, num_groups, num_nodes, num_gpus) for row in weight]


def _layer(load: list[float], slots: int, groups: int, nodes: int, gpus: int) -> list[int]:
    size = len(load) // groups
    if size * groups != len(load):
        raise ValueError(f"{len(load)} experts do not divide into {groups} groups")
    per_group = [sum(load[g * size : (g + 1) * size]) for g in range(groups)]
    placed: list[int] = []
    for packed in pack(per_group, nodes):
        mine = [expert for group in packed for expert in range(group * size, (group + 1) * size)]
        copies = replicate([load[expert] for expert in mine], slots // nodes)
        count = [copies.count(index) for index in range(len(mine))]
        each = [load[mine[index]] / count[index] for index in copies]
        placed += [mine[copies[slot]] for gpu in pack(each, gpus // nodes) for slot in gpu]
    return placed


def pack(weights: Sequence[float], packs: int) -> list[list[int]]:
    """Put items, largest first, into the lightest pack with a free place; all packs get equally many items.

    Returns:
        the items of each pack, in the order in which they were added.
    """
    each = len(weights) // packs
    if each == 1:
        return [[item] for item in range(packs)]
    loads, found = [0.0] * packs, [[] for _ in range(packs)]
    free = list(range(packs))
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        lightest = min(free, key=loads.__getitem__)
        found[lightest].append(item)
        loads[lightest] += weights[item]
        if len(found[lightest]) == each:
            free.remove(lightest)
    return found


def replicate(weights: Sequence[float], slots: int) -> list[int]:
    """Return the expert of each slot: every expert once, then repeatedly the one with the largest load per copy."""
    found, count = list(range(len(weights))), [1] * len(weights)
    each = list(weights)
    for _ in range(slots - len(weights)):
        expert = max(range(len(weights)), key=each.__getitem__)
        found.append(expert)
        count[expert] += 1
        each[expert] = weights[expert] / count[expert]
    return found
