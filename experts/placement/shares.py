"""Divides each expert's rows over its copies, so that the slowest host is as fast as these copies allow.

This is a flow problem: experts send their work to hosts that hold them. The minimum time of the slowest
host is the largest work over speed of any set of hosts whose work can go nowhere else. `divide` starts with parts in
proportion to speed, evens hosts out, then pushes the excess over the bound along paths of replicated experts; if a push
finds no path, it has found such a set, and the bound rises to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experts.placement.values import ExpertCost, LayerPlacement

#: Maximum number of rounds of evening out, and the relative gain of a round below which they end.
SWEEPS, CONVERGED = 12, 1e-3
#: Relative difference below which loads count as equal.
EPSILON = 1e-9


@dataclass
class WorkSplit:
    """The work of one layer, divided over the hosts.

    Attributes:
        parts: expert -> work of each copy, for experts of several copies only.
        loads: work of each host.
        level: time of the slowest host.
    """

    parts: dict[int, list[float]]
    loads: list[float]
    level: float


def divide(
    work: Sequence[float], copies: Sequence[Sequence[int]], speeds: Sequence[float], *, slack: float = 0.0,
    start: Mapping[int, Sequence[float]] | None = None,
) -> WorkSplit:  # fmt: skip
    """Compute the best split of `work` over `copies`.

    Args:
        work: of each expert, (E,).
        copies: hosts of each expert, none twice.
        slack: relative distance of the slowest host from the optimum that is accepted. It keeps the parts near equal
            levels among each expert's own copies, which tolerate a drifting load better than extreme ones.
        start: initial parts of some experts, from a similar layout; only saves time.
    """
    loads, parts = [0.0] * len(speeds), {}
    for expert, hosts in enumerate(copies):
        if len(hosts) == 1:
            loads[hosts[0]] += work[expert]
        else:
            mine = list(start[expert]) if start and expert in start else []
            if not mine:
                together = sum(speeds[host] for host in hosts)
                mine = [work[expert] * speeds[host] / together for host in hosts]
            for host, part in zip(hosts, mine, strict=True):
                loads[host] += part
            parts[expert] = mine
    shared = sorted((expert for expert in parts if work[expert] > 0), key=lambda expert: -work[expert])
    bound = sum(work) / sum(speeds)
    level, before = _slowest(loads, speeds), math.inf
    for _ in range(SWEEPS):
        if level <= bound * (1 + slack) or level > before * (1 - CONVERGED):
            break
        for expert in shared:
            _even_out(parts[expert], copies[expert], loads, speeds, work[expert])
        level, before = _slowest(loads, speeds), level
    if shared:
        _push(parts, copies, loads, speeds, shared, bound=bound, slack=slack)
    return WorkSplit(parts, loads, _slowest(loads, speeds))


def _slowest(loads: Sequence[float], speeds: Sequence[float]) -> float:
    return max(load / speed for load, speed in zip(loads, speeds, strict=True))


def _even_out(
    parts: list[float], hosts: Sequence[int], loads: list[float], speeds: Sequence[float], work: float
) -> None:
    """Divide one expert's work over its hosts so that those that get any are at one level."""
    for position, host in enumerate(hosts):
        loads[host] -= parts[position]
    active = list(range(len(hosts)))
    while True:
        level = (work + sum(loads[hosts[p]] for p in active)) / sum(speeds[hosts[p]] for p in active)
        stay = [p for p in active if loads[hosts[p]] < level * speeds[hosts[p]]]
        if len(stay) == len(active) or not stay:
            break
        active = stay
    for position, host in enumerate(hosts):
        parts[position] = max(0.0, level * speeds[host] - loads[host]) if position in active else 0.0
    total = sum(parts)
    if total <= 0.0:  # too little work for the precision of the loads
        lowest = min(range(len(hosts)), key=lambda position: loads[hosts[position]] / speeds[hosts[position]])
        parts[lowest] = total = work
    for position, host in enumerate(hosts):
        parts[position] *= work / total  # rounding only
        loads[host] += parts[position]


