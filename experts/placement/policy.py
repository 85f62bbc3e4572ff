"""Policies: a `Placement` from load, measured speed, memory and cost of experts; and the one a run starts with.

Called at the start on the driver, and by rank 0's rebalancer between steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from experts.config import DEFAULT_EXPERTS, ExpertsConfig, LayerShape, row_work
from experts.placement.lpt import OutOfRoom, plan
from experts.placement.values import Costs, ExpertCost, HostSpec, LayerPlacement, Placement
from raytrain.errors import InputError

Policy = Literal["auto", "lpt", "eplb", "round_robin", "fewest"]
OURS = ("auto", "lpt", "fewest")
"""Place by load, speed and memory; `fewest` differs in where newcomers go."""
Load = Sequence[Sequence[float]]
"""[layer][expert]: rows."""


def place(
    policy: Policy, load_LE: Load, hosts: Sequence[HostSpec], costs: Costs, replicas: int,
    previous: Placement | None = None, version: int = 0,
) -> Placement:  # fmt: skip
    """Place every layer's experts on `hosts`.

    Args:
        load_LE: predicted rows of each expert; all zero if nothing is known.
        hosts: in the order of their index.
        costs: of each expert of each layer.
        replicas: copies beyond the homes, in each layer; fewer if hosts or memory do not suffice. `eplb` fills every
            host to the same number of slots, and may create more.
        previous: the current placement; kept as far as it is about as good.

    Raises:
        InputError: the hosts cannot hold the experts; names an expert that is too large for any.
        ValueError: hosts are not numbered from 0, or loads and costs differ in shape.
    """
    if [host.host for host in hosts] != list(range(len(hosts))) or not all(host.speed > 0 for host in hosts):
        raise ValueError(f"hosts must be numbered from 0 and have a speed: {list(hosts)}")
    if [len(row) for row in load_LE] != [len(row) for row in costs]:
        raise ValueError(f"loads of {len(load_LE)} layers and costs of {len(costs)} do not match, expert by expert")
    _refuse_too_large(hosts, costs)
    if policy in OURS:
        try:
            layers = plan(load_LE, hosts, costs, replicas, previous=previous)
        except OutOfRoom:
            raise _overfull(hosts, costs) from None
        return Placement(version, len(hosts), tuple(layers))
    if policy == "eplb":
        layers = _eplb(load_LE, hosts, costs, replicas, previous)
    else:
        layers = [_homes([expert % len(hosts) for expert in range(len(row))]) for row in costs]
    found = Placement(version, len(hosts), tuple(layers))
    for spec in hosts:
        used = found.bytes_on(spec.host, costs)
        if spec.memory_bytes is not None and used > spec.memory_bytes:
            raise InputError(
                "experts.placement",
                got=f"{policy}, where {spec.title} holds {used} bytes of experts, at most {spec.memory_bytes}",
                expected="experts that fit their hosts", remedy="experts.placement: lpt considers memory",
            )  # fmt: skip
    return found


def _homes(hosts: Sequence[int]) -> LayerPlacement:
    """A layer without replicas, by the home of each expert."""
    return LayerPlacement(tuple((host,) for host in hosts), ((1.0,),) * len(hosts))


def new_expert_host(
    placement: Placement, layer: int, load: Sequence[float] | None, hosts: Sequence[HostSpec], *,
    work: float | None = None, able: Sequence[int] | None = None,
) -> int:  # fmt: skip
    """Choose the host for one more expert of `layer`: the one with the fewest, or with `load` the least loaded.

    Ties go to fewer experts, then more speed, then the lower number.

    Args:
        load: rows x work of each present expert.
        work: rows x work of the new one; None counts it as a mean expert.
        able: hosts that have room for it; None = all.
    """
    held = [len(placement.slots(layer, host.host)) for host in hosts]
    ends = [0.0] * len(hosts)
    if load is not None and any(load):
        alike = [ExpertCost(0, 0, 1.0)] * len(load)
        newcomer = sum(load) / len(load) if work is None else work
        loads = placement.host_loads(layer, load, alike, hosts)
        ends = [seconds + newcomer / host.speed for seconds, host in zip(loads, hosts, strict=True)]
    candidates = range(len(hosts)) if able is None else able
    return min(candidates, key=lambda host: (ends[host], held[host], -hosts[host].speed, host))


def newcomer_home(
    placement: Placement, layer: int, slot: int, *, living: Sequence[int], load: Sequence[float] | None,
    hosts: Sequence[HostSpec], costs: Costs,
) -> int:  # fmt: skip
    """Choose the home of an expert that is born into an empty slot, as `new_expert_host` among the hosts with room, by
    the rows of the `living` slots, or with no `load` by their number."""
    old = placement.layers[layer]
    partial = LayerPlacement(tuple(old.copies[one] for one in living), tuple(old.shares[one] for one in living))
    held = Placement(0, placement.num_hosts, (partial,))
    home = placement.home_of(layer, slot)
    able = [
        spec.host
        for spec in hosts
        if spec.host == home or placement.with_copies(layer, slot, (spec.host,)).fits(hosts, costs)
    ]
    rows = None if load is None else [load[one] for one in living]
    return new_expert_host(held, 0, rows, hosts, able=able)


def eplb_slots(load: Sequence[float], hosts: int, *, each: int) -> list[list[int]]:
    """The published EPLB policy for one layer, in its global mode: the experts in the `each` slots of every host.

    Every expert has a slot, and the largest load per copy gets another one until all slots are taken. Then copies go,
    largest first, to the lightest host with a free slot.
    """
    filled, count, per_copy = list(range(len(load))), [1] * len(load), list(load)
    for _ in range(each * hosts - len(load)):
        expert = max(range(len(load)), key=per_copy.__getitem__)
        filled.append(expert)
        count[expert] += 1
        per_copy[expert] = load[expert] / count[expert]
    if each == 1:
        return [[expert] for expert in filled]
    loads, found = [0.0] * hosts, [list[int]() for _ in range(hosts)]
    for expert in sorted(filled, key=lambda expert: -per_copy[expert]):
        lightest = min((host for host in range(hosts) if len(found[host]) < each), key=loads.__getitem__)
        found[lightest].append(expert)
        loads[lightest] += per_copy[expert]
    return found


def _eplb(
    load_LE: Load, hosts: Sequence[HostSpec], costs: Costs, replicas: int, previous: Placement | None
) -> list[LayerPlacement]:
    """EPLB's slots as copies: two slots on one host become one copy with both shares."""
    found = []
    for index, (load, row) in enumerate(zip(load_LE, costs, strict=True)):
        weight = [rows * cost.work for rows, cost in zip(load, row, strict=True)]
        parts: list[Counter[int]] = [Counter() for _ in row]
        for host, held in enumerate(eplb_slots(weight, len(hosts), each=-(-(len(row) + replicas) // len(hosts)))):
            for expert in held:
                parts[expert][host] += 1
        if previous is not None and previous.num_hosts == len(hosts) and len(previous.layers[index].copies) == len(row):
            homes = [old[0] for old in previous.layers[index].copies]
            parts = [
                Counter({home: mine[home], **mine}) if home in mine else mine
                for home, mine in zip(homes, parts, strict=True)
            ]
        copies = tuple(tuple(mine) for mine in parts)
        shares = tuple(tuple(number / mine.total() for number in mine.values()) for mine in parts)
        found.append(LayerPlacement(copies, shares))
    return found


# ---------------------------------------------------------------- refusals


def _refuse_too_large(hosts: Sequence[HostSpec], costs: Costs) -> None:
    if any(host.memory_bytes is None for host in hosts):
        return
    largest = max(hosts, key=lambda host: (host.memory_bytes or 0, -host.host))
    for layer, row in enumerate(costs):
        for expert, cost in enumerate(row):
            if cost.home_bytes > (largest.memory_bytes or 0):
                raise InputError(
                    "experts.hosts", got=f"layer {layer} expert {expert} of {cost.home_bytes} bytes",
                    expected=f"at most the {largest.memory_bytes} bytes of the largest, {largest.title}",
                    remedy="hosts with more memory, or smaller experts (experts.hidden)",
                )  # fmt: skip


def _overfull(hosts: Sequence[HostSpec], costs: Costs) -> InputError:
    need = sum(cost.home_bytes for row in costs for cost in row)
    there = [host.memory_bytes for host in hosts if host.memory_bytes is not None]
    return InputError(
        "experts.hosts", got=f"{len(hosts)} hosts of {sum(there)} bytes together",
        expected=f"room for the {need} bytes of all experts at home",
        remedy="more hosts, or fewer experts (experts.num_experts)",
    )  # fmt: skip


# ---------------------------------------------------------------- starting

HOME_BYTES = 16
"""Bytes of one parameter at home: weight, gradient and two moments in fp32."""
REPLICA_BYTES = 8
"""Bytes of one parameter of a replica: weight and gradient in fp32."""
WEIGHT_BYTES = 4
"""Bytes of one parameter of experts that only answer, at home and in a replica."""
MEMORY_SHARE = 0.9
"""Share of a device's memory that experts at home may take; the rest is for the runtime."""


@dataclass(frozen=True)
class PlacementRules:
    """The keys of the `experts` section about placement.

    Attributes:
        every: steps between decisions; None keeps the first placement.
        trains: False if the experts only answer, so that a host needs room for their weights alone.
        living: experts of each layer at the start, the first of its slots; None = all slots.
    """

    policy: Policy = "auto"
    replicas: int = 0
    every: int | None = None
    trains: bool = True
    living: int | None = None

    @classmethod
    def of(cls, config: ExpertsConfig) -> PlacementRules:
        living = (config.num_experts or DEFAULT_EXPERTS) if config.lifecycle.enabled else None
        return cls(config.placement, config.replicas, config.rebalance_every, living=living)


def first_placement(num_experts: Sequence[int], *, hosts: int) -> Placement:
    """Place consecutive experts on each host, in equal numbers up to one.

    Rows sorted by expert are then sorted by host too, and need no reordering. If the numbers do not divide, other hosts
    get one more in the next layer.
    """
    layers = (
        _homes([(expert * hosts + layer * number % hosts) // number for expert in range(number)])
        for layer, number in enumerate(num_experts)
    )
    return Placement(version=1, num_hosts=hosts, layers=tuple(layers))


def starting_placement(rules: PlacementRules, shapes: Sequence[LayerShape], hosts: Sequence[HostSpec]) -> Placement:
    """`place_first` for layers of these shapes."""
    return place_first(rules, costs_of(shapes, trains=rules.trains), hosts)


def place_first(rules: PlacementRules, costs: Costs, hosts: Sequence[HostSpec]) -> Placement:
    """Place experts whose load is unknown. Raises InputError: the hosts cannot hold them.

    Equal hosts and experts without replicas get `first_placement`; otherwise the policy decides, as if every expert got
    equally many rows.
    """
    if rules.living is not None and any(len(row) > rules.living for row in costs):
        return _with_empty_slots(rules, costs, hosts, living=rules.living)
    alike = len({spec.speed for spec in hosts}) == 1 and all(len(set(layer)) == 1 for layer in costs)
    if alike and not rules.replicas and rules.policy in OURS:
        first = first_placement([len(layer) for layer in costs], hosts=len(hosts))
        if first.fits(hosts, costs):
            return first
    even = [[1.0] * len(layer) for layer in costs]
    return place(rules.policy, even, hosts, costs, rules.replicas, version=1)


def _with_empty_slots(rules: PlacementRules, costs: Costs, hosts: Sequence[HostSpec], *, living: int) -> Placement:
    """Place the living experts as if there were no others, then the empty slots, each where the fewest slots are."""
    found = place_first(replace(rules, living=None), [row[:living] for row in costs], hosts)
    for layer, row in enumerate(costs):
        for _ in row[living:]:
            offers = [found.with_copies(layer, len(found.layers[layer].copies), (spec.host,)) for spec in hosts]
            able = [host for host, offer in enumerate(offers) if offer.fits(hosts, costs)]
            if not able:
                raise _overfull(hosts, costs)
            found = offers[new_expert_host(found, layer, None, hosts, able=able)]
    return replace(found, version=1)


def surviving_placement(
    rules: PlacementRules, shapes: Sequence[LayerShape], hosts: Sequence[HostSpec], *, before: Placement,
    survivors: Sequence[int],
) -> Placement:  # fmt: skip
    """Place the experts after hosts were lost; those of the survivors stay, so a placement by measured load is kept.

    An expert that lost its home gets a replica as its home, or else goes to the least loaded host, the largest first.
    Policies other than ours place all experts again, and so does ours where there is no room for that.

    Args:
        hosts: the survivors.
        before: the placement on all hosts. survivors: the index in it of each of `hosts`.

    Raises:
        InputError: the hosts cannot hold the experts.
    """
    costs = costs_of(shapes, trains=rules.trains)
    if rules.policy in OURS:
        now = {old: new for new, old in enumerate(survivors)}
        kept = [[[now[host] for host in held if host in now] for held in layer.copies] for layer in before.layers]
        found = _adopt_orphans(kept, before, costs, hosts, now=now)
        if found is not None:
            return found
    return place_first(rules, costs, hosts)


def _adopt_orphans(
    kept: list[list[list[int]]], before: Placement, costs: Costs, hosts: Sequence[HostSpec], *, now: Mapping[int, int]
) -> Placement | None:
    """`kept` ([layer][expert]: hosts that are left) with a host for each expert that has none; None without room."""
    free = [math.inf if spec.memory_bytes is None else spec.memory_bytes for spec in hosts]
    for layer, row in zip(kept, costs, strict=True):
        for held, cost in zip(layer, row, strict=True):
            for position, host in enumerate(held):
                free[host] -= cost.replica_bytes if position else cost.home_bytes
    if min(free) < 0:  # a replica that became a home needs more room
        return None
    layers = []
    for layer, row, old in zip(kept, costs, before.layers, strict=True):
        present = [expert for expert, held in enumerate(layer) if held]
        shares = [_left_shares(*pair, now=now) for pair in zip(old.copies, old.shares, strict=True)]
        partial = Placement(
            0, len(hosts),
            (LayerPlacement(tuple(tuple(layer[e]) for e in present), tuple(shares[e] for e in present)),),
        )  # fmt: skip
        load = [row[expert].work for expert in present]
        orphans = [expert for expert, held in enumerate(layer) if not held]
        for expert in sorted(orphans, key=lambda expert: (-row[expert].work, expert)):
            able = [host for host in range(len(hosts)) if free[host] >= row[expert].home_bytes]
            if not able:
                return None
            host = new_expert_host(partial, 0, load, hosts, work=row[expert].work, able=able)
            partial = partial.with_copies(0, len(load), (host,))
            load = [*load, row[expert].work]
            free[host] -= row[expert].home_bytes
            layer[expert], shares[expert] = [host], (1.0,)
        layers.append(LayerPlacement(tuple(map(tuple, layer)), tuple(shares)))
    return Placement(before.version + 1, len(hosts), tuple(layers))


def _left_shares(copies: Sequence[int], shares: Sequence[float], *, now: Mapping[int, int]) -> tuple[float, ...]:
    """Shares of the copies that are left, which sum to one again."""
    left = [share for host, share in zip(copies, shares, strict=True) if host in now]
    total = sum(left)
    return tuple(share / total if total > 0 else 1 / len(left) for share in left)


def costs_of(shapes: Sequence[LayerShape], *, trains: bool = True) -> Costs:
    """Bytes and work of each expert of these layers: under an optimizer with two moments, or of its weights alone."""
    sizes = [[shape.numel(expert) for expert in range(shape.num_experts)] for shape in shapes]
    if trains:
        return costs_of_sizes(sizes)
    return [[ExpertCost(WEIGHT_BYTES * n, WEIGHT_BYTES * n, row_work(n)) for n in row] for row in sizes]


def costs_of_sizes(parameters_LE: Sequence[Sequence[int]]) -> Costs:
    """`costs_of`, by the number of parameters of each expert."""
    return [[ExpertCost(HOME_BYTES * n, REPLICA_BYTES * n, row_work(n)) for n in row] for row in parameters_LE]
