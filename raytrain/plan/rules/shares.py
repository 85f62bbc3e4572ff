"""Plan rules about unequal workers: whether their shares of a batch are measured.

Pure: the `scale` section, the chosen devices, the inventory and decisions in, choices out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from cluster.devices.inventory import Device, Inventory
from raytrain.config.sections import LoopConfig, ScaleConfig
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.rules.devices import DevicePool
from raytrain.plan.rules.workers import spread
from raytrain.plan.shares import SPLITS

MEASURED = "measured at the start, on all workers at the same time"
EVENLY = "shares follow the measurement, and stay equal if unequal ones would save less than 5 %"


def splits(scale: ScaleConfig, *, workers: int, hosts: Resolved) -> int:
    """Number of micro-batches into which `loop.micro_batch_size: auto` cuts a worker's equal share."""
    if scale.strategy == "fsdp":
        return 1
    return SPLITS if scale.shares == "auto" and workers > 1 and hosts.value in ("none", 0) else 1


def choose_shares(
    scale: ScaleConfig, loop: LoopConfig, machines: DevicePool, inventory: Inventory, choices: Mapping[str, Choice], *,
    hosts: Resolved,
) -> Choice | None:  # fmt: skip
    """Micro-batches of each worker; None if `scale.shares` is equal.

    Args:
        choices: workers and accumulation are read.
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
    kinds = Counter(gpu.name for gpu in worker_gpus(workers, machines, inventory))
    there = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    return Deferred(MEASURED, (), f"{EVENLY}; {there or 'CPUs of unknown speed'}")


def worker_gpus(workers: int, machines: DevicePool, inventory: Inventory) -> list[Device]:
    """The GPUs that `workers` workers get, in rank order."""
    counts = spread(workers, machines, inventory)
    there = {host: [gpu for node, found in machines.pool if node.host == host for gpu in found] for host in counts}
    return [gpu for host, number in counts.items() for gpu in there[host][:number]]


def _value(choices: Mapping[str, Choice], name: str) -> Any:
    return choices[name].value_or(1)
