"""What `raytrain check` finds out on one node, and what it compares over nodes and devices.

Runs as a Ray task on every node: facts, the checks of the machine, rates of its devices.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from cluster.devices.inventory import device_facts, local_inventory, machine_limits
from cluster.environment import environment_record
from cluster.network import GLOO, interface_of
from cluster.preflight import CheckResult, check_caches, check_place, check_shared_memory, check_visible_devices, judged
from cluster.wording import counted, size
from raytrain.errors import RaytrainError, first_line
from raytrain.runs.storage import open_store

# ---------------------------------------------------------------- node
# What `raytrain check` finds out on one node: facts, the checks of the machine, and the rates of its devices.


#: Repetitions of a product whose results must be equal bit for bit.
REPEATS = 4
#: Width and rows of that product.
WIDTH, ROWS = 512, 512
#: Bytes copied to a GPU to measure the rate.
COPIED = 64 << 20
#: Memory that is left of what the process may use below which nothing can train.
LEAST_MEMORY = 1 << 30
CONNECT_S = 3.0
#: Threads at work for each core above which a machine is busy: a check's own are few.
BUSY = 1.5
#: Bytes that are allocated on a device, for telemetry to see.
WATCHED = 256 << 20


@dataclass(frozen=True)
class DeviceRates:
    device: str  # "cpu" or "cuda:0"
    name: str
    flops: dict[str, float]  # number format -> FLOPs per second of the matrix products of training
    repeatable: dict[str, bool]  # number format -> whether repetitions of a product gave the same bits
    memory_bytes_per_s: float  # of an operation on tensors that no cache holds
    copy_bytes_per_s: float | None  # from pinned host memory to the GPU; None on a CPU
    cudnn: int | None  # version of cuDNN (of MIOpen on ROCm); None on a CPU
    watched_bytes: int | None = None  # how much telemetry's reading rose while `WATCHED` bytes more were allocated


@dataclass(frozen=True)
class NodeReport:
    """One node; its facts as `cluster.environment` and `cluster.devices.inventory` describe them."""

    host: str
    environment: Mapping[str, Any]
    limits: Mapping[str, Any]
    devices: list[dict[str, Any]]
    results: list[CheckResult]


def examine(save_dir: str, token: str, name: str, driver: tuple[str, int], interface: str | None) -> NodeReport:
    """Everything about this node that needs neither torch nor a GPU.

    Args:
        save_dir: `save.dir`, in whose folder `token` the driver has left a file, and this node leaves `name`.
        driver: the address and a port on which the driver accepts connections.
        interface: `cluster.interface`, None for the one that Ray uses.
    """
    inventory = local_inventory()
    limits = machine_limits(inventory)
    storage, disk = check_place(save_dir, None)
    results = [
        storage, shared_storage(save_dir, token, name), disk,
        check_limits(limits), check_shared_memory(), check_network(driver, interface), check_visible_devices(),
        check_devices(inventory.unusable, inventory.describe()), check_load(),
    ]  # fmt: skip
    record, devices = environment_record(inventory=inventory), device_facts(inventory)
    runtimes = sorted({row["runtime"] for row in devices if row["kind"] != "cpu" and row["runtime"]})
    results.append(check_caches(", ".join(runtimes) or None))
    return NodeReport(record["host"], record, limits, devices, results)


def check_network(driver: tuple[str, int], interface: str | None) -> CheckResult:
    """Whether this node reaches the driver's machine on a port of its own choice, and has the configured interface."""
    host, port = driver
    expected = f"a connection to {host}, and the interface {interface or 'that Ray uses'}"
    names = [name for _, name in socket.if_nameindex()]
    if interface is not None and interface not in names:
        seen = f"no interface {interface}: this node has {', '.join(names)}"
        return judged("network", seen, expected, "set cluster.interface", key="cluster.interface")
    began = time.perf_counter()
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        remedy = "open the ports between the nodes (ephemeral ports too: gloo and NCCL choose them)"
        return judged("network", f"{host}:{port}: {error}", expected, remedy)
    took = 1e3 * (time.perf_counter() - began)
    address = ray.util.get_node_ip_address() if ray.is_initialized() else host
    chosen = interface or os.environ.get(GLOO) or interface_of(address)
    over = f"over {chosen}" if chosen else f"over what gloo and NCCL choose: no interface has Ray's address {address}"
    return judged("network", f"{host} connected in {took:.1f} ms; collectives {over}", expected)


