"""Plan rule about time: an estimate of one step under each strategy.

Pure: facts, devices and decisions in, a choice out. The estimate ranks strategies; it does not predict the time. It
counts matrix products, optimizer traffic, reductions and exchanges at the rates below (each with its source), and
assumes evenly loaded experts and no overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.devices.inventory import Inventory
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.facts import ExpertFacts, ModelFacts
from raytrain.plan.rules.devices import DevicePool
from raytrain.plan.rules.memory import AFTER_MODEL, SHOWN_HOSTS

CPU_FLOPS = {"fp64": 40e9, "fp32": 85e9}
"""One core: a matrix product of 2048 x 512 x 2048, torch 2.13, one thread of an AMD EPYC with AVX-512, busy machine."""

CPU_HALF_FLOPS = 350e9
"""The same in bf16 with bf16 instructions; without them the fp32 rate applies."""

GPU_FLOPS = {
    "B200": (1100e12, 2250e12), "H200": (494e12, 989e12), "H100": (494e12, 989e12), "A100": (156e12, 312e12),
    "L40S": (183e12, 362e12), "A40": (75e12, 150e12), "A10": (62e12, 125e12), "L4": (60e12, 121e12),
    "V100": (15.7e12, 125e12), "T4": (8.1e12, 65e12), "4090": (82e12, 165e12), "3090": (36e12, 71e12),
}  # fmt: skip
"""Name -> dense peak in (tf32, or fp32 where there is no tf32; half precision), from NVIDIA's data sheets."""

GPU_SHARE = 0.4
"""Fraction of its peak that training reaches on a GPU: a usual model FLOPs utilisation."""

LEFT_OUT = "elementwise operations and kernel launches, which dominate small models, are not included"
"""What makes a step longer than the estimate, mostly on CPUs: the default recipe took 215 ms on two cores of such a CPU
with two hosts; the estimate was 65 ms."""

UPDATE_BYTES = 28
"""Memory traffic per parameter of AdamW in fp32: weight, gradient and two moments read, three of them written."""


@dataclass(frozen=True)
class DeviceRates:
    """The rates of one process.

    Attributes:
        unit_flops: FLOPs per second of a core, or of a GPU.
        threads: units (cores or GPUs) of one process.
        units: units of all machines, shared by the processes that compute at the same time.
        memory: bytes per second of the optimizer.
        latency_s: seconds of a message to a peer.
        wire: bytes per second to a peer.
        source: where the rates come from.
    """

    unit_flops: float
    threads: int
    units: int
    memory: float
    latency_s: float
    wire: float
    source: str

    def flops(self, processes: int) -> float:
        """FLOPs per second of `processes` processes that compute at the same time."""
        return self.unit_flops * min(processes * self.threads, self.units)


@dataclass(frozen=True)
class StepWork:
    """The work of one optimizer step: FLOPs and parameters of trunk and experts, bytes and number of exchanges."""

    trunk_flops: float
    expert_flops: float
    trunk_parameters: int
    expert_parameters: int
    exchanged_bytes: float
    exchanges: int


