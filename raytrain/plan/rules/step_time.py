"""Plan rule about time: an estimate of one step under each way to share the model out.

Pure: facts, machines and decisions in, a choice out. The estimate ranks strategies; it is no promise. It counts
matrix products, optimizer traffic, reductions and exchanges at rates that are stated here with their source, takes
experts as evenly loaded, and hides nothing behind anything.
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
"""Of one core: a product of 2048 x 512 x 2048 by torch 2.13 on one thread of an AMD EPYC with AVX-512, busy machine."""

CPU_HALF_FLOPS = 350e9
"""The same in bf16 with its instructions; without them as fp32."""

GPU_FLOPS = {
    "B200": (1100e12, 2250e12), "H200": (494e12, 989e12), "H100": (494e12, 989e12), "A100": (156e12, 312e12),
    "L40S": (183e12, 362e12), "A40": (75e12, 150e12), "A10": (62e12, 125e12), "L4": (60e12, 121e12),
    "V100": (15.7e12, 125e12), "T4": (8.1e12, 65e12), "4090": (82e12, 165e12), "3090": (36e12, 71e12),
}  # fmt: skip
"""Name -> dense peak in (tf32, or fp32 where there is none; half precision), as NVIDIA's data sheets state it."""

GPU_SHARE = 0.4
"""Of its peak that training reaches on a GPU, a usual utilisation of the model's FLOPs."""

LEFT_OUT = "without elementwise work and the start of each operation, in which small models spend most of a step"
"""What makes a step longer than the estimate, most on CPUs: the default recipe took 215 ms on two cores of such a CPU
with two hosts, where 65 ms are told."""

UPDATE_BYTES = 28
"""Of memory traffic per parameter of AdamW in fp32: weight, gradient and two moments read, three of them written."""


@dataclass(frozen=True)
class DeviceRates:
    """What one process can do.

    Attributes:
        unit_flops: products a second of a core, or of a GPU.
        threads: units of one process. units: of all machines, shared by those that compute at the same time.
        memory: bytes a second of its optimizer. latency_s, wire: of a message to a peer, and its bytes a second.
    """

    unit_flops: float
    threads: int
    units: int
    memory: float
    latency_s: float
    wire: float
    source: str

    def flops(self, processes: int) -> float:
        """Of all of `processes` that compute at the same time."""
        return self.unit_flops * min(processes * self.threads, self.units)


@dataclass(frozen=True)
class StepWork:
    """One optimizer step: FLOPs and parameters by where they are, rows through experts, exchanges."""

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
    """Seconds of a step as planned, and in the reason those of the other strategies.

    Args:
        choices: strategy, precision, workers, effective_batch, accumulation and shares (where there is such) are read.
    """
    unknown = facts is not None and facts.experts is None and hosts.value not in ("none", 0)
    if facts is None or facts.flops_per_sample is None or unknown:
        return Deferred(AFTER_MODEL if facts is None else "measured in the run")
    workers, rows, accumulation = (_known(choices[name]) for name in ("workers", "effective_batch", "accumulation"))
    precision = choices["precision"]
    dtype = str(precision.candidates[0])
    unequal = isinstance(choices.get("shares"), Deferred)
    if machines.on_gpu and _gpu_flops(machines, dtype, unequal=unequal) is None:
        return Deferred("measured in the run", (), f"no rate is stated for {_slowest_name(machines)}")
    work = _work(facts, rows=rows, accumulation=accumulation, half=dtype in ("bf16", "fp16"))
    found: dict[str, float] = {}
    for name, number in _strategies(hosts, machines, workers=workers, has_experts=facts.experts is not None).items():
        rates = _rates(machines, inventory, dtype, processes=workers + (number or 0), unequal=unequal)
        found[name] = _seconds(work, rates, workers=workers, hosts=number, shared=name != "data_parallel")
    planned = found[_title(hosts)]
    if isinstance(way := choices.get("strategy"), Resolved) and way.value == "fsdp":
        rates = _rates(machines, inventory, dtype, processes=workers, unequal=unequal)
        meetings = accumulation * (1 + len(facts.blocks or (0,)))
        planned = found["fsdp"] = _sharded_seconds(work, rates, workers=workers, passes=accumulation, meetings=meetings)
    each = ", ".join(f"{name} {_text(spent)}" for name, spent in found.items())
    source = _rates(machines, inventory, dtype, processes=workers, unequal=unequal).source
    told = f"an estimate, not measured: {each}; {source}; {LEFT_OUT}"
    return Resolved(f"about {_text(planned)} at assumed rates", told)