def clock() -> float:
    return time.time()


def shared_storage(save_dir: str, token: str, name: str) -> CheckResult:
    """Whether this node reads what the driver wrote, and may write beside it."""
    expected = "the file that the driver wrote"
    remedy = "set save.dir to a folder that all nodes mount, or to a URI (s3://, gs://, hdfs://)"
    try:
        store = open_store(save_dir)
        seen = store.read_bytes(f"{token}/driver").decode()
        store.write_bytes(f"{token}/{name}", token.encode())
        found, remedy = ("read what the driver wrote", "") if seen == token else ("another content", remedy)
    except (OSError, ValueError, ImportError, RaytrainError) as error:
        found = first_line(error)
    return judged("shared_storage", f"{save_dir}: {found}", expected, remedy, key="save.dir")


def check_limits(limits: Mapping[str, Any]) -> CheckResult:
    """Cores and memory that a process may use here, and whether a cgroup allows less than the machine has."""
    free, total, machine = (limits[f"{name}_bytes"] for name in ("memory_free", "memory_total", "machine_memory"))
    seen = f"{counted(limits['cores'], 'core')} ({limits['cores_reason']}), {size(free)} of {size(total)} free"
    if machine and total < 0.98 * machine:
        seen += f"; a cgroup allows {size(total)} of {size(machine)}"
    short = free is not None and free < LEAST_MEMORY
    remedy = "end other programs, or raise the container's limit" if short else ""
    return judged("memory", seen, f"at least 1 core and {size(LEAST_MEMORY)}", remedy)


def check_devices(unusable: tuple[str, ...], seen: str) -> CheckResult:
    """Whether a GPU that exists cannot be used."""
    remedy = "see the reason; `nvidia-smi` lists GPUs" if unusable else ""
    return judged("devices", "; ".join(unusable) or seen, "every GPU can be used", remedy)


def check_load(load: float | None = None, cores: int | None = None) -> CheckResult:
    """Whether other programs use this machine: then what is measured here, and later trained, is slower. `load` is the
    kernel's mean of the last minute, of threads that run or wait for a core of the machine."""
    load = os.getloadavg()[0] if load is None else load
    cores = cores or os.cpu_count() or 1
    seen, expected = f"{load:.1f} threads at work on {counted(cores, 'core')}", f"at most {BUSY:g} for each core"
    remedy = "end other programs, or wait: rates and steps are slower than they could be" if load > BUSY * cores else ""
    return judged("load", seen, expected, remedy, status="warn")


