"""Plan rules about expert hosts: where experts are placed, and what follows for strategy, in-flight and overlap.

Pure: `experts.hosts`, the `scale` section, the chosen devices and the inventory in, choices out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cluster.devices.inventory import Device, Inventory
from cluster.wording import counted
from raytrain.config.sections import LoopConfig, ScaleConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Resolved, host_kinds_text
from raytrain.plan.facts import ModelFacts
from raytrain.plan.machines import (
    CPU_OVERLOAD,
    GPUS,
    DevicePool,
    cores_of,
    is_named,
    of_type,
    peak_of,
    ray_type,
    where_text,
)

CPU_HOSTS = 2
"""On CPUs, `auto` starts as many hosts where the workers have no room for the experts: all share the cores."""


def choose_hosts(
    requested: Any, scale: ScaleConfig, machines: DevicePool, inventory: Inventory, *, workers: int
) -> Resolved:
    """ "none" for a dense model, 0 for experts inside every worker, "colocated", or the number of separate hosts.

    `requested` is `experts.hosts`, or None for a dense model; for `auto` the result of `choose_auto_hosts`, except
    where the strategy decides. Raises InputError for a contradiction, or more hosts than these machines can run.
    """
    if requested is None:
        if scale.strategy == "expert_parallel":
            raise InputError(
                "scale.strategy", got="expert_parallel with a model without experts", expected="data_parallel or auto",
                remedy="models with experts: experts.models:moe_gpt, experts.models:moe_mlp, and your own builder with"
                " experts.num_experts set",
            )  # fmt: skip
        return Resolved("none", "the model has no experts")
    if scale.strategy == "fsdp":
        if requested in (0, "auto"):
            return Resolved(0, "scale.strategy fsdp: every worker holds its rows of all experts")
        raise InputError(
            "experts.hosts", got=str(requested), expected="0 or auto with scale.strategy fsdp",
            remedy="expert hosts with sharded workers are not supported yet; scale.strategy expert_parallel has hosts",
        )  # fmt: skip
    if requested == 0:
        return Resolved(0, "every worker holds all experts")
    if scale.strategy == "data_parallel":
        if requested == "auto":
            return Resolved(0, "scale.strategy data_parallel: every worker holds all experts")
        raise InputError(
            "experts.hosts", got=str(requested), expected="0 or auto with scale.strategy data_parallel",
            remedy="scale.strategy expert_parallel distributes the experts",
        )  # fmt: skip
    if isinstance(requested, dict):
        requested = _checked_kinds(requested, machines, inventory)
    elif not machines.on_gpu and isinstance(requested, int) and requested > CPU_OVERLOAD * max(1, inventory.cpus):
        expected = f"at most {CPU_OVERLOAD * inventory.cpus}, {CPU_OVERLOAD} per CPU core"
        remedy = f"lower experts.hosts; available: {inventory.describe()}"
        raise InputError("experts.hosts", got=str(requested), expected=expected, remedy=remedy)
    if machines.on_gpu and number_of_hosts(requested):
        _check_left(requested, scale, machines, inventory, workers=workers)
    several = machines.on_gpu and len(inventory.nodes) > 1 and number_of_hosts(requested)
    where = where_text({node: len(gpus) for node, gpus in gpus_of_hosts(requested, machines, inventory).items()})
    return Resolved(requested, f"experts.hosts: {where}" if several else "experts.hosts")


def choose_auto_hosts(
    facts: ModelFacts | None, scale: ScaleConfig, machines: DevicePool, *, workers: int,
    fits: Callable[[Any, int], bool],
) -> Resolved:  # fmt: skip
    """What `experts.hosts: auto` means, by memory and by kinds of devices: every worker holds all experts where they
    fit. Else the slowest kind of GPU holds them where kinds differ, or the workers share them, or hosts hold them.

    `workers` is their number if no GPU goes to hosts; `fits` says whether (`experts.hosts`, workers) fits the memory of
    these machines, by the estimate.
    """
    in_workers = scale.strategy != "expert_parallel"
    if in_workers and (facts is None or facts.experts is None):
        return Resolved(0, "every worker holds all experts; their sizes are not known before the start")
    if machines.on_gpu and len(machines.gpus) == 1:
        return Resolved(0, "one GPU holds the full model")
    layouts: list[tuple[Any, int]] = [(0, workers)] if in_workers else []
    if scale.workers == "auto" and (slow := slowest_kind(machines)) is not None:
        layouts.append(({slow[0]: slow[1]}, len(machines.gpus) - slow[1]))
    if workers > 1:
        layouts.append(("colocated", workers))
    free = len(machines.gpus) - workers if machines.mode.value == "multi_gpu" else 0
    hosts = free if machines.on_gpu else CPU_HOSTS
    if hosts > 0:
        layouts.append((hosts, workers))
    layouts = layouts or [(0, workers)]
    small = []
    for hosts, number in layouts:
        if fits(hosts, number):
            why = "every worker has room for all experts" if hosts == 0 else f"the experts fit {layout_name(hosts)}"
            return Resolved(hosts, f"{why}; too little memory {' or '.join(small)}" if small else why)
        small.append(layout_name(hosts))
    return Resolved(layouts[0][0], f"by the estimate, there is too little memory {' or '.join(small)}")


def layout_name(hosts: Any) -> str:
    """Where a value of `experts.hosts` puts the experts, in words."""
    if isinstance(hosts, dict):
        return f"on {host_kinds_text(hosts)}"
    return {0: "in every worker", "colocated": "in shares of the workers"}.get(hosts, f"on {hosts} hosts")


def slowest_kind(machines: DevicePool) -> tuple[str, int] | None:
    """(accelerator type of the slowest kind of GPU, how many); None with one kind, where a kind is unknown, and where a
    node has several."""
    if machines.per_gpu > 1 or any(len({gpu.name for gpu in gpus}) > 1 for _, gpus in machines.pool):
        return None
    peaks = {gpu.name: peak_of(gpu.name, "bf16") for gpu in machines.gpus}
    if len(peaks) < 2 or not all(peaks.values()):
        return None
    slowest = min(sorted(peaks), key=lambda name: peaks[name] or 0.0)
    gpus = [gpu for gpu in machines.gpus if gpu.name == slowest]
    kind = next(kind.split()[0] for kind in GPUS if is_named(gpus[0], kind))
    if any(is_named(gpu, kind) for gpu in machines.gpus if gpu.name != slowest):
        return None
    return kind, len(gpus)


def divided_pools(machines: DevicePool, hosts: Any, inventory: Inventory) -> tuple[DevicePool, DevicePool]:
    """(devices of the workers, devices of the hosts); all of them for both, except where hosts take named kinds of
    GPUs."""
    if not isinstance(hosts, dict) or not machines.on_gpu:
        return machines, machines
    taken = gpus_of_hosts(hosts, machines, inventory)
    held = tuple((node, tuple(taken[node.host])) for node in inventory.nodes if node.host in taken)
    return machines.without(taken), replace(machines, pool=held)


def leave_gpus_to_hosts(
    workers: Resolved, requested: Any, scale: ScaleConfig, machines: DevicePool, inventory: Inventory
) -> Resolved:
    """`scale.workers: auto` or a range on GPUs leaves one GPU to each configured expert host."""
    if isinstance(scale.workers, int) or scale.strategy in ("data_parallel", "fsdp"):
        return workers
    left = len(machines.without(gpus_of_hosts(requested, machines, inventory)).gpus)
    if not least_workers(scale) <= left < workers.value:
        return workers
    return Resolved(left, f"one per remaining {machines.unit}; {number_of_hosts(requested)} go to the expert hosts")


def least_workers(scale: ScaleConfig) -> int:
    return 1 if scale.workers == "auto" else scale.workers if isinstance(scale.workers, int) else scale.workers[0]


def gpus_of_hosts(requested: Any, machines: DevicePool, inventory: Inventory) -> dict[str, list[Device]]:
    """{node: the GPUs that expert hosts take there}: one node after another, as Ray's SPREAD places them. Hosts with a
    named type may use GPUs that workers may not."""
    assigned: dict[str, list[Device]] = {}
    if not machines.on_gpu or not number_of_hosts(requested):
        return assigned
    for kind, number in requested.items() if isinstance(requested, dict) else [(None, requested)]:
        nodes = machines.pool if kind is None else [(node, node.devices) for node in inventory.nodes]
        for _ in range(number):
            free = [
                (node.host, gpu)
                for node, devices in nodes
                for gpu in devices
                if (kind is None or of_type(node, gpu, kind)) and gpu not in assigned.get(node.host, ())
            ]
            if not free:
                break
            name, gpu = min(free, key=lambda pair: len(assigned.get(pair[0], ())))
            assigned.setdefault(name, []).append(gpu)
    return assigned


def hosts_by_node(
    hosts: Resolved, counts: Mapping[str, int], machines: DevicePool, inventory: Inventory
) -> dict[str, int]:
    """Number of expert hosts on each node; on CPUs in turn, the node with fewest cores per worker first."""
    if machines.on_gpu:
        return {node: len(gpus) for node, gpus in gpus_of_hosts(hosts.value, machines, inventory).items()}
    cores = cores_of(inventory)
    names = sorted((name for name in cores if cores[name]), key=lambda name: cores[name] / (counts.get(name, 0) + 1))
    names = names or list(counts)
    return dict(Counter(names[number % len(names)] for number in range(number_of_hosts(hosts.value))))


def choose_strategy(scale: ScaleConfig, hosts: Resolved, *, workers: int) -> Resolved:
    """How the model is distributed over the workers."""
    if scale.strategy == "fsdp":
        alone = "scale.strategy: one worker holds all rows, so nothing is saved"
        return Resolved("fsdp", alone if workers == 1 else "scale.strategy: each worker holds its rows of every block")
    if scale.strategy != "auto":
        return Resolved(scale.strategy, "scale.strategy")
    if hosts.value in ("none", 0):
        return Resolved("data_parallel", "every worker holds the full model")
    return Resolved("expert_parallel", "each expert is in one process; every worker holds the rest of the model")


def separate_hosts(hosts: Choice) -> int:
    return number_of_hosts(hosts.value_or(0))


def number_of_hosts(requested: Any) -> int:
    """The number of hosts in a value of `experts.hosts`; 0 where experts have no processes of their own."""
    return sum(requested.values()) if isinstance(requested, dict) else requested if isinstance(requested, int) else 0


def kinds_of_hosts(requested: Any) -> list[str | None]:
    """The accelerator type of each host, in the order of the mapping; None where any type will do."""
    if isinstance(requested, dict):
        return [kind for kind, number in requested.items() for _ in range(number)]
    return [None] * requested


def choose_inflight(
    requested: Any, loop: LoopConfig, *, hosts: Resolved, batches: Mapping[str, Resolved], warnings: list[str]
) -> Resolved | None:
    """Micro-batches that each worker has in flight to remote experts; None without remote experts. `requested` is
    `experts.inflight`. Raises InputError for two in flight together with activation checkpointing."""
    if hosts.value in ("none", 0):
        if requested == 2 and hosts.value == 0:
            warnings.append("experts.inflight 2 changes nothing: every worker holds all experts, so no rows are sent")
        return None
    if requested == 2 and loop.activation_checkpointing:
        raise InputError(
            "experts.inflight", got="2 with loop.activation_checkpointing true", expected="1 or auto with it",
            remedy="a block that is recomputed in backward would draw random numbers out of order;"
            " loop.activation_checkpointing false keeps the activations of two micro-batches",
        )  # fmt: skip
    if requested != "auto":
        if requested == 2 and batches["accumulation"].value == 1:
            idle = "a step is one micro-batch, so there is no other to compute while its rows are sent"
            warnings.append(f"experts.inflight 2 changes nothing: {idle}; lower loop.micro_batch_size")
            return Resolved(requested, f"experts.inflight, which changes nothing: {idle}")
        kept = "; the activations of two micro-batches are kept" if requested == 2 else ""
        return Resolved(requested, f"experts.inflight{kept}")
    return Resolved(1, "2 keeps the activations of two micro-batches, and was not measurably faster on one machine")


def choose_overlap(
    scale: ScaleConfig, hosts: Resolved, *, workers: int, nccl: bool, warnings: list[str]
) -> Resolved | None:  # fmt: skip
    """Whether gradients are reduced while the last backward of a step still runs; None where nothing can overlap.
    Raises InputError for `scale.overlap: true` together with remote experts."""
    remote = hosts.value not in ("none", 0)
    if scale.overlap is True and remote:
        raise InputError(
            "scale.overlap", got=f"true with experts.hosts {hosts.value}", expected="auto or false with it",
            remedy="with remote experts, gradients are reduced after the vote on the step; experts.hosts 0 keeps the"
            " experts in every worker",
        )  # fmt: skip
    why = "fsdp reduces each block inside each backward"
    why = "with scale.sync_batchnorm every worker takes part in every pass" if scale.sync_batchnorm else why
    why = "there is one worker" if workers == 1 else why
    if workers == 1 or scale.strategy == "fsdp" or scale.sync_batchnorm:
        if scale.overlap is True:
            warnings.append(f"scale.overlap true changes nothing: {why}")
        return None
    if remote:
        return None
    if scale.overlap != "auto":
        return Resolved(scale.overlap, "scale.overlap")
    if nccl:
        return Resolved(True, "NCCL sums beside the kernels of backward")
    return Resolved(False, "gloo sums with the cores that compute: no gain measured")


def choose_sync_batchnorm(scale: ScaleConfig, hosts: Resolved, *, workers: int, warnings: list[str]) -> Resolved | None:
    """Whether batch norms share their statistics; None where they do not. Raises InputError with remote experts."""
    if not scale.sync_batchnorm:
        return None
    if hosts.value not in ("none", 0):
        raise InputError(
            "scale.sync_batchnorm", got=f"true with experts.hosts {hosts.value}", expected="false with it",
            remedy="in passes without rows a worker runs the experts only; experts.hosts 0 keeps them in every worker",
        )  # fmt: skip
    if workers == 1:
        warnings.append("scale.sync_batchnorm true changes nothing: there is one worker")
        return None
    return Resolved(True, "scale.sync_batchnorm: statistics of all workers' micro-batches, two collectives a layer")


def _checked_kinds(requested: dict[str, int], machines: DevicePool, inventory: Inventory) -> dict[str, int]:
    """The mapping with each accelerator type as Ray spells it."""
    there = f"available: {inventory.describe()}"
    if not machines.on_gpu:
        got, expected = host_kinds_text(requested), "a number, as this run is on CPUs"
        raise InputError("experts.hosts", got=got, expected=expected, remedy=there)
    spelled: Counter[str] = Counter()
    for kind, number in requested.items():
        mine = [node for node in inventory.nodes if any(of_type(node, device, kind) for device in node.devices)]
        have = sum(of_type(node, device, kind) for node in mine for device in node.devices)
        if have < number:
            expected = f"at most {have}" if have else "an accelerator type of these machines"
            raise InputError("experts.hosts", got=f"{number} {kind}", expected=expected, remedy=there)
        mixed = [node.host for node in mine if len({device.name for device in node.devices}) > 1]
        if mixed:
            got = f"{number} {kind} with {mixed[0]}, which has GPUs of several kinds"
            remedy = "Ray knows one accelerator type per machine"
            raise InputError("experts.hosts", got=got, expected="a number", remedy=remedy)
        name = ray_type(kind, mine, inventory, key="experts.hosts")
        if name is None:
            remedy = "Ray names no type on its nodes"
            raise InputError("experts.hosts", got=f"{number} {kind}", expected="a number", remedy=remedy)
        spelled[name] += number
    return dict(spelled)


def _check_left(
    requested: Any, scale: ScaleConfig, machines: DevicePool, inventory: Inventory, *, workers: int
) -> None:
    """Raises InputError if the expert hosts leave too few GPUs for the workers."""
    there, least = len(machines.gpus), least_workers(scale)
    if isinstance(requested, dict):
        left = len(machines.without(gpus_of_hosts(requested, machines, inventory)).gpus)
        got, expected = host_kinds_text(requested), "fewer, or colocated"
    else:
        left, got = there - requested, str(requested)
        expected = f"at most {there - least}" if there > least else "0 or colocated"
    if left >= least:
        return
    takers, keys = "a worker needs one", "experts.hosts"
    if scale.workers != "auto":
        takers, keys = f"the workers need {least}", "experts.hosts or scale.workers"
        got += f" with {workers} workers"
    gpus = f"there {'is' if there == 1 else 'are'} {counted(there, machines.unit)}"
    raise InputError(
        "experts.hosts", got=got, expected=f"{expected}: {gpus}, each expert host needs one, and {takers}",
        remedy=f"lower {keys}, or set experts.hosts colocated, which needs no GPU of its own"
        f" ({inventory.describe()})",
    )  # fmt: skip
