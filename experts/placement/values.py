"""Placements as frozen values: which host holds which experts, and how rows are divided over copies.

Policies return them, members follow them, and experts.jsonl records them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from raytrain.config.decode import JsonRecord

# ---------------------------------------------------------------- values


@dataclass(frozen=True)
class HostSpec:
    """A process that can hold experts.

    Attributes:
        speed: work per second with these expert shapes, in any unit: policies use ratios only.
        memory_bytes: limit of all copies there together; None = no limit.
        node, device: names of its machine and of its device, for messages.
        kind: holders of one kind are equally fast (`experts.exchange.rebalancer.kind_of`); empty where it is unknown.
    """

    host: int
    speed: float
    memory_bytes: int | None
    node: str = ""
    device: str = ""
    kind: str = ""

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"host {self.host}{f' ({self.device})' if self.device else ''}"


@dataclass(frozen=True)
class ExpertCost:
    """Cost of one expert of one layer: bytes of its home, bytes of a replica, work (FLOPs) of one row.

    Attributes:
        moved_bytes: sent when its home moves, weights and optimizer state without gradients; None = `home_bytes`.
    """

    home_bytes: int
    replica_bytes: int
    work: float
    moved_bytes: int | None = None

    @property
    def travels(self) -> int:
        """Bytes sent when its home moves."""
        return self.home_bytes if self.moved_bytes is None else self.moved_bytes


def equal_hosts(number: int) -> list[HostSpec]:
    """Hosts of equal speed without a memory limit, where nothing is known about them."""
    return [HostSpec(host, 1.0, None) for host in range(number)]


Costs = Sequence[Sequence[ExpertCost]]
"""[layer][expert]; sizes may differ."""

MoveKind = Literal["home", "replica_added", "replica_dropped"]


@dataclass(frozen=True)
class Move:
    """One difference between two placements.

    Attributes:
        source, target: hosts. For a dropped replica both are its host. For a replica added where the home was both are
            that host: the weights are already there.
        bytes: sent from source to target. `RebalanceDecision` counts those of homes only, as every commit sends the
            weights of all replicas anyway.
    """

    layer: int
    expert: int
    kind: MoveKind
    source: int
    target: int
    bytes: int


@dataclass(frozen=True)
class LayerPlacement:
    """One layer: `copies[e]` are the hosts of expert e, home first; `shares[e]` are their shares of its rows."""

    copies: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[float, ...], ...]

    @cached_property
    def by_host(self) -> dict[int, tuple[int, ...]]:
        """Host -> experts that it holds, ascending; without hosts that hold none."""
        found: dict[int, list[int]] = {}
        for expert, hosts in enumerate(self.copies):
            for host in hosts:
                found.setdefault(host, []).append(expert)
        return {host: tuple(experts) for host, experts in found.items()}

    @property
    def replicas(self) -> int:
        """Copies beyond the homes."""
        return sum(map(len, self.copies)) - len(self.copies)

    def loads(self, load_E: Sequence[float], costs: Sequence[ExpertCost], speeds: Sequence[float]) -> list[float]:
        """Seconds of every host: rows x work of its copies over its speed."""
        work = [0.0] * len(speeds)
        for expert, (hosts, parts) in enumerate(zip(self.copies, self.shares, strict=True)):
            total = load_E[expert] * costs[expert].work
            for host, part in zip(hosts, parts, strict=True):
                work[host] += total * part
        return [done / speed for done, speed in zip(work, speeds, strict=True)]


@dataclass(frozen=True)
class Placement(JsonRecord):
    """All layers on `num_hosts` hosts; `version` increases with every switch."""

    version: int
    num_hosts: int
    layers: tuple[LayerPlacement, ...]

    def slots(self, layer: int, host: int) -> tuple[int, ...]:
        """Experts that `host` holds of `layer`, homes and replicas, ascending."""
        return self.layers[layer].by_host.get(host, ())

    def home_of(self, layer: int, expert: int) -> int:
        """The host that owns the expert's master weights."""
        return self.layers[layer].copies[expert][0]

    def host_loads(
        self, layer: int, load_E: Sequence[float], costs_layer: Sequence[ExpertCost], hosts: Sequence[HostSpec]
    ) -> tuple[float, ...]:
        """Time of each host in one layer: seconds if `speed` is work per second, else proportional to them."""
        return tuple(self.layers[layer].loads(load_E, costs_layer, [host.speed for host in hosts]))

    def bytes_on(self, host: int, costs: Costs) -> int:
        """Bytes of all copies on `host`, all layers."""
        total = 0
        for layer, costs_E in zip(self.layers, costs, strict=True):
            for expert in layer.by_host.get(host, ()):
                cost = costs_E[expert]
                total += cost.home_bytes if layer.copies[expert][0] == host else cost.replica_bytes
        return total

    def fits(self, hosts: Sequence[HostSpec], costs: Costs) -> bool:
        """Whether every host with a memory limit can hold its copies."""
        return all(one.memory_bytes is None or self.bytes_on(one.host, costs) <= one.memory_bytes for one in hosts)

    def with_copies(
        self, layer: int, expert: int, hosts: tuple[int, ...], shares: tuple[float, ...] = (1.0,)
    ) -> Placement:
        """The next version, with an expert on these hosts; the number behind the last one adds an expert."""
        old = self.layers[layer]
        changed = LayerPlacement(
            (*old.copies[:expert], hosts, *old.copies[expert + 1 :]),
            (*old.shares[:expert], shares, *old.shares[expert + 1 :]),
        )
        layers = (*self.layers[:layer], changed, *self.layers[layer + 1 :])
        return replace(self, version=self.version + 1, layers=layers)

    def home_moves(self, other: Placement) -> list[tuple[tuple[int, int], int, int]]:
        """((layer, expert), old home, new home) of each expert whose home differs in `other`."""
        return [
            ((layer, expert), before[0], after[0])
            for layer, (old, new) in enumerate(zip(self.layers, other.layers, strict=True))
            for expert, (before, after) in enumerate(zip(old.copies, new.copies, strict=True))
            if before[0] != after[0]
        ]

    def moves_to(self, other: Placement, costs: Costs) -> list[Move]:
        """The moves from here to `other`, in the order of layers and experts; a change of shares needs none."""
        return [
            move
            for index, (old, new) in enumerate(zip(self.layers, other.layers, strict=True))
            for expert, (before, after) in enumerate(zip(old.copies, new.copies, strict=True))
            if before != after
            for move in _moves(index, expert, before, after, costs[index][expert])
        ]


