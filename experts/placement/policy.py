"""Policies: compute a `Placement` from load, measured host speed, memory and expert cost. Pure and deterministic.

`lpt` is ours (`auto` selects it); `eplb` and `round_robin` serve as comparisons. They ignore speed and memory, so a
placement of theirs that the hosts cannot hold is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from experts.placement.eplb import eplb_physical
from experts.placement.lpt import HostLimits, plan
from experts.placement.packing import OutOfRoom
from experts.placement.values import Costs, ExpertCost, HostSpec, LayerPlacement, Placement
from raytrain.errors import InputError

Policy = Literal["auto", "lpt", "eplb", "round_robin"]
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
    if policy in ("auto", "lpt"):
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
