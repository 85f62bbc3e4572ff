"""Our policy over all layers: initial layouts that fit the memory together, then a local search in each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experts.placement.packing import (
    IDLE,
    UNLIMITED,
    LayerProblem,
    OutOfRoom,
    Packing,
    adapt_replicas,
    pack_bytes,
    pack_largest_first,
)
from experts.placement.refine import LocalSearch
from experts.placement.shares import divide, shares_of
from experts.placement.values import Costs, ExpertCost, HostSpec, LayerPlacement, Placement

#: Operations of the local search in one plan, and at most in one layer; about 5 microseconds each.
PLAN_BUDGET, LAYER_BUDGET = 120_000, 20_000
#: Relative gain that a new layout needs over the refined old one: it moves most of the experts.
KEEP = 0.03
#: Relative distance from the optimum that shares may keep if that makes them less extreme.
SLACK = 0.005

Copies = list[list[int]]
"""[expert]: hosts, home first."""


@dataclass(frozen=True)
class HostLimits:
    """Limits of the hosts: bytes over all layers, and copies of one layer."""

    memory: list[float]
    slots: float

    @classmethod
    def of(cls, hosts: Sequence[HostSpec], slots_per_host: int | None) -> HostLimits:
        """The limits of these hosts; infinite where there is none."""
        memory = [UNLIMITED if host.memory_bytes is None else float(host.memory_bytes) for host in hosts]
        return cls(memory, UNLIMITED if slots_per_host is None else float(slots_per_host))


def plan(
    load_LE: Sequence[Sequence[float]], hosts: Sequence[HostSpec], costs: Costs, extra: int, limits: HostLimits, *,
    previous: Placement | None, search: bool = True,
) -> list[LayerPlacement]:  # fmt: skip
    """Place every layer.

    Args:
        extra: maximum number of replicas of each layer.
        previous: the current placement; used if it fits `hosts` and `costs`.
        search: False skips the local search; with `previous` its homes stay, and only replicas follow the load.

    Raises:
        OutOfRoom: the homes do not fit the memory.
    """
    speeds = [float(host.speed) for host in hosts]
    tasks = [
        LayerProblem(
            worked(load, row), speeds, [cost.home_bytes for cost in row], [cost.replica_bytes for cost in row],
            _extra(extra, len(row), len(hosts), limits.slots), [limits.slots] * len(hosts), limits.memory,
        )
        for load, row in zip(load_LE, costs, strict=True)
    ]  # fmt: skip
    old = _old(previous, tasks, limits)
    starts = old or _seeds(tasks, limits)
    free = list(limits.memory)
    for task, copies in zip(tasks, starts, strict=True):
        free = [room - used for room, used in zip(free, used_bytes(task, copies), strict=True)]
    budget = min(LAYER_BUDGET, PLAN_BUDGET // max(1, len(tasks))) if search else 0
    bytes_homes, found = [0] * len(hosts), []
    for task, copies in zip(tasks, starts, strict=True):
        room = [left + used for left, used in zip(free, used_bytes(task, copies), strict=True)]
        bounded = LayerProblem(task.work, speeds, task.home, task.replica, task.extra, task.slots, room)
        layout = _follow(bounded, copies, budget) if old else _refine(Packing(bounded, _copy(copies)), budget)
        _choose_homes(layout, [hosts_[0] for hosts_ in copies] if old else None, bytes_homes)
        free = layout.memory
        split = divide(task.work, layout.copies, speeds, slack=SLACK)
        shares = shares_of(task.work, layout.copies, split, speeds)
        found.append(LayerPlacement(tuple(tuple(each) for each in layout.copies), shares))
    return found


def worked(load: Sequence[float], costs: Sequence[ExpertCost]) -> list[float]:
    """Work of each expert: rows x work of a row, at least `IDLE` of the mean; equal rows if no load is known."""
    work = [rows * cost.work for rows, cost in zip(load, costs, strict=True)]
    if not any(work):
        work = [cost.work for cost in costs]
    floor = IDLE * sum(work) / len(work)
    return [max(one, floor) for one in work]


def used_bytes(task: LayerProblem, copies: Copies) -> list[int]:
    """Bytes of a layer's copies on each host."""
    used = [0] * len(task.speeds)
    for expert, hosts in enumerate(copies):
        for position, host in enumerate(hosts):
            used[host] += task.replica[expert] if position else task.home[expert]
    return used