def _push(
    parts: dict[int, list[float]], copies: Sequence[Sequence[int]], loads: list[float], speeds: Sequence[float],
    shared: Sequence[int], *, bound: float, slack: float,
) -> None:  # fmt: skip
    """Push work until every host is at most (1 + slack) x the optimum, in place."""
    at_host: list[list[tuple[int, int]]] = [[] for _ in speeds]
    for expert in shared:
        for position, host in enumerate(copies[expert]):
            at_host[host].append((expert, position))
    everyone = range(len(speeds))
    while True:
        caps = [bound * (1 + slack) * speed for speed in speeds]
        source = max(everyone, key=lambda host: loads[host] / speeds[host])
        if loads[source] <= caps[source] * (1 + EPSILON):
            return
        reached, end = _path_out(source, at_host, parts, copies, loads, caps)
        if end is None:
            stuck = sum(loads[host] for host in reached) / sum(speeds[host] for host in reached)
            bound = max(bound * (1 + EPSILON), stuck)
            continue
        path = []
        host = end
        while host != source:
            expert, source_copy, target_copy = reached[host]
            path.append((expert, source_copy, target_copy))
            host = copies[expert][source_copy]
        amount = min(loads[source] - caps[source], caps[end] - loads[end], *(parts[e][p] for e, p, _ in path))
        for expert, source_copy, target_copy in path:
            parts[expert][source_copy] -= amount
            parts[expert][target_copy] += amount
        loads[source] -= amount
        loads[end] += amount


def _path_out(
    source: int, at_host: list[list[tuple[int, int]]], parts: dict[int, list[float]], copies: Sequence[Sequence[int]],
    loads: list[float], caps: list[float],
) -> tuple[dict[int, tuple[int, int, int]], int | None]:  # fmt: skip
    """Find the shortest path for work to leave `source`.

    Returns:
        ({host reached: (expert, position that it leaves, position here)}, the last host of the path). The last host is
        None if no host with room can be reached; their work can then go nowhere else.
    """
    reached: dict[int, tuple[int, int, int]] = {source: (-1, -1, -1)}
    queue, least = [source], EPSILON * caps[source]
    for host in queue:
        for expert, position in at_host[host]:
            if parts[expert][position] <= least:
                continue
            for other, target in enumerate(copies[expert]):
                if target in reached:
                    continue
                reached[target] = (expert, position, other)
                if loads[target] < caps[target] * (1 - EPSILON):
                    return reached, target
                queue.append(target)
    return reached, None


def shares_of(
    work: Sequence[float], copies: Sequence[Sequence[int]], split: WorkSplit, speeds: Sequence[float]
) -> tuple[tuple[float, ...], ...]:
    """Share of each copy in its expert's rows; an expert without work is shared in proportion to speed."""
    found = []
    for expert, hosts in enumerate(copies):
        if len(hosts) == 1:
            found.append((1.0,))
            continue
        parts = split.parts[expert] if work[expert] > 0 else [speeds[host] for host in hosts]
        total = sum(parts)
        first = [max(0.0, part) / total for part in parts[:-1]]
        found.append((*first, max(0.0, 1.0 - sum(first))))
    return tuple(found)


def reshare(
    layer: LayerPlacement, load_E: Sequence[float], costs: Sequence[ExpertCost], speeds: Sequence[float], *,
    slack: float = 0.0,
) -> LayerPlacement:  # fmt: skip
    """The same copies with new shares for `load_E` (rows of each expert); moves no weights."""
    work = [load * cost.work for load, cost in zip(load_E, costs, strict=True)]
    split = divide(work, layer.copies, speeds, slack=slack)
    return LayerPlacement(layer.copies, shares_of(work, layer.copies, split, speeds))