def predict_step(
    facts: ModelFacts | None, machines: DevicePool, inventory: Inventory, choices: Mapping[str, Choice], *,
    hosts: Resolved,
) -> Choice:  # fmt: skip
    """Seconds of a step as planned; the reason has those of the other strategies.

    Args:
        choices: strategy, precision, workers, effective_batch, accumulation and, if present, shares are read.
    """
    unknown = facts is not None and facts.experts is None and hosts.value not in ("none", 0)
    if facts is None or facts.flops_per_sample is None or unknown:
        return Deferred(AFTER_MODEL if facts is None else "measured in the run")
    workers, rows, accumulation = (_known(choices[name]) for name in ("workers", "effective_batch", "accumulation"))
    precision = choices["precision"]
    dtype = str(precision.candidates[0])
    unequal = isinstance(choices.get("shares"), Deferred)
    if machines.on_gpu and _gpu_flops(machines, dtype, unequal=unequal) is None:
        return Deferred("measured in the run", (), f"the peak rate is unknown for {_slowest_name(machines)}")
    work = _work(facts, rows=rows, accumulation=accumulation, half=dtype in ("bf16", "fp16"))
    found: dict[str, float] = {}
    for name, number in _strategies(hosts, machines, workers=workers, has_experts=facts.experts is not None).items():
        rates = _rates(machines, inventory, dtype, processes=workers + (number or 0), unequal=unequal)
        found[name] = _seconds(work, rates, workers=workers, hosts=number, shared=name != "data_parallel")
    planned = found[_title(hosts)]
    if isinstance(way := choices.get("strategy"), Resolved) and way.value == "fsdp":
        rates = _rates(machines, inventory, dtype, processes=workers, unequal=unequal)
        calls = accumulation * (1 + len(facts.blocks or (0,)))
        planned = found["fsdp"] = _sharded_seconds(work, rates, workers=workers, passes=accumulation, collectives=calls)
    each = ", ".join(f"{name} {_text(spent)}" for name, spent in found.items())
    source = _rates(machines, inventory, dtype, processes=workers, unequal=unequal).source
    reason = f"estimated, not measured: {each}; {source}; {LEFT_OUT}"
    return Resolved(f"about {_text(planned)} at assumed rates", reason)


def _known(choice: Choice) -> int:
    assert isinstance(choice, Resolved)
    return int(choice.value)


def _strategies(hosts: Resolved, machines: DevicePool, *, workers: int, has_experts: bool) -> dict[str, int]:
    """Strategy -> processes besides the workers: the strategies that the machines can run, with the planned one."""
    found = {"data_parallel": 0}
    if not has_experts:
        return found
    if workers > 1:
        found["colocated"] = 0
    free = len(machines.gpus) - workers if machines.on_gpu else SHOWN_HOSTS
    planned = hosts.value if isinstance(hosts.value, int) else 0
    for number in {2, planned} - {0}:
        if number <= free or number == planned:
            found[f"{number} hosts"] = number
    if _title(hosts) not in found:
        found[_title(hosts)] = sum(hosts.value.values()) if isinstance(hosts.value, dict) else 0
    return found


def _title(hosts: Resolved) -> str:
    if hosts.value in ("none", 0):
        return "data_parallel"
    if isinstance(hosts.value, int):
        return f"{hosts.value} hosts"
    return "colocated" if hosts.value == "colocated" else f"{sum(hosts.value.values())} hosts"


def _work(facts: ModelFacts, *, rows: int, accumulation: int, half: bool) -> StepWork:
    experts = facts.experts or ExpertFacts((), 0, 0, 0, 0)
    total = (facts.flops_per_sample or 0.0) * rows
    routed = experts.flops_per_sample * rows
    there, ways = len(experts.parameters) * experts.rows_per_sample * rows * experts.row_bytes, 4
    return StepWork(
        trunk_flops=max(0.0, total - routed),
        expert_flops=routed,
        trunk_parameters=facts.parameters - experts.total,
        expert_parameters=experts.total,
        exchanged_bytes=ways * there / (2 if half else 1),
        exchanges=ways * len(experts.parameters) * accumulation,
    )


def _seconds(work: StepWork, rates: DeviceRates, *, workers: int, hosts: int, shared: bool) -> float:
    """Seconds of a step; `hosts` is the number of expert hosts (0: the workers hold the experts), `shared` says that
    each expert is in one process only."""
    holders = hosts or workers
    reduced = work.trunk_parameters + (0 if shared else work.expert_parameters)
    update = UPDATE_BYTES / rates.memory
    spent = work.trunk_flops / rates.flops(workers)
    if workers > 1:
        spent += 2 * (workers - 1) / workers * 4 * reduced / rates.wire + rates.latency_s
    if not shared:
        return spent + work.expert_flops / rates.flops(workers) + reduced * update
    spent += work.expert_flops / rates.flops(holders)
    away = 1.0 if hosts else (holders - 1) / holders  # a worker's own experts need no message
    spent += work.exchanges * rates.latency_s + away * work.exchanged_bytes / (min(workers, holders) * rates.wire)
    own, theirs = work.trunk_parameters * update, work.expert_parameters / holders * update
    return spent + (max(own, theirs) if hosts else own + theirs) + rates.latency_s


