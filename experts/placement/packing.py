"""The layout of one layer: hosts of every expert, the room left on them, and its initial construction.

The hottest experts get replicas; then each copy, largest first, goes to the host that would finish earliest.
`experts.placement.refine` improves the result. All is deterministic: ties go to the lower number, and the search ends
after a number of operations, not of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

UNLIMITED = math.inf
#: Work of an unused expert, as a part of the mean: makes idle experts spread too.
IDLE = 0.01
#: A host within this relative distance of the best may be preferred if it joins parts of the replica graph.
NEAR = 0.02
#: A replica moves to another expert that has this many times the work per copy.
HOTTER = 1.2


@dataclass(frozen=True)
class LayerProblem:
    """The input of placing one layer.

    Attributes:
        work: predicted rows x work of each expert, at least `IDLE` of the mean.
        speeds: of each host.
        home, replica: bytes of each expert.
        extra: number of replicas.
        slots: copies that each host can take. memory: bytes that it can take.
    """

    work: list[float]
    speeds: list[float]
    home: list[int]
    replica: list[int]
    extra: int
    slots: list[float]
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
    """No host has room for `expert`."""

    def __init__(self, expert: int) -> None:
        super().__init__(f"no host has room for expert {expert}")
        self.expert = expert


Change = list[tuple[int, list[int]]]
"""Experts with their new hosts."""


@dataclass
class Packing:
    """A layout: hosts of every expert, home first, and the slots and bytes that are left."""

    task: LayerProblem
    copies: list[list[int]]
    slots: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots, self.memory = list(self.task.slots), list(self.task.memory)
        for expert in range(len(self.copies)):
            self._take(expert, 1)

    @property
    def spare(self) -> int:
        """Replicas that may still be added."""
        return self.task.extra - sum(map(len, self.copies)) + len(self.copies)

    def fits(self, expert: int, host: int) -> bool:
        """Whether `host` has room for one more copy: the home if the expert has none yet, else a replica."""
        size = self.task.replica[expert] if self.copies[expert] else self.task.home[expert]
        return self.slots[host] >= 1 and self.memory[host] >= size and host not in self.copies[expert]

    def add(self, expert: int, host: int) -> None:
        """Place one more copy."""
        self.slots[host] -= 1
        self.memory[host] -= self.task.replica[expert] if self.copies[expert] else self.task.home[expert]
        self.copies[expert].append(host)

    def apply(self, change: Change) -> Change | None:
        """Apply a change and return its inverse; None, with nothing changed, if there is no room."""
        back = [(expert, self.copies[expert]) for expert, _ in change]
        self._set(change)
        touched = {host for _, hosts in change for host in hosts}
        if all(self.slots[host] >= 0 and self.memory[host] >= 0 for host in touched):
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
            self.slots[host] -= sign
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
    """Build a layout: largest first, each copy to the host that would finish earliest.

    Raises:
        OutOfRoom: an expert fits nowhere. Replicas that fit nowhere are left out.
    """
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
    """Adapt the replicas of an old layout to the load: drop surplus ones, then move them to hotter experts.

    Args:
        loads: work of every host; updated in place, with equal parts for all copies.
    """
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


def pack_bytes(sizes: Sequence[Sequence[int]], memory: Sequence[float], slots: float) -> list[list[list[int]]]:
    """Place the homes of all layers by bytes alone: the largest first, on the host with the most memory left.

    Returns:
        [layer][expert]: the one host, in a list.

    Raises:
        OutOfRoom: one does not fit.
    """
    free, used = list(memory), [[0] * len(memory) for _ in sizes]
    found: list[list[list[int]]] = [[[] for _ in row] for row in sizes]
    order = sorted(((-size, layer, e) for layer, row in enumerate(sizes) for e, size in enumerate(row)))
    for negative, layer, expert in order:
        able = [h for h in range(len(free)) if used[layer][h] < slots and free[h] >= -negative]
        if not able:
            raise OutOfRoom(expert)
        host = max(able, key=lambda h: (free[h], -used[layer][h], -h))
        free[host] += negative
        used[layer][host] += 1
        found[layer][expert] = [host]
    return found