def _extra(extra: int, experts: int, hosts: int, slots: float) -> int:
    room = experts * (hosts - 1)
    return max(0, min(extra, room if slots == UNLIMITED else min(room, int(slots) * hosts - experts)))


def _copy(copies: Copies) -> Copies:
    return [list(hosts) for hosts in copies]


def _old(previous: Placement | None, tasks: Sequence[LayerProblem], limits: HostLimits) -> list[Copies] | None:
    """The old copies, if every host still exists and has room for them; else None."""
    if previous is None or len(previous.layers) != len(tasks):
        return None
    copies = [[list(hosts) for hosts in layer.copies] for layer in previous.layers]
    free = list(limits.memory)
    for task, layer in zip(tasks, copies, strict=True):
        number = len(task.speeds)
        if len(layer) != len(task.work) or any(host >= number for hosts in layer for host in hosts):
            return None
        held = [sum(host in hosts for hosts in layer) for host in range(number)]
        free = [room - used for room, used in zip(free, used_bytes(task, layer), strict=True)]
        if max(held) > limits.slots:
            return None
    return copies if min(free) >= 0 else None


def _seeds(tasks: Sequence[LayerProblem], limits: HostLimits) -> list[Copies]:
    """Initial layouts: largest first within each layer's part of the memory; if that has no room, by bytes alone."""
    need = [sum(task.home) for task in tasks]
    free, found = list(limits.memory), []
    try:
        for index, task in enumerate(tasks):
            part = need[index] / max(1, sum(need[index:]))
            quota = [room if room == UNLIMITED else room * part for room in free]
            layout = pack_largest_first(
                LayerProblem(task.work, task.speeds, task.home, task.replica, task.extra, task.slots, quota)
            )
            free = [room - used for room, used in zip(free, used_bytes(task, layout.copies), strict=True)]
            found.append(layout.copies)
    except OutOfRoom:
        return pack_bytes([task.home for task in tasks], limits.memory, limits.slots)
    return found


def _refine(layout: Packing, budget: int) -> Packing:
    search = LocalSearch(layout, budget=budget)
    search.climb()
    search.restart()
    return search.layout


def _follow(task: LayerProblem, copies: Copies, budget: int) -> Packing:
    """Adapt the old layout, or return a new one if that is better by `KEEP`. Without a budget no home moves."""
    layout = Packing(task, _copy(copies))
    adapt_replicas(layout, divide(task.work, copies, task.speeds).loads)
    if not budget:
        return layout
    search = LocalSearch(layout, budget=budget)
    search.climb()
    if search.now.level <= search.enough * (1 + KEEP):
        return search.layout
    try:
        other = LocalSearch(pack_largest_first(task), budget=budget // 2)
    except OutOfRoom:
        return search.layout
    other.climb()
    return other.layout if other.now.level < search.now.level * (1 - KEEP) else search.layout


def _choose_homes(layout: Packing, before: list[int] | None, bytes_homes: list[int]) -> None:
    """Choose each home among the expert's hosts: the old one, or the host with the fewest bytes of homes."""
    sizes = layout.task.home
    for expert, hosts in enumerate(layout.copies):
        if len(hosts) == 1:
            bytes_homes[hosts[0]] += sizes[expert]
    for expert, hosts in enumerate(layout.copies):
        if len(hosts) == 1:
            continue
        home = before[expert] if before is not None and before[expert] in hosts else None
        home = min(hosts, key=lambda host: (bytes_homes[host], host)) if home is None else home
        if home != hosts[0]:
            layout.apply([(expert, [home, *(host for host in hosts if host != home)])])
        bytes_homes[layout.copies[expert][0]] += sizes[expert]
