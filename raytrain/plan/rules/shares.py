"""Plan rules about unequal workers: whether their shares of a batch are measured, and the expected result.

Pure: the `scale` section, the chosen devices, the inventory and decisions in, choices out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.devices.inventory import Device, Inventory
from raytrain.config.sections import LoopConfig, ScaleConfig
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.facts import ModelFacts
from raytrain.plan.rules.devices import DevicePool
from raytrain.plan.rules.rates import GPU_SHARE, peak_of
from raytrain.plan.rules.workers import spread
from raytrain.plan.shares import SPLITS, Shares, gain_over_equal

MEASURED = "measured at the start, on all workers at the same time"
EVENLY = "shares follow the measurement, and stay equal if unequal ones would save less than 5 %"


def splits(scale: ScaleConfig, *, workers: int, hosts: Resolved) -> int:
    """Number of micro-batches into which `loop.micro_batch_size: auto` cuts a worker's equal share."""
    if scale.strategy == "fsdp":
        return 1
    return SPLITS if scale.shares == "auto" and workers > 1 and hosts.value in ("none", 0) else 1


def choose_shares(
    scale: ScaleConfig, loop: LoopConfig, machines: DevicePool, inventory: Inventory, choices: Mapping[str, Choice], *,
    hosts: Resolved, facts: ModelFacts | None, fraction: float,
) -> Choice | None:  # fmt: skip
    """Micro-batches of each worker; None if `scale.shares` is equal.

    Args:
        choices: workers, precision, micro_batch_size, accumulation, effective_batch and memory are read.
        fraction: fraction of a device's memory that may be used.
    """
    if scale.shares == "equal":
        return None
    if scale.strategy == "fsdp":
        return Resolved("equal", "scale.strategy fsdp: every block of every pass is a collective of all workers")
    workers = _value(choices, "workers")
    if workers == 1:
        return Resolved("equal", "there is one worker")
    if hosts.value not in ("none", 0):
        return Resolved(
            "equal", "with experts outside the workers each pass waits for all workers: more passes on one worker would"
            " make the others wait; experts.hosts 0 keeps the experts in every worker",
        )  # fmt: skip
    if loop.micro_batch_size != "auto" and _value(choices, "accumulation") == 1:
        return Resolved("equal", "each worker has at most one micro-batch: lower loop.micro_batch_size")
    gpus = worker_gpus(workers, machines, inventory)
    kinds = sorted({gpu.name for gpu in gpus})
    if len(kinds) < 2:
        same = f"all {workers} on {kinds[0]}" if kinds else "the speed of the nodes' CPUs is unknown before the start"
        return Deferred(MEASURED, (), f"{EVENLY}; {same}")
    precision = choices["precision"]
    dtype = str(precision.candidates[0])
    peaks = {kind: peak_of(kind, dtype) for kind in kinds}
    unknown = [kind for kind, peak in peaks.items() if peak is None]
    if unknown:
        return Deferred(MEASURED, (), f"{EVENLY}; the peak rate is unknown for {', '.join(unknown)}")
    rates = {kind: GPU_SHARE * (peak or 0.0) for kind, peak in peaks.items()}
    return _expected(gpus, rates, choices, loop, facts=facts, fraction=fraction, dtype=dtype)


def worker_gpus(workers: int, machines: DevicePool, inventory: Inventory) -> list[Device]:
    """The GPUs that `workers` workers get, in rank order."""
    counts = spread(workers, machines, inventory)
    there = {host: [gpu for node, found in machines.pool if node.host == host for gpu in found] for host in counts}
    return [gpu for host, number in counts.items() for gpu in there[host][:number]]


def _expected(
    gpus: list[Device], rates: Mapping[str, float], choices: Mapping[str, Choice], loop: LoopConfig, *,
    facts: ModelFacts | None, fraction: float, dtype: str,
) -> Deferred:  # fmt: skip
    """The shares expected from data-sheet rates and memory sizes, by kind of device."""
    micro, total = _value(choices, "micro_batch_size"), _value(choices, "effective_batch")
    equal_share = -(-total // len(gpus))
    sizes = {}
    for kind in rates:
        room = min(gpu.memory_bytes for gpu in gpus if gpu.name == kind) * fraction
        most = equal_share if loop.micro_batch_size == "auto" else micro
        sizes[kind] = _largest(micro, most, facts, choices["memory"], room)
    rows = tuple(sizes[gpu.name] for gpu in gpus)
    made = Shares(micro, rows, tuple(size / rates[gpu.name] for size, gpu in zip(rows, gpus, strict=True)))
    gain = gain_over_equal(made, total=total, plain_s=[micro / rates[gpu.name] for gpu in gpus])
    spans = made.spans(total, micro_batch=micro)
    rows_text = []
    for kind in sorted(rates, key=lambda name: -rates[name]):
        counts = sorted({len(rows) for rows, gpu in zip(spans, gpus, strict=True) if gpu.name == kind})
        number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        many = sum(gpu.name == kind for gpu in gpus)
        rows_text.append(f"{many} {kind}: {number} rows each, up to {sizes[kind]} a pass")
    reached = ", ".join(f"{kind} {rate / 1e12:.0f}" for kind, rate in sorted(rates.items(), key=lambda pair: -pair[1]))
    reason = (
        f"expected {gain:.2f} times as fast as equal shares, at {GPU_SHARE:.0%} of data-sheet peaks in {dtype}"
        f" (TFLOP/s: {reached}); {_sized(facts, loop)}"
    )
    return Deferred(MEASURED, (", ".join(rows_text),), reason)


def _largest(micro: int, most: int, facts: ModelFacts | None, memory: Choice, room: float) -> int:
    """`micro` doubled as long as its activations fit; unchanged if their size is unknown."""
    each = None if facts is None else facts.activation_bytes_per_sample
    if not each or not isinstance(memory, Resolved):
        return micro
    floor, size = memory.value - each * micro, micro
    while 2 * size <= most and floor + 2 * size * each <= room:
        size *= 2
    return size


def _sized(facts: ModelFacts | None, loop: LoopConfig) -> str:
    if loop.micro_batch_size != "auto":
        return "the rows of a pass are loop.micro_batch_size"
    if facts is None or not facts.activation_bytes_per_sample:
        return "the rows of a pass are measured for each kind of device"
    return "the rows of a pass are what each kind of device has memory for"


def _value(choices: Mapping[str, Choice], name: str) -> Any:
    return choices[name].value_or(1)