def _moves(layer: int, expert: int, before: Sequence[int], after: Sequence[int], cost: ExpertCost) -> list[Move]:
    """The moves of one expert. A replica that becomes the home is part of the home's move."""
    old, new = before[0], after[0]
    found = [Move(layer, expert, "home", old, new, cost.travels)] if old != new else []
    for host in after[1:]:
        if host == old:
            found.append(Move(layer, expert, "replica_added", host, host, 0))
        elif host not in before:
            found.append(Move(layer, expert, "replica_added", old, host, cost.replica_bytes))
    dropped = (host for host in before[1:] if host not in after)
    return found + [Move(layer, expert, "replica_dropped", host, host, 0) for host in dropped]


def split_rows(counts: Sequence[int], shares: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """Divide each expert's rows (E,) over its copies by rounding the running sum of the shares: not negative, and
    exactly its count in sum.

    Runs for every layer of every step. Equal on every process, as it uses IEEE sums in a fixed order.
    """
    if max(map(len, shares), default=1) == 1:
        return [(count,) for count in counts]
    found: list[tuple[int, ...]] = []
    for count, parts in zip(counts, shares, strict=True):
        rows, edge, running = [], 0, 0.0
        for part in parts[:-1]:
            running += part
            until = min(count, int(running * count + 0.5))
            rows.append(until - edge)
            edge = until
        found.append((*rows, count - edge))
    return found


# ---------------------------------------------------------------- shares
# Divides each expert's rows over its copies, so that the slowest host is as fast as these copies allow.

#: Maximum number of rounds of evening out, and the relative gain of a round below which they end.
SWEEPS, CONVERGED = 12, 1e-3
#: Relative difference below which loads count as equal.
EPSILON = 1e-9


@dataclass
class WorkSplit:
    """The work of one layer, divided over the hosts: `loads` of each host, `level` is the time of the slowest one, and
    `parts` the work of each copy of the experts that have several."""

    parts: dict[int, list[float]]
    loads: list[float]
    level: float


def divide(
    work: Sequence[float], copies: Sequence[Sequence[int]], speeds: Sequence[float], *, slack: float = 0.0,
    start: Mapping[int, Sequence[float]] | None = None,
) -> WorkSplit:  # fmt: skip
    """Compute the best split of the `work` of each expert over the hosts of its `copies`, none of which occurs twice.

    Args:
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
    """The shortest path for work to leave `source`: ({host reached: (expert, position that it leaves, position here)},
    the last host of the path). That is None if no host with room can be reached: their work can go nowhere else."""
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