def _sharded_seconds(work: StepWork, rates: DeviceRates, *, workers: int, passes: int, collectives: int) -> float:
    """Seconds of a step under FSDP: weights are gathered twice per pass and gradients reduce-scattered once, each in
    `collectives` calls."""
    parameters = work.trunk_parameters + work.expert_parameters
    spent = (work.trunk_flops + work.expert_flops) / rates.flops(workers)
    if workers > 1:
        moved = passes * (workers - 1) / workers * 4 * parameters
        spent += 3 * (moved / rates.wire + collectives * rates.latency_s)
    return spent + parameters / workers * UPDATE_BYTES / rates.memory


def _rates(machines: DevicePool, inventory: Inventory, dtype: str, *, processes: int, unequal: bool) -> DeviceRates:
    nodes = len({node.host for node, _ in machines.pool}) if machines.on_gpu else len(inventory.nodes)
    if machines.on_gpu:
        flops = _gpu_flops(machines, dtype, unequal=unequal) or 0.0
        name = _each_name(machines) if unequal else _slowest_name(machines)
        wire, link = (50e9, "50 GB/s between GPUs of a node") if nodes == 1 else (3e9, "3 GB/s between nodes")
        source = f"{name} at {GPU_SHARE:.0%} of its data-sheet peak, {link}, assumed"
        return DeviceRates(flops, 1, len(machines.gpus), 1e12, 5e-5, wire, source)
    threads = max(1, inventory.cpus // processes)
    flags = [flag for flag, has in inventory.cpu_flags.items() if has]
    one = CPU_HALF_FLOPS if dtype == "bf16" and flags else CPU_FLOPS.get(dtype, CPU_FLOPS["fp32"])
    wire, link = (0.7e9, "0.7 GB/s and 0.3 ms on loopback") if nodes == 1 else (0.1e9, "0.1 GB/s between nodes")
    memory = 10e9 if processes > 1 else 20e9
    core = f"{one / 1e9:.0f} GFLOP/s per core in {dtype} ({', '.join(flags) or 'no bf16 instructions'})"
    source = f"{core}, {link}, assumed: measured on another machine"
    return DeviceRates(one, threads, max(1, inventory.cpus), memory, 3e-4, wire, source)


def _gpu_flops(machines: DevicePool, dtype: str, *, unequal: bool) -> float | None:
    """FLOPs per second that training reaches on the slowest GPU, or the mean of all GPUs if shares are unequal; None if
    a GPU is not in the table."""
    peaks = [peak_flops(gpu.name, dtype) for gpu in machines.gpus]
    found = [GPU_SHARE * peak for peak in peaks if peak is not None]
    if not found or len(found) < len(peaks):
        return None
    return sum(found) / len(found) if unequal else min(found)


def peak_flops(name: str, dtype: str) -> float | None:
    """A GPU's data-sheet peak; None if it is not in the table."""
    peaks = next((peaks for known, peaks in GPU_FLOPS.items() if known in _words(name)), None)
    return None if peaks is None else peaks[dtype in ("bf16", "fp16")]


def _slowest_name(machines: DevicePool) -> str:
    names = sorted({gpu.name for gpu in machines.gpus})
    return names[0] if len(names) == 1 else f"the slowest of {', '.join(names)}"


def _each_name(machines: DevicePool) -> str:
    names = sorted({gpu.name for gpu in machines.gpus})
    return names[0] if len(names) == 1 else f"each of {', '.join(names)}"


def _words(name: str) -> list[str]:
    return name.replace("-", " ").split()


def _text(spent: float) -> str:
    return f"{spent:.2g} s" if spent >= 0.1 else f"{1e3 * spent:.2g} ms"
