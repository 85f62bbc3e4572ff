"""Bench `placement`: how well placement policies balance the load interval that follows the ones they planned on.

All policies get the same forecast and the same slots. The score of an interval is the time of the slowest host over
that of perfectly balanced hosts, summed over the layers, because every layer waits for its slowest host. No weights
move: bytes are counted, and seconds are those of planning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count, NonNegativeInt, Positive, Text
from experts.placement.eplb import eplb_physical
from experts.placement.policy import Load, Policy, place
from experts.placement.rebalance import predict
from experts.placement.shares import reshare
from experts.placement.values import ExpertCost, HostSpec, LayerPlacement, Placement
from jobs.bench.harness.inputs import Loads, draw_trace, read_trace
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say
from jobs.bench.harness.options import BenchOptions
from raytrain.errors import InputError

#: The example of EPLB's README: 12 experts, 16 slots, 4 groups, 2 nodes, 8 GPUs; its published plan.
README_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
README_PLAN = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]
README_GOAL = Goal(at_most=1.02)
PLAN_GOAL_S = 2.0
#: A feed-forward expert of 512 x 2,048 in fp32 with gradients and two moments; a replica has bf16 weights only.
COST = ExpertCost(home_bytes=16 * 2_097_152, replica_bytes=2 * 2_097_152, work=1.0)
OURS, EPLB = "lpt", "eplb"
#: The same plan, but with shares computed from the actual load of the interval.
RESPLIT = " re-split"


class PlacementOptions(BenchOptions):
    """Placement policies, planned on the load intervals so far and scored on the next one."""

    MEASURES: ClassVar[str] = (
        "expert placement policies, scored on the next load interval; EPLB's example; planning time"
    )
    QUICK: ClassVar[dict[str, Any]] = {
        "layers": 2, "experts": 12, "hosts": 4, "replicas": 4, "blocks": 3, "rows": 5_000,
        "plan_layers": 2, "plan_experts": 32, "plan_hosts": 8, "plan_replicas": 8, "plans": 1,
    }  # fmt: skip

    trace: Text | None = Field(
        None, description="JSONL, a line per interval: {step, layers: [[rows]]}; null: generated"
    )
    history: Count = Field(4, description="intervals that the first forecast is made from")
    layers: Count = Field(4, description="of the generated trace")
    experts: Count = Field(64, description="of each layer of the generated trace")
    rows: Count = Field(200_000, description="of each interval and layer of the generated trace")
    sigma: float = Field(1.0, ge=0, description="spread of the logarithms of the generated loads")
    drift: float = Field(0.2, ge=0, description="step of their random walk from one interval to the next")
    hosts: Count = Field(8, description="hosts of the experts")
    replicas: NonNegativeInt = Field(8, description="extra copies in each layer; rounded up to full slots")
    speeds: list[Positive] = Field(
        [4.0, 2.0, 1.0], description="relative speeds of the unequal hosts, repeated in turn"
    )
    plan_layers: Count = Field(58, description="of the placement that is timed")
    plan_experts: Count = Field(256, description="of the placement that is timed")
    plan_hosts: Count = Field(64, description="of the placement that is timed")
    plan_replicas: NonNegativeInt = Field(64, description="of the placement that is timed")
    plans: Count = Field(5, description="repetitions of the timed placement")


@dataclass
class PolicyArm:
    """One policy on one set of hosts, over all intervals."""

    plan: Callable[[Loads, Placement | None], Placement]
    resplit: bool = False
    placement: Placement | None = None
    scores: list[float] = field(default_factory=list)
    layers: list[list[float]] = field(default_factory=list)
    hosts: list[list[float]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    unused: int = 0
    lost: float = 0.0


def run(options: PlacementOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Score every policy; see `PlacementOptions`.

    Raises:
        InputError: a trace that cannot be read.
    """
    trace = read_trace(options.trace) if options.trace else draw_trace(
        intervals=options.history + options.blocks, layers=options.layers, experts=options.experts, sigma=options.sigma,
        drift=options.drift, rows=options.rows, seed=options.seed,
    )  # fmt: skip
    blocks = min(options.blocks, len(trace) - 1)
    settings = {**options.model_dump(), "blocks": blocks}
    found = BenchMeasurement("placement", quick, settings, "slowest host over balanced hosts, one interval", unit="x")
    _readme(found)
    speeds = {"equal": [1.0], "unequal": options.speeds}
    for title, pattern in speeds.items():
        hosts = [HostSpec(h, float(pattern[h % len(pattern)]), None) for h in range(options.hosts)]
        say(f"{title} hosts: {blocks} intervals")
        _scenario(found, title, trace, hosts, options.replicas, first=len(trace) - blocks)
    _timing(found, options, say)
    return found


# ---------------------------------------------------------------- next intervals