def measure_node() -> list[DeviceRates]:
    """The rates of every GPU of this node that this process sees, or of its CPU with all usable cores."""
    import torch

    from cluster.devices.limits import usable_cores

    if torch.cuda.is_available():
        return [measure(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    torch.set_num_threads(usable_cores()[0])
    return [measure(torch.device("cpu"))]


def measure(device: Any) -> DeviceRates:
    import torch

    from cluster.devices.limits import cpu_description
    from raytrain.train.compute.rates import formats_of, memory_rate, product_flops

    formats = [name for name in formats_of(device) if name != "fp64"]
    on_gpu = device.type == "cuda"
    return DeviceRates(
        device=str(device),
        name=torch.cuda.get_device_name(device) if on_gpu else cpu_description()[0],
        flops={name: product_flops(device, name, width=2048 if on_gpu else WIDTH) for name in formats},
        repeatable={name: is_repeatable(device, name) for name in formats},
        memory_bytes_per_s=memory_rate(device),
        copy_bytes_per_s=copy_rate(device) if on_gpu else None,
        cudnn=torch.backends.cudnn.version() if on_gpu else None,
        watched_bytes=watched_bytes(device),
    )


def watched_bytes(device: Any) -> int | None:
    """How much telemetry's reading of this process's memory (of the device's, on a GPU) rises while `WATCHED` bytes are
    allocated; None where there is no reading."""
    import torch

    from cluster.telemetry.sampler import NodeSampler

    sampler = NodeSampler("check")
    before = _memory_read(sampler, device)
    block = torch.ones(WATCHED // 4, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    after = _memory_read(sampler, device)
    del block
    return None if before is None or after is None else after - before


def _memory_read(sampler: Any, device: Any) -> int | None:
    row = sampler.sample()
    if device.type == "cpu":
        return next((one["rss"] for one in row["processes"] if one["pid"] == os.getpid()), None)
    gpus = row["devices"][1:]  # the CPU comes first
    return gpus[device.index]["memory_used"] if device.index < len(gpus) else None


def is_repeatable(device: Any, dtype: str) -> bool:
    """Whether repetitions of a product give the same bits; if not, the device computes wrong results at times."""
    import torch

    from raytrain.train.precision import policy_for

    policy = policy_for(dtype)
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(size, WIDTH, generator=draw).to(device, policy.master_dtype) for size in (ROWS, WIDTH))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(policy.matmul)
    try:
        with policy.autocast(device):
            first = multiply(one, other)
            return all(torch.equal(first, multiply(one, other)) for _ in range(REPEATS - 1))
    finally:
        torch.set_float32_matmul_precision(before)


def multiply(one: Any, other: Any) -> Any:
    """The product whose repetitions are compared."""
    return one @ other


def copy_rate(device: Any) -> float:
    """Bytes per second from pinned host memory to a GPU, the best of four."""
    import torch

    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    target, best = torch.empty(COPIED, dtype=torch.uint8, device=device), 0.0
    for _ in range(4):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        target.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        best = max(best, COPIED / (time.perf_counter() - began))
    return best


# ---------------------------------------------------------------- compare
# The checks that look at several nodes, or at several devices: versions, clocks, rates.


#: The oldest versions that raytrain runs on, as in pyproject.toml.
OLDEST = {"python": (3, 11), "torch": (2, 9), "ray": (2, 60)}
OLDEST_CUDA, OLDEST_ROCM = (11, 8), (6, 2)
#: A device below this share of the median of its kind is slow.
SLOW = 0.85
#: Clocks further apart confuse the order of events of several nodes.
CLOCK_S = 1.0
#: Telemetry sees an allocation if its reading rises by this much of it: the driver and others may add to it.
MONITORED = (0.9, 1.5)


def check_versions(reports: Mapping[str, NodeReport]) -> list[CheckResult]:
    """Whether each node has the packages, new enough, and all nodes the same."""
    results = []
    for name, oldest in OLDEST.items():
        records = {node: report.environment for node, report in reports.items()}
        found = {node: {"python": one["python"], **one["versions"]}.get(name) for node, one in records.items()}
        expected, remedy = f"{_shown(oldest)} or newer, the same on every node", ""
        seen = _by_value({node: version or "not installed" for node, version in found.items()})
        old = [node for node, version in found.items() if version is None or _numbers(version) < oldest]
        if old:
            remedy = f"install {name} {_shown(oldest)} or newer on {', '.join(old)} (constraints.txt has a tested set)"
        elif len(set(found.values())) > 1:
            remedy = f"install the same {name} on every node"
        results.append(judged(name, seen, expected, remedy))
    return results


def check_platform(reports: Mapping[str, NodeReport]) -> CheckResult:
    """Whether torch is built for the GPUs' platform, in a version that raytrain supports."""
    expected = f"CUDA {_shown(OLDEST_CUDA)}, ROCm {_shown(OLDEST_ROCM)} or newer where there are GPUs"
    runtimes = {
        f"{node} {row['kind']}": row["runtime"]
        for node, report in reports.items() for row in report.devices if row["kind"] != "cpu"
    }  # fmt: skip
    if not runtimes:
        return CheckResult("platform", "na", "no GPU: raytrain trains on the CPU", expected)
    old = [
        name for name, runtime in runtimes.items()
        if runtime and _numbers(runtime.split()[-1]) < (OLDEST_ROCM if "ROCm" in runtime else OLDEST_CUDA)
    ]  # fmt: skip
    seen = _by_value({name: runtime or "unknown" for name, runtime in runtimes.items()})
    return judged("platform", seen, expected, f"install a newer torch build on {', '.join(old)}" if old else "")


def check_clocks(clocks: Mapping[str, tuple[float, float, float]]) -> CheckResult:
    """Whether the nodes' clocks agree with the driver's. Of each node it gets when the driver asked, what its clock
    said, and when the driver had the answer: a clock can be placed no better than within that time."""
    skews = {node: max(asked - said, said - answered, 0.0) for node, (asked, said, answered) in clocks.items()}
    wrong = ", ".join(f"{node} {value:.1f} s" for node, value in skews.items() if value >= CLOCK_S)
    seen, remedy = f"{len(skews)} nodes agree" if len(skews) > 1 else "one node", ""
    if wrong:
        seen, remedy = f"at least {wrong} away", "run a time service (chrony, ntp)"
    return judged("clocks", seen, f"less than {CLOCK_S:g} s apart", remedy, status="warn")


def check_repeatable(rates: Mapping[str, Sequence[DeviceRates]]) -> CheckResult:
    """Whether every device computes the same product twice."""
    expected = "the same bits in every repetition of a product"
    wrong = [
        f"{one.device} of {node} in {dtype}"
        for node, devices in rates.items() for one in devices
        for dtype, equal in one.repeatable.items() if not equal
    ]  # fmt: skip
    seen, remedy = f"{counted(sum(map(len, rates.values())), 'device')}, each format", ""
    if wrong:
        seen = f"different results on {', '.join(wrong)}"
        remedy = "take it out of the cluster (scale.accelerator, CUDA_VISIBLE_DEVICES) and test its memory"
    return judged("repeated_products", seen, expected, remedy)


def check_monitoring(rates: Mapping[str, Sequence[DeviceRates]]) -> CheckResult:
    """Whether telemetry sees memory that is allocated on each device."""
    expected = f"telemetry sees {WATCHED >> 20} MiB that are allocated"
    read = {
        f"{one.device} of {node}": one.watched_bytes
        for node, devices in rates.items() for one in devices if one.watched_bytes is not None
    }  # fmt: skip
    if not read:
        return CheckResult("memory_monitoring", "na", "no reading of the memory of a device", expected)
    seen = ", ".join(f"{rise / 2**20:.0f} MiB on {place}" for place, rise in read.items())
    low, high = WATCHED * MONITORED[0], WATCHED * MONITORED[1]
    remedy = ""
    if not all(low <= rise <= high for rise in read.values()):
        remedy = "other programs that allocate there meanwhile? otherwise trust no figure of memory of this driver"
    return judged("memory_monitoring", seen, expected, remedy, status="warn")


def check_rates(rates: Mapping[str, Sequence[DeviceRates]]) -> list[CheckResult]:
    """The rates of each kind of device, and the devices that are slower than others of their kind."""
    kinds = defaultdict[str, list[tuple[str, DeviceRates]]](list)
    for node, devices in rates.items():
        for one in devices:
            kinds[one.name].append((f"{one.device} of {node}", one))
    return [_kind_rates(kind, members) for kind, members in kinds.items()]


def _kind_rates(kind: str, members: Sequence[tuple[str, DeviceRates]]) -> CheckResult:
    figures = defaultdict[str, dict[str, float]](dict)
    for place, one in members:
        for dtype, flops in one.flops.items():
            figures[f"{dtype} TFLOP/s"][place] = flops / 1e12
        figures["memory GB/s"][place] = one.memory_bytes_per_s / 1e9
        if one.copy_bytes_per_s is not None:
            figures["host to device GB/s"][place] = one.copy_bytes_per_s / 1e9
    medians = {what: statistics.median(values.values()) for what, values in figures.items()}
    seen = f"{kind}: " + ", ".join(f"{what} {value:.3g}" for what, value in medians.items())
    expected = f"at least {SLOW} of the median of its kind"
    slow = [
        f"{place} {what} {value:.3g} ({value / medians[what]:.2f})"
        for what, values in figures.items() for place, value in values.items() if value < SLOW * medians[what]
    ]  # fmt: skip
    remedy = ""
    if slow:
        seen += f"; slower: {'; '.join(slow)}"
        remedy = "look for other programs, heat or power limits there; scale.shares auto gives a slow device less"
    return judged("rates", seen, expected, remedy, status="warn")


def _numbers(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(char for char in part if char.isdigit()) or 0) for part in parts)


def _shown(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _by_value(found: Mapping[str, Any]) -> str:
    """ "2.60.0" where all are the same, else the nodes of each value."""
    values = dict.fromkeys(found.values())
    if len(values) == 1:
        return str(next(iter(values)))
    return "; ".join(f"{value} on {', '.join(n for n, v in found.items() if v == value)}" for value in values)
