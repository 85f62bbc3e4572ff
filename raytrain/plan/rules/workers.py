"""Plan rules about workers: how many there are, on which nodes, and how many threads each has.

Pure: the `scale` section, the chosen machines and the inventory in, choices out.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.config import ClusterConfig
from cluster.devices.inventory import Inventory
from cluster.wording import counted
from raytrain.config.sections import ScaleConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Resolved
from raytrain.plan.rules.devices import DevicePool

GPU_THREADS = 8
"""More threads than this do not feed one GPU faster; the other cores are left to data loading."""

CPU_OVERLOAD = 4
"""More workers than this per core are refused as a typing mistake."""


def count_workers(
    scale: ScaleConfig, machines: DevicePool, inventory: Inventory, *, global_batch: int, warnings: list[str]
) -> Resolved:
    """The number of training processes.

    Raises:
        InputError: more workers than GPUs, than `CPU_OVERLOAD` per core or than rows of a global batch, or a number
            that contradicts the mode.
    """
    if isinstance(scale.workers, tuple):
        return _count_elastic(scale.workers, scale, machines, inventory, global_batch=global_batch)
    requested = scale.workers if isinstance(scale.workers, int) else None
    mode = machines.mode.value
    if requested is not None:
        _check_requested(requested, scale, machines, inventory, global_batch=global_batch)
        if not machines.on_gpu and requested > inventory.cpus:
            warnings.append(f"{requested} workers share {inventory.cpus} CPU cores: slower than one per core")
        return Resolved(requested, "scale.workers")
    if "single_gpu" in (mode, scale.mode):
        return Resolved(1, f"mode {mode}")
    if machines.on_gpu:
        count, reason = len(machines.gpus), f"one per {machines.unit}"
    else:
        count = max(1, sum(node.cpus > 0 for node in inventory.nodes))
        reason = "on CPUs one worker uses all cores with its threads, and each further one takes more memory"
        if count > 1:
            reason = f"one per machine; {reason}"
    if count > global_batch:
        warnings.append(
            f"{count} workers could run, but a global batch of {global_batch} rows is enough for {global_batch} only;"
            " raise loop.global_batch_size"
        )
        return Resolved(global_batch, f"one per row of the global batch; {count} could run")
    return Resolved(count, reason)


def _count_elastic(
    bounds: tuple[int, int], scale: ScaleConfig, machines: DevicePool, inventory: Inventory, *, global_batch: int
) -> Resolved:
    """As many workers of `scale.workers: [min, max]` as there are GPUs for them, on CPUs cores, of which each takes
    `scale.threads` of one node."""
    least, most = bounds
    _check_requested(least, scale, machines, inventory, global_batch=global_batch)
    single = "single_gpu" in (machines.mode.value, scale.mode)
    each = scale.threads if isinstance(scale.threads, int) and not machines.on_gpu else 1
    cores = sum(node.cpus // each for node in inventory.nodes)
    there = 1 if single else len(machines.gpus) if machines.on_gpu else cores
    have = counted(there, machines.unit if machines.on_gpu else "CPU core")
    if each > 1:
        have = f"{counted(inventory.cpus, 'CPU core')}, room for {counted(there, 'worker')} of {each} threads"
    reason = f"scale.workers [{least}, {most}], and the machines have {have}"
    return Resolved(max(least, min(most, there, global_batch)), reason)


def _check_requested(
    requested: int, scale: ScaleConfig, machines: DevicePool, inventory: Inventory, *, global_batch: int
) -> None:
    """Raises `InputError`, naming the machines found, if they cannot run `requested` workers."""
    there = f"available: {inventory.describe()}"
    gpus = len(machines.gpus)
    if requested > 1 and scale.mode == "single_gpu":
        expected, remedy = "1 with scale.mode single_gpu", f"set scale.mode or scale.workers; {there}"
    elif scale.workers == 1 and machines.mode.value == "multi_gpu":
        expected, remedy = "2 or more with scale.mode multi_gpu", "scale.mode single_gpu trains on one"
    elif machines.on_gpu and requested > gpus:
        expected, remedy = f"at most {gpus}, one per {machines.unit}", there
    elif not machines.on_gpu and requested > CPU_OVERLOAD * max(1, inventory.cpus):
        expected, remedy = f"at most {CPU_OVERLOAD * inventory.cpus}, {CPU_OVERLOAD} per CPU core", there
    elif requested > global_batch:
        expected = f"at most loop.global_batch_size, {global_batch} rows"
        remedy = "each worker needs a row of every global batch"
    else:
        return
    got = str(requested) if isinstance(scale.workers, int) else f"{list(scale.workers)}"
    raise InputError("scale.workers", got=got, expected=expected, remedy=remedy)


def spread(workers: int, machines: DevicePool, inventory: Inventory) -> dict[str, int]:
    """{host: workers}: GPUs node by node, the node with the most GPUs first; CPU nodes in turn."""
    counts: dict[str, int] = {}
    if machines.on_gpu:
        left = workers
        for node, devices in sorted(machines.pool, key=lambda pair: -len(pair[1])):
            assigned = min(left, len(devices))
            if assigned:
                counts[node.host] = counts.get(node.host, 0) + assigned
            left -= assigned
        return counts
    hosts = [node.host for node in inventory.nodes if node.cpus > 0] or [inventory.nodes[0].host]
    for rank in range(workers):
        host = hosts[rank % len(hosts)]
        counts[host] = counts.get(host, 0) + 1
    return counts


def allowed_bytes(cluster: ClusterConfig, machines: DevicePool, inventory: Inventory, *, workers: int) -> int | None:
    """Bytes that one process may use: `cluster.memory_fraction` of the free bytes of the smallest device (on a CPU: of
    its share of the tightest node), at most `cluster.memory_limit`; None where unknown."""
    if machines.on_gpu:
        room = float(min(gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes for gpu in machines.gpus))
    else:
        counts = spread(workers, machines, inventory)
        room = min(
            (node.memory_bytes if node.free_bytes is None else node.free_bytes) / counts[node.host]
            for node in inventory.nodes
            if node.host in counts
        )
    known = [int(value) for value in (cluster.memory_fraction * room, cluster.memory_limit) if value]
    return min(known, default=None)


def choose_placement(counts: dict[str, int], machines: DevicePool) -> Resolved:
    """Ray's placement strategy, and the workers on each node as its reason."""
    return Resolved("PACK" if machines.on_gpu or len(counts) == 1 else "SPREAD", where_text(counts))


