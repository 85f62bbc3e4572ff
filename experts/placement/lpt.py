"""Our placement policy: layouts that fit the memory (longest processing time first), then a local search.

`policy.py` and `rebalance.py` call it; pure functions of load, speed and room.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from experts.placement.values import (
    Costs,
    ExpertCost,
    HostSpec,
    LayerPlacement,
    Placement,
    WorkSplit,
    divide,
    shares_of,
)

# ---------------------------------------------------------------- packing

#: Work of an unused expert, as a part of the mean: makes idle experts spread too.
IDLE = 0.01
#: A host within this relative distance of the best may be preferred if it joins parts of the replica graph.
NEAR = 0.02
#: A replica moves to another expert that has this many times the work per copy.
HOTTER = 1.2


@dataclass(frozen=True)
class LayerProblem:
    """The input of placing one layer: the work and the bytes of each expert, the speed and the free bytes of each host.

    `work` are predicted rows x work, at least `IDLE` of the mean; `extra` is the number of replicas.
    """

    work: list[float]
    speeds: list[float]
    home: list[int]
    replica: list[int]
    extra: int
    memory: list[float]

    @cached_property
    def bound(self) -> float:
        """A lower bound of the time: all work over all hosts, or the largest experts over the fastest hosts."""
        fastest = sorted(self.speeds, reverse=True)
        largest = sorted(self.work, reverse=True)[: len(fastest)]
        if self.extra:
            return max(sum(self.work) / sum(fastest), largest[0] / sum(fastest[: self.extra + 1]))
        tops = (sum(largest[:k]) / sum(fastest[:k]) for k in range(1, len(largest) + 1))
        return max(sum(self.work) / sum(fastest), *tops)


class OutOfRoom(Exception):
    """No host has room for the expert of this number."""


Change = list[tuple[int, list[int]]]
"""Experts with their new hosts."""


@dataclass
class Packing:
    """A layout: hosts of every expert, home first, and the bytes that are left."""

    task: LayerProblem
    copies: list[list[int]]
    memory: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = list(self.task.memory)
        for expert in range(len(self.copies)):
            self._take(expert, 1)

    @property
    def spare(self) -> int:
        """Replicas that may still be added."""
        return self.task.extra - sum(map(len, self.copies)) + len(self.copies)

    def fits(self, expert: int, host: int) -> bool:
        """Whether `host` has room for one more copy: the home if the expert has none yet, else a replica."""
        size = self.task.replica[expert] if self.copies[expert] else self.task.home[expert]
        return self.memory[host] >= size and host not in self.copies[expert]

    def add(self, expert: int, host: int) -> None:
        self.memory[host] -= self.task.replica[expert] if self.copies[expert] else self.task.home[expert]
        self.copies[expert].append(host)

    def apply(self, change: Change) -> Change | None:
        """Apply a change and return its inverse; None, with nothing changed, if there is no room."""
        back = [(expert, self.copies[expert]) for expert, _ in change]
        self._set(change)
        touched = {host for _, hosts in change for host in hosts}
        if all(self.memory[host] >= 0 for host in touched):
            return back
        self._set(back)
        return None

    def _set(self, change: Change) -> None:
        for expert, hosts in change:
            self._take(expert, -1)
            self.copies[expert] = hosts
            self._take(expert, 1)

    def _take(self, expert: int, sign: int) -> None:
        for position, host in enumerate(self.copies[expert]):
            self.memory[host] -= sign * (self.task.replica[expert] if position else self.task.home[expert])


def copy_counts(work: Sequence[float], extra: int, *, most: int) -> list[int]:
    """Copies of each expert: one, then repeatedly one more of that with the largest work per copy, up to `most`."""
    count, each = [1] * len(work), list(work)
    if most < 2:
        return count
    for _ in range(min(extra, len(work) * (most - 1))):
        expert = max(range(len(work)), key=each.__getitem__)
        count[expert] += 1
        each[expert] = work[expert] / count[expert] if count[expert] < most else -1.0
    return count


def pack_largest_first(task: LayerProblem) -> Packing:
    """Build a layout: largest first, each copy to the host that would finish earliest. Replicas without room are left
    out; raises OutOfRoom for a home without any."""
    work, speeds = task.work, task.speeds
    layout = Packing(task, [[] for _ in work])
    loads, part_of = [0.0] * len(speeds), list(range(len(speeds)))
    counts = copy_counts(work, task.extra, most=len(speeds))
    pieces = [(work[expert] / count, expert) for expert, count in enumerate(counts) for _ in range(count)]
    pieces.sort(key=lambda piece: (-piece[0], piece[1]))
    for piece, expert in pieces:
        ends = [((loads[h] + piece) / speeds[h], h) for h in range(len(speeds)) if layout.fits(expert, h)]
        if not ends:
            if not layout.copies[expert]:
                raise OutOfRoom(expert)
            continue
        earliest, host = min(ends)
        if layout.copies[expert]:
            mine = part_of[layout.copies[expert][0]]
            limit = earliest + NEAR * task.bound
            apart = min(((end, h) for end, h in ends if end <= limit and part_of[h] != mine), default=(earliest, host))
            host = apart[1]
            joined = part_of[host]
            part_of = [mine if part == joined else part for part in part_of]
        layout.add(expert, host)
        loads[host] += piece
    return layout


def adapt_replicas(layout: Packing, loads: list[float]) -> None:
    """Adapt the replicas of an old layout to the load: drop surplus ones, then move them to hotter experts. `loads`,
    the work of every host, is updated in place."""
    work = layout.task.work
    for _ in range(layout.task.extra + sum(map(len, layout.copies))):
        coldest = min(
            (e for e, hosts in enumerate(layout.copies) if len(hosts) > 1),
            key=lambda e: work[e] / (len(layout.copies[e]) - 1), default=None,
        )  # fmt: skip
        if layout.spare < 0 and coldest is not None:
            _drop(layout, coldest, loads)
            continue
        hottest = _hottest(layout)
        if hottest is None:
            return
        if layout.spare > 0:
            _grow(layout, hottest, loads)
            continue
        if coldest is None or coldest == hottest:
            return
        merged, split = work[coldest] / (len(layout.copies[coldest]) - 1), work[hottest] / len(layout.copies[hottest])
        if split <= HOTTER * merged:
            return
        _drop(layout, coldest, loads)
        again = _hottest(layout)  # the dropped copy may have made the room
        _grow(layout, hottest if again is None else again, loads)


def _hottest(layout: Packing) -> int | None:
    """The expert with the most work per copy that another host can hold; if no replica is spare, ignore the room."""
    number, full = len(layout.task.speeds), layout.spare <= 0
    order = sorted(range(len(layout.copies)), key=lambda e: (-layout.task.work[e] / len(layout.copies[e]), e))
    for expert in order:
        if len(layout.copies[expert]) < number and (full or any(layout.fits(expert, h) for h in range(number))):
            return expert
    return None


def _grow(layout: Packing, expert: int, loads: list[float]) -> None:
    task, hosts = layout.task, layout.copies[expert]
    part = task.work[expert] / (len(hosts) + 1)
    ends = [((loads[h] + part) / task.speeds[h], h) for h in range(len(loads)) if layout.fits(expert, h)]
    if ends:
        loads[min(ends)[1]] += part
        layout.add(expert, min(ends)[1])


def _drop(layout: Packing, expert: int, loads: list[float]) -> None:
    """Remove the replica on the host that finishes last."""
    task, hosts = layout.task, layout.copies[expert]
    slowest = max(hosts[1:], key=lambda h: (loads[h] / task.speeds[h], h))
    loads[slowest] -= task.work[expert] / len(hosts)
    layout.apply([(expert, [host for host in hosts if host != slowest])])


def pack_bytes(sizes: Sequence[Sequence[int]], memory: Sequence[float]) -> list[list[list[int]]]:
    """Place the homes of all layers by bytes alone, the largest first, on the host with the most memory left: [layer]
    [expert] -> [the host]. Raises OutOfRoom."""
    free, used = list(memory), [[0] * len(memory) for _ in sizes]
    found: list[list[list[int]]] = [[[] for _ in row] for row in sizes]
    order = sorted(((-size, layer, e) for layer, row in enumerate(sizes) for e, size in enumerate(row)))
    for negative, layer, expert in order:
        able = [h for h in range(len(free)) if free[h] >= -negative]
        if not able:
            raise OutOfRoom(expert)
        host = max(able, key=lambda h: (free[h], -used[layer][h], -h))
        free[host] += negative
        used[layer][host] += 1
        found[layer][expert] = [host]
    return found


# ---------------------------------------------------------------- refine

#: A layout within this relative distance of the bound is good enough: the load drifts by more.
GOOD = 0.005
#: Number of hosts, copies and replicas on either side that one step takes candidates from.
BREADTH = 8
#: Relative gain that a candidate must bring on the slowest host.
WORTH = 1e-6
#: Random exchanges of one restart, and their seed.
KICK, SEED = 3, 20


class LocalSearch:
    """Improves `layout` until it is near its bound. `budget` counts hosts and replicated experts of each evaluation."""

    def __init__(self, layout: Packing, *, budget: int) -> None:
        self.layout, self.budget, self.task = layout, budget, layout.task
        self.enough = self.task.bound * (1 + GOOD)
        self.now = self._evaluate()

    def climb(self) -> LocalSearch:
        """Apply improving candidates until there are none."""
        while self.budget > 0 and self.now.level > self.enough and self._step():
            continue
        return self

    def restart(self) -> None:
        """Climb again from random exchanges of the best layout, with a fixed seed, while the budget lasts."""
        draw = random.Random(SEED)
        best, kept = self.now, _copy(self.layout.copies)
        while self.budget > 0 and best.level > self.enough:
            for _ in range(KICK):
                copies = self.layout.copies
                a, b = draw.randrange(len(copies)), draw.randrange(len(copies))
                g, h = draw.choice(copies[a]), draw.choice(copies[b])
                if a != b and g not in copies[b] and h not in copies[a]:
                    self.layout.apply([(a, _swap(copies[a], g, h)), (b, _swap(copies[b], h, g))])
            self.now = self._evaluate()
            self.climb()
            if self.now.level < best.level * (1 - WORTH):
                best, kept = self.now, _copy(self.layout.copies)
            else:
                self.layout = Packing(self.task, _copy(kept))
        self.layout = Packing(self.task, kept)
        self.now = best

    def _evaluate(self, change: Change | None = None) -> WorkSplit:
        """The best split of the layout's work; the layout is that of `now` except for `change`."""
        changed = {expert for expert, _ in change or ()}
        start = {e: parts for e, parts in self.now.parts.items() if e not in changed} if change else None
        found = divide(self.task.work, self.layout.copies, self.task.speeds, start=start)
        self.budget -= len(self.task.work) // 4 + len(self.task.speeds) + 8 * len(found.parts)
        return found

    def _step(self) -> bool:
        for _, change in sorted(self._candidates(), key=lambda scored: scored[0]):
            if self.budget <= 0:
                return False
            back = self.layout.apply(change)
            if back is None:
                self.budget -= 1
                continue
            found = self._evaluate(change)
            faster, alike = found.level < self.now.level * (1 - WORTH), found.level <= self.now.level * (1 + 1e-9)
            if faster or (alike and self._spread(found) < self._spread(self.now) * (1 - 1e-4)):  # the load more even
                self.now = found
                return True
            self.layout.apply(back)
        return False

    def _spread(self, split: WorkSplit) -> float:
        return sum(load * load / speed for load, speed in zip(split.loads, self.task.speeds, strict=True))

    def _candidates(self) -> Iterator[tuple[float, Change]]:
        """(estimated time of the slower of the two hosts, change); the estimate leaves all other parts unchanged."""
        loads, speeds, copies = self.now.loads, self.task.speeds, self.layout.copies
        order = sorted(range(len(speeds)), key=lambda host: (-loads[host] / speeds[host], host))
        top = loads[order[0]] / speeds[order[0]] * (1 - 1e-6)
        high = [host for host in order if loads[host] / speeds[host] >= top][:BREADTH]
        low = order[::-1][:BREADTH]
        # the copies of every host, largest first: (expert, its part)
        held: list[list[tuple[int, float]]] = [[] for _ in self.task.speeds]
        for expert, hosts in enumerate(self.layout.copies):
            parts = self.now.parts.get(expert)
            for position, host in enumerate(hosts):
                held[host].append((expert, self.task.work[expert] if parts is None else parts[position]))
        for own in held:
            own.sort(key=lambda item: (-item[1], item[0]))
        replicas = sorted(
            (self.now.parts[e][p], e, host) for e, hosts in enumerate(copies) for p, host in enumerate(hosts) if p
        )[: BREADTH // 2]
        for g in high:
            for expert, part in held[g]:
                for h in low:
                    if h == g or h in copies[expert]:
                        continue
                    moved = (expert, _swap(copies[expert], g, h))
                    yield self._estimate(g, h, part), [moved]
                    for other, theirs in held[h]:
                        if theirs < part and g not in copies[other]:
                            yield self._estimate(g, h, part - theirs), [moved, (other, _swap(copies[other], h, g))]
                    yield from self._replicate(expert, part, g, h, replicas)

    def _replicate(
        self, expert: int, part: float, g: int, h: int, replicas: list[tuple[float, int, int]]
    ) -> Iterator[tuple[float, Change]]:
        """Add a copy of `expert` on `h`, in place of another replica if none is spare."""
        loads, speeds, copies = self.now.loads, self.task.speeds, self.layout.copies
        even = (loads[g] * speeds[h] - loads[h] * speeds[g]) / (speeds[g] + speeds[h])
        score = self._estimate(g, h, min(part, max(0.0, even)))
        grown = [*copies[expert], h]
        if self.layout.spare > 0:
            yield score, [(expert, grown)]
        for size, other, host in replicas:
            if other != expert:
                left = [place for place in copies[other] if place != host]
                yield score + size / sum(speeds), [(other, left), (expert, grown)]
            elif host != g:
                yield score + size / sum(speeds), [(expert, [place for place in grown if place != host])]

    def _estimate(self, g: int, h: int, amount: float) -> float:
        loads, speeds = self.now.loads, self.task.speeds
        return max((loads[g] - amount) / speeds[g], (loads[h] + amount) / speeds[h])


def _swap(hosts: list[int], old: int, new: int) -> list[int]:
    return [new if host == old else host for host in hosts]


# ---------------------------------------------------------------- all layers

#: Operations of the local search in one plan, and at most in one layer; about 5 microseconds each.
PLAN_BUDGET, LAYER_BUDGET = 120_000, 20_000
#: Relative gain that a new layout needs over the refined old one: it moves most of the experts.
KEEP = 0.03
#: Relative distance from the optimum that shares may keep if that makes them less extreme.
SLACK = 0.005

Copies = list[list[int]]
"""[expert]: hosts, home first."""


def plan(
    load_LE: Sequence[Sequence[float]], hosts: Sequence[HostSpec], costs: Costs, extra: int, *,
    previous: Placement | None, search: bool = True,
) -> list[LayerPlacement]:  # fmt: skip
    """Place every layer: layouts that fit the memory together, then a local search in each. Raises OutOfRoom.

    Args:
        extra: maximum number of replicas of each layer.
        previous: the current placement; used if it fits `hosts` and `costs`.
        search: False skips the local search; with `previous` its homes stay, and only replicas follow the load.
    """
    speeds = [float(host.speed) for host in hosts]
    memory = [math.inf if host.memory_bytes is None else float(host.memory_bytes) for host in hosts]
    tasks = [
        LayerProblem(
            worked(load, row), speeds, [cost.home_bytes for cost in row], [cost.replica_bytes for cost in row],
            min(extra, len(row) * (len(hosts) - 1)), memory,
        )
        for load, row in zip(load_LE, costs, strict=True)
    ]  # fmt: skip
    old = _old(previous, tasks, memory)
    starts = old or _seeds(tasks, memory)
    free = memory
    for task, copies in zip(tasks, starts, strict=True):
        free = [room - used for room, used in zip(free, used_bytes(task, copies), strict=True)]
    budget = min(LAYER_BUDGET, PLAN_BUDGET // max(1, len(tasks))) if search else 0
    bytes_homes, found = [0] * len(hosts), []
    for task, copies in zip(tasks, starts, strict=True):
        room = [left + used for left, used in zip(free, used_bytes(task, copies), strict=True)]
        bounded = replace(task, memory=room)
        if old:
            layout = _follow(bounded, copies, budget)
        else:
            first = LocalSearch(Packing(bounded, _copy(copies)), budget=budget).climb()
            first.restart()
            layout = first.layout
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
    used = [0] * len(task.speeds)
    for expert, hosts in enumerate(copies):
        for position, host in enumerate(hosts):
            used[host] += task.replica[expert] if position else task.home[expert]
    return used


def _copy(copies: Copies) -> Copies:
    return [list(hosts) for hosts in copies]


def _old(previous: Placement | None, tasks: Sequence[LayerProblem], memory: list[float]) -> list[Copies] | None:
    """The old copies, if every host still exists and has room for them; else None."""
    if previous is None or len(previous.layers) != len(tasks):
        return None
    copies = [[list(hosts) for hosts in layer.copies] for layer in previous.layers]
    free = memory
    for task, layer in zip(tasks, copies, strict=True):
        number = len(task.speeds)
        if len(layer) != len(task.work) or any(host >= number for hosts in layer for host in hosts):
            return None
        free = [room - used for room, used in zip(free, used_bytes(task, layer), strict=True)]
    return copies if min(free) >= 0 else None


def _seeds(tasks: Sequence[LayerProblem], memory: list[float]) -> list[Copies]:
    """Initial layouts: largest first within each layer's part of the memory; if that has no room, by bytes alone."""
    need = [sum(task.home) for task in tasks]
    free, found = memory, []
    try:
        for index, task in enumerate(tasks):
            part = need[index] / max(1, sum(need[index:]))
            quota = [room if room == math.inf else room * part for room in free]
            layout = pack_largest_first(replace(task, memory=quota))
            free = [room - used for room, used in zip(free, used_bytes(task, layout.copies), strict=True)]
            found.append(layout.copies)
    except OutOfRoom:
        return pack_bytes([task.home for task in tasks], memory)
    return found


def _follow(task: LayerProblem, copies: Copies, budget: int) -> Packing:
    """Adapt the old layout, or return a new one if that is better by `KEEP`. Without a budget no home moves."""
    layout = Packing(task, _copy(copies))
    adapt_replicas(layout, divide(task.work, copies, task.speeds).loads)
    if not budget:
        return layout
    search = LocalSearch(layout, budget=budget).climb()
    if search.now.level <= search.enough * (1 + KEEP):
        return search.layout
    try:
        other = LocalSearch(pack_largest_first(task), budget=budget // 2).climb()
    except OutOfRoom:
        return search.layout
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