def _arms(hosts: Sequence[HostSpec], experts: int, replicas: int) -> dict[str, PolicyArm]:
    """The policies by name. All have as many slots per host as `replicas` extra copies need."""
    slots = -(-(experts + replicas) // len(hosts))
    extra = slots * len(hosts) - experts

    def policy(name: Any, copies: int) -> Callable[[Loads, Placement | None], Placement]:
        def plan(load: Loads, before: Placement | None) -> Placement:
            costs = [[COST] * len(row) for row in load]
            return place(name, load, hosts, costs, copies, before, slots_per_host=slots)

        return plan

    def static(load: Loads, _before: Placement | None) -> Placement:
        each = -(-experts // len(hosts))
        layer = LayerPlacement(tuple((expert // each,) for expert in range(experts)), ((1.0,),) * experts)
        return Placement(0, len(hosts), (layer,) * len(load))

    return {
        "static": PolicyArm(static),
        "round_robin": PolicyArm(policy("round_robin", 0)),
        EPLB: PolicyArm(policy("eplb", extra)),
        "lpt, no replicas": PolicyArm(policy("lpt", 0)),
        OURS: PolicyArm(policy("lpt", extra)),
        EPLB + RESPLIT: PolicyArm(policy("eplb", extra), resplit=True),
        OURS + RESPLIT: PolicyArm(policy("lpt", extra), resplit=True),
    }


def _scenario(
    found: BenchMeasurement, title: str, trace: list[Loads], hosts: list[HostSpec], replicas: int, *, first: int
) -> None:
    experts = max(map(len, trace[0]))
    if any(len(row) != experts for row in trace[0]):
        raise InputError("trace", got="layers of different numbers of experts", expected="the same in every layer")
    arms = _arms(hosts, experts, replicas)
    for now in range(first, len(trace)):
        forecast = predict(trace[:now])
        for arm in arms.values():
            _score(arm, forecast, trace[now], hosts)
    slots = -(-(experts + replicas) // len(hosts)) * len(hosts)
    for name, arm in arms.items():
        found.arms[f"{title}, {name}"] = arm.scores
        copies = [sum(map(len, layer.copies)) for layer in (arm.placement.layers if arm.placement else ())]
        found.values.setdefault("policies", {})[f"{title}, {name}"] = {
            "next_interval": sum(arm.scores) / len(arm.scores),
            "worst_layer": max(map(max, arm.layers)),
            "per_host": [sum(column) / len(column) for column in zip(*arm.hosts, strict=True)],
            "bytes_moved": sum(arm.bytes[1:]),
            "bytes_max_over_mean": _byte_balance(arm.placement, hosts),
            "solve_s": sum(arm.seconds) / len(arm.seconds),
            "doubled_on_a_host": slots * len(copies) - sum(copies) if name.startswith(EPLB) else 0,
        }
    found.values.setdefault("bound", {})[title] = [_bound(interval, hosts) for interval in trace[first:]]
    worst = max(arm.lost for arm in arms.values())
    found.gate(Check(f"{title}: every row is computed once", worst < 1e-9, f"largest relative difference {worst:.2g}"))
    _compare(found, title, unequal=len({host.speed for host in hosts}) > 1)


def _compare(found: BenchMeasurement, title: str, *, unequal: bool) -> None:
    """Compare our policy with the others. On equal hosts with many slots it can beat EPLB's packing only in bytes."""
    ratios = {
        (other, ours): found.compare(
            found.arms, of=f"{title}, {other}", to=f"{title}, {ours}", name=f"{title}: {other} / {ours}, next interval",
            words=("more balanced", "less balanced"),
        )
        for other, ours in (("round_robin", OURS), (EPLB, OURS), (EPLB + RESPLIT, OURS + RESPLIT))
    }  # fmt: skip
    moved = {name: found.values["policies"][f"{title}, {name}"]["bytes_moved"] for name in (EPLB, OURS)}
    for (other, ours), ratio in ratios.items():
        if (other, ours) == (EPLB, OURS) and not unequal:
            effect = f"{title} hosts: {ours} is not less balanced than {other}, and moves at most half of its bytes"
            holds = ratio.high >= 1 and 2 * moved[OURS] <= moved[EPLB]
            found.claim(effect, holds, f"{ratio}; {moved[OURS]:,} bytes against {moved['eplb']:,}")
        else:
            effect = f"{title} hosts: {ours} is more balanced in the next interval than {other}"
            found.claim(effect, ratio.low > 1, f"{ratio}")


def _score(arm: PolicyArm, forecast: Loads, interval: Loads, hosts: list[HostSpec]) -> None:
    began = time.perf_counter()
    placement = arm.plan(forecast, arm.placement)
    arm.seconds.append(time.perf_counter() - began)
    costs, speeds = [[COST] * len(row) for row in interval], [host.speed for host in hosts]
    placement.validate([len(row) for row in interval], hosts=hosts, costs=costs)
    before = arm.placement or placement
    arm.bytes.append(sum(move.bytes for move in before.moves_to(placement, costs)))
    arm.placement = placement
    layers = placement.layers
    if arm.resplit:
        layers = tuple(reshare(layer, row, costs[0], speeds) for layer, row in zip(layers, interval, strict=True))
    even = [sum(row) / sum(speeds) or 1.0 for row in interval]
    loads = [layer.loads(row, costs[0], speeds) for layer, row in zip(layers, interval, strict=True)]
    for row, times in zip(interval, loads, strict=True):
        done = sum(seconds * speed for seconds, speed in zip(times, speeds, strict=True))
        arm.lost = max(arm.lost, abs(done - sum(row)) / (sum(row) or 1.0))
    arm.scores.append(sum(map(max, loads)) / sum(even))
    arm.layers.append([max(times) / mean for times, mean in zip(loads, even, strict=True)])
    arm.hosts.append([sum(column) / sum(even) for column in zip(*loads, strict=True)])


def _byte_balance(placement: Placement | None, hosts: list[HostSpec]) -> float | None:
    """Bytes of the fullest host over the mean, in the last interval."""
    if placement is None:
        return None
    costs = [[COST] * len(layer.copies) for layer in placement.layers]
    held = [placement.bytes_on(host.host, costs) for host in hosts]
    return max(held) * len(held) / sum(held)


def _bound(interval: Loads, hosts: list[HostSpec]) -> float:
    """The best score of any placement without replicas: the k largest experts run on k hosts at best."""
    speeds = sorted((host.speed for host in hosts), reverse=True)
    least, even = 0.0, 0.0
    for row in interval:
        loads = sorted(row, reverse=True)
        together = sum(row) / sum(speeds)
        tops = (sum(loads[:k]) / sum(speeds[:k]) for k in range(1, min(len(loads), len(speeds)) + 1))
        least, even = least + max(together, *tops), even + together
    return least / even if even else 1.0


# ---------------------------------------------------------------- EPLB's example, and seconds


def _readme(found: BenchMeasurement) -> None:
    """Score both policies on EPLB's example, with the load they were planned on."""
    theirs = eplb_physical(README_LOAD, 16, 4, 2, 8)
    found.gate(Check("EPLB gives its published plan", theirs == README_PLAN, "README example, 16 slots on 8 GPUs"))
    hosts, costs = [HostSpec(h, 1.0, None, node=f"n{h // 4}") for h in range(8)], [[COST] * 12] * 2
    row: dict[str, list[float]] = {}
    for name in ("eplb", "lpt"):
        placement = place(name, README_LOAD, hosts, costs, 4, slots_per_host=2, num_groups=4)
        loads = [placement.host_loads(layer, README_LOAD[layer], costs[layer], hosts) for layer in (0, 1)]
        row[name] = [max(times) / (sum(times) / 8) for times in loads]
    found.values["readme"] = row
    found.claim(
        f"EPLB's README example: busiest over mean GPU {README_GOAL} in both layers",
        README_GOAL.met(max(row["lpt"])),
        f"{row['lpt'][0]:.4f} and {row['lpt'][1]:.4f}; EPLB's plan {row['eplb'][0]:.4f} and {row['eplb'][1]:.4f}",
    )


def _timing(found: BenchMeasurement, options: PlacementOptions, say: Say) -> None:
    """Time the planning of a large model, from scratch and again after a drift."""
    number, hosts_n, layers = options.plan_experts, options.plan_hosts, options.plan_layers
    slots = -(-(number + options.plan_replicas) // hosts_n)
    say(f"{layers} layers x {number} experts x {hosts_n} hosts: {options.plans} plans")
    hosts, costs = [HostSpec(h, 1.0, None) for h in range(hosts_n)], [[COST] * number] * layers
    seconds: dict[str, list[float]] = {"new": [], "again": [], "eplb": []}
    for repetition in range(options.plans):
        before, after = draw_trace(
            intervals=2, layers=layers, experts=number, sigma=options.sigma, drift=options.drift,
            rows=100 * options.rows, seed=options.seed + repetition,
        )  # fmt: skip
        placement: Placement | None = None
        plans: tuple[tuple[str, Policy, Load], ...]
        plans = (("eplb", "eplb", before), ("new", "lpt", before), ("again", "lpt", after))
        for kind, name, load in plans:
            began = time.perf_counter()
            old = placement if kind == "again" else None
            placement = place(name, load, hosts, costs, options.plan_replicas, old, slots_per_host=slots)
            seconds[kind].append(time.perf_counter() - began)
    found.values["plan_s"] = seconds
    worst = max(seconds["new"] + seconds["again"])
    found.claim(
        f"{number} experts x {layers} layers x {hosts_n} hosts are planned in under {PLAN_GOAL_S:g} s",
        worst < PLAN_GOAL_S,
        f"slowest {worst:.2f} s of {2 * options.plans}, new and again; EPLB's policy {max(seconds['eplb']):.2f} s",
    )