def where_text(counts: Mapping[str, int]) -> str:
    """The number of processes on each node, as text."""
    return ", ".join(f"{count} on {host}" for host, count in counts.items())


def choose_threads(
    scale: ScaleConfig, counts: dict[str, int], machines: DevicePool, inventory: Inventory, warnings: list[str],
    *, other_processes: Mapping[str, int] | None = None,
) -> Resolved:  # fmt: skip
    """CPU threads of each process, the same for all: equal thread counts give bit-identical sums.

    Args:
        counts: workers of each node.
        other_processes: other processes of each node, such as expert hosts.
    """
    cores = cores_of(inventory)
    others = other_processes or {}
    totals = {name: counts.get(name, 0) + others.get(name, 0) for name in [*counts, *others]}
    host = min(totals, key=lambda name: cores[name] / totals[name])
    shared = max(1, cores[host] // totals[host])
    basis = f"{counted(cores[host], 'usable core')} / {counted(totals[host], 'process', 'processes')} on {host}"
    if others.get(host):
        basis += f" (workers {counts.get(host, 0)}, expert hosts {others[host]})"
    if isinstance(scale.threads, int):
        if scale.threads > 1 and scale.threads * totals[host] > cores[host]:  # no process has less than one
            warnings.append(f"scale.threads {scale.threads} is more than {basis}")
        return Resolved(scale.threads, "scale.threads")
    if machines.on_gpu and shared > GPU_THREADS:
        return Resolved(GPU_THREADS, f"{basis}, at most {GPU_THREADS} feed a GPU")
    return Resolved(shared, basis)


def cores_of(inventory: Inventory) -> dict[str, int]:
    """Usable cores of each node."""
    cores: dict[str, int] = {}
    for node in inventory.nodes:
        cores[node.host] = cores.get(node.host, 0) + node.cpus
    return cores
