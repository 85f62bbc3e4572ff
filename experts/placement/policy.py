"""Policies: a `Placement` from load, measured speed, memory and cost of experts; and the one a run starts with.

Called at the start on the driver, and by rank 0's rebalancer between steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from experts.config import DEFAULT_EXPERTS, ExpertsConfig, LayerShape, row_work
from experts.placement.lpt import HostLimits, OutOfRoom, plan
from experts.placement.values import Costs, ExpertCost, HostSpec, LayerPlacement, Placement
from raytrain.errors import InputError

# ---------------------------------------------------------------- eplb
# The published EPLB policy, reimplemented from its description for comparison.


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


# ---------------------------------------------------------------- policy
# Policies: compute a `Placement` from load, measured host speed, memory and expert cost.


Policy = Literal["auto", "lpt", "eplb", "round_robin", "fewest"]
OURS = ("auto", "lpt", "fewest")
"""Place by load, speed and memory; `fewest` differs in where newcomers go."""
Load = Sequence[Sequence[float]]
"""[layer][expert]: rows."""


def place(
    policy: Policy, load_LE: Load, hosts: Sequence[HostSpec], costs: Costs, replicas: int,
    previous: Placement | None = None, version: int = 0, *, slots_per_host: int | None = None, num_groups: int = 1,
) -> Placement:  # fmt: skip
    """Place every layer's experts on `hosts`.

    Args:
        load_LE: predicted rows of each expert; all zero if nothing is known.
        hosts: in the order of their index.
        costs: of each expert of each layer.
        replicas: copies beyond the homes, in each layer; fewer if hosts, slots or memory do not suffice. `eplb` fills
            every host to the same number of slots, and may create more.
        previous: the current placement; kept as far as it is about as good.
        slots_per_host: maximum number of copies of one layer on a host.
        num_groups: groups of experts, which `eplb` packs onto nodes of equal size.

    Raises:
        InputError: the hosts cannot hold the experts; names an expert that is too large for any.
        ValueError: hosts are not numbered from 0, or loads and costs differ in shape.
    """
    if [host.host for host in hosts] != list(range(len(hosts))) or not all(host.speed > 0 for host in hosts):
        raise ValueError(f"hosts must be numbered from 0 and have a speed: {list(hosts)}")
    if [len(row) for row in load_LE] != [len(row) for row in costs]:
        raise ValueError(f"loads of {len(load_LE)} layers and costs of {len(costs)} do not match, expert by expert")
    _refuse_too_large(hosts, costs)
    _refuse_too_many(hosts, costs, slots_per_host)
    if policy in OURS:
        try:
            layers = plan(load_LE, hosts, costs, replicas, HostLimits.of(hosts, slots_per_host), previous=previous)
        except OutOfRoom:
            raise _overfull(hosts, costs) from None
        return Placement(version, len(hosts), tuple(layers))
    if policy == "eplb":
        layers = _eplb(load_LE, hosts, costs, replicas, previous, slots_per_host, num_groups)
    else:
        layers = [round_robin(len(row), len(hosts)) for row in costs]
    found = Placement(version, len(hosts), tuple(layers))
    try:
        found.validate([len(row) for row in costs], hosts=hosts, costs=costs, slots_per_host=slots_per_host)
    except ValueError as error:
        raise InputError(
            "experts.placement", got=f"{policy}, where {error}", expected="experts that fit their hosts",
            remedy="experts.placement: lpt considers memory",
        ) from error  # fmt: skip
    return found


def round_robin(num_experts: int, num_hosts: int) -> LayerPlacement:
    """Place expert e on host e modulo the hosts, without replicas."""
    return LayerPlacement(tuple((expert % num_hosts,) for expert in range(num_experts)), ((1.0,),) * num_experts)


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
    """Choose the home of an expert that is born into an empty slot, as `new_expert_host` among the hosts with room.

    Args:
        living: the slots of the layer's living experts.
        load: rows of each slot; None counts experts.
    """
    old = placement.layers[layer]
    partial = LayerPlacement(tuple(old.copies[one] for one in living), tuple(old.shares[one] for one in living))
    held = Placement(0, placement.num_hosts, (partial,))
    home = placement.home_of(layer, slot)
    able = [
        spec.host
        for spec in hosts
        if spec.host == home or placement.with_home(layer, slot, spec.host).fits(hosts, costs)
    ]
    rows = None if load is None else [load[one] for one in living]
    return new_expert_host(held, 0, rows, hosts, able=able)


def _eplb(
    load_LE: Load, hosts: Sequence[HostSpec], costs: Costs, replicas: int, previous: Placement | None,
    slots: int | None, num_groups: int,
) -> list[LayerPlacement]:  # fmt: skip
    """EPLB's slots as copies: two slots on one host become one copy with both shares."""
    sizes = Counter(host.node for host in hosts)
    in_order = sorted(hosts, key=lambda host: (list(sizes).index(host.node), host.host)) == list(hosts)
    nodes = len(sizes) if in_order and len(set(sizes.values())) == 1 else 1
    found = []
    for index, (load, row) in enumerate(zip(load_LE, costs, strict=True)):
        each = slots or -(-(len(row) + replicas) // len(hosts))
        groups = num_groups if len(row) % num_groups == 0 and each * len(hosts) % nodes == 0 else 1
        weight = [rows * cost.work for rows, cost in zip(load, row, strict=True)]
        physical = eplb_physical([weight], each * len(hosts), groups, nodes, len(hosts))[0]
        parts: list[Counter[int]] = [Counter() for _ in row]
        for slot, expert in enumerate(physical):
            parts[expert][slot // each] += 1
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
                    "experts.hosts",
                    got=f"layer {layer} expert {expert} of {cost.home_bytes} bytes",
                    expected=f"at most the {largest.memory_bytes} bytes of the largest, {largest.title}",
                    remedy="hosts with more memory, or smaller experts (experts.hidden)",
                )


def _refuse_too_many(hosts: Sequence[HostSpec], costs: Costs, slots: int | None) -> None:
    number = max(map(len, costs), default=0)
    if slots is not None and number > slots * len(hosts):
        raise InputError(
            "experts.num_experts",
            got=f"{number} experts in a layer",
            expected=f"at most {slots * len(hosts)}, {slots} on each of {len(hosts)} hosts",
        )


def _overfull(hosts: Sequence[HostSpec], costs: Costs) -> InputError:
    need = sum(cost.home_bytes for row in costs for cost in row)
    there = [host.memory_bytes for host in hosts if host.memory_bytes is not None]
    return InputError(
        "experts.hosts",
        got=f"{len(hosts)} hosts of {sum(there)} bytes together",
        expected=f"room for the {need} bytes of all experts at home",
        remedy="more hosts, or fewer experts (experts.num_experts)",
    )


# ---------------------------------------------------------------- starting
# The placement that a run starts with, before any load was measured.


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
        """Read them from the section."""
        living = (config.num_experts or DEFAULT_EXPERTS) if config.lifecycle.enabled else None
        return cls(config.placement, config.replicas, config.rebalance_every, living=living)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> PlacementRules:
        """The inverse of `to_json`."""
        return cls(**row)


def first_placement(num_experts: Sequence[int], *, hosts: int) -> Placement:
    """Place consecutive experts on each host, in equal numbers up to one.

    Rows sorted by expert are then sorted by host too, and need no reordering. If the numbers do not divide, other hosts
    get one more in the next layer.
    """
    layers = []
    for layer, number in enumerate(num_experts):
        copies = tuple(((expert * hosts + layer * number % hosts) // number,) for expert in range(number))
        layers.append(LayerPlacement(copies, tuple((1.0,) for _ in range(number))))
    return Placement(version=1, num_hosts=hosts, layers=tuple(layers))


def starting_placement(rules: PlacementRules, shapes: Sequence[LayerShape], hosts: Sequence[HostSpec]) -> Placement:
    """`place_first` for layers of these shapes."""
    return place_first(rules, costs_of(shapes, trains=rules.trains), hosts)


def place_first(rules: PlacementRules, costs: Costs, hosts: Sequence[HostSpec]) -> Placement:
    """Place experts whose load is unknown.

    Equal hosts and experts without replicas get `first_placement`; otherwise the policy decides, as if every expert got
    equally many rows.

    Raises:
        InputError: the hosts cannot hold the experts.
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
            offers = [found.with_expert(layer, spec.host) for spec in hosts]
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
            partial, load = partial.with_expert(0, host), [*load, row[expert].work]
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