def _known(choice: Choice) -> int:
    assert isinstance(choice, Resolved)
    return int(choice.value)


def _strategies(hosts: Resolved, machines: DevicePool, *, workers: int, has_experts: bool) -> dict[str, int]:
    """Strategy -> processes beside the workers; those that the machines can give, the planned one among them."""
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
    """`hosts` are separate holders, 0 for the workers themselves; `shared`: each expert lives in one place."""
    holders = hosts or workers
    reduced = work.trunk_parameters + (0 if shared else work.expert_parameters)
    update = UPDATE_BYTES / rates.memory
    spent = work.trunk_flops / rates.flops(workers)
    if workers > 1:
        spent += 2 * (workers - 1) / workers * 4 * reduced / rates.wire + rates.latency_s
    if not shared:
        return spent + work.expert_flops / rates.flops(workers) + reduced * update
    spent += work.expert_flops / rates.flops(holders)
    away = 1.0 if hosts else (holders - 1) / holders  # a worker's own experts are no message away
    spent += work.exchanges * rates.latency_s + away * work.exchanged_bytes / (min(workers, holders) * rates.wire)
    own, theirs = work.trunk_parameters * update, work.expert_parameters / holders * update
    return spent + (max(own, theirs) if hosts else own + theirs) + rates.latency_s


def _sharded_seconds(work: StepWork, rates: DeviceRates, *, workers: int, passes: int, meetings: int) -> float:
    """Weights come together twice a pass, and their gradients go apart once; `meetings` of each kind."""
    parameters = work.trunk_parameters + work.expert_parameters
    spent = (work.trunk_flops + work.expert_flops) / rates.flops(workers)
    if workers > 1:
        moved = passes * (workers - 1) / workers * 4 * parameters
        spent += 3 * (moved / rates.wire + meetings * rates.latency_s)
    return spent + parameters / workers * UPDATE_BYTES / rates.memory


def _rates(machines: DevicePool, inventory: Inventory, dtype: str, *, processes: int, unequal: bool) -> DeviceRates:
    nodes = len({node.host for node, _ in machines.pool}) if machines.on_gpu else len(inventory.nodes)
    if machines.on_gpu:
        flops = _gpu_flops(machines, dtype, unequal=unequal) or 0.0
        name = _each_name(machines) if unequal else _slowest_name(machines)
        wire, told = (50e9, "50 GB/s between GPUs of a node") if nodes == 1 else (3e9, "3 GB/s between nodes")
        said = f"{name} at {GPU_SHARE:.0%} of its stated peak, {told}, assumed"
        return DeviceRates(flops, 1, len(machines.gpus), 1e12, 5e-5, wire, said)
    threads = max(1, inventory.cpus // processes)
    flags = [flag for flag, has in inventory.cpu_flags.items() if has]
    one = CPU_HALF_FLOPS if dtype == "bf16" and flags else CPU_FLOPS.get(dtype, CPU_FLOPS["fp32"])
    wire, told = (0.7e9, "0.7 GB/s and 0.3 ms on loopback") if nodes == 1 else (0.1e9, "0.1 GB/s between nodes")
    memory = 10e9 if processes > 1 else 20e9
    said = f"{one / 1e9:.0f} GFLOP/s a core in {dtype} ({', '.join(flags) or 'no bf16 instructions'}), {told}, assumed"
    return DeviceRates(one, threads, max(1, inventory.cpus), memory, 3e-4, wire, f"{said}: measured on another machine")


def _gpu_flops(machines: DevicePool, dtype: str, *, unequal: bool) -> float | None:
    """Of the slowest GPU, at the share of its peak that training reaches, or of the mean one where shares are unequal;
    None where one is not in the table."""
    peaks = [peak_flops(gpu.name, dtype) for gpu in machines.gpus]
    found = [GPU_SHARE * peak for peak in peaks if peak is not None]
    if not found or len(found) < len(peaks):
        return None
    return sum(found) / len(found) if unequal else min(found)


def peak_flops(name: str, dtype: str) -> float | None:
    """A GPU's stated peak, None for one that is not in the table."""
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
