"""Plan rules about machines: the workers' devices and number formats, how many workers there are, and where.

`raytrain.plan.plan` applies them first; the other rules build on their result. Accelerator types are compared by the
names that people, drivers and Ray give them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.config import ClusterConfig
from cluster.devices.inventory import BF16_CAPABILITY, FP16_CAPABILITY, Device, Inventory, Node
from cluster.preflight import DeviceSize, check_wanted
from cluster.wording import counted
from raytrain.config.sections import PrecisionConfig, ScaleConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Deferred, Resolved

PEAKS = ("fp32", "tf32", "bf16", "fp16", "memory")

GPUS = {
    "B200": (75, 1100, 2250, 2250, 7.7), "H200 NVL": (60, 418, 835, 835, 4.8), "H200": (67, 494, 989, 989, 4.8),
    "H100 NVL": (60, 418, 835, 835, 3.9), "H100 PCIE": (51, 378, 756, 756, 2.0), "H100": (67, 494, 989, 989, 3.35),
    "A100": (19.5, 156, 312, 312, 1.55), "L40S": (91.6, 183, 362, 362, 0.86), "A40": (37.4, 74.8, 150, 150, 0.7),
    "A10": (31.2, 62.5, 125, 125, 0.6), "L4": (30.3, 60, 121, 121, 0.3), "V100": (15.7, 15.7, 15.7, 125, 0.9),
    "T4": (8.1, 8.1, 8.1, 65, 0.32), "4090": (82.6, 82.6, 165, 165, 1.0), "3090": (35.6, 35.6, 71, 71, 0.94),
    "MI300X": (163, 654, 1307, 1307, 5.3),
}  # fmt: skip
"""Neighbouring words of a GPU's name -> 1e12 FLOPs per second of dense products in each format of `PEAKS`, and 1e12
bytes per second of its memory; longer names of a kind come first. From the data sheets of NVIDIA (which give sparse
products of H100, H200 and B200, twice as fast), its white papers (4090, 3090: sums in fp32) and AMD. Formats that a
GPU has no units for are computed in fp32. The A100's memory is that of 40 GB."""


def is_named(device: Device, text: str) -> bool:
    """Whether `text` is the device's name or some neighbouring words of it, in any case: H100 and rtx-pro-6000 match
    'NVIDIA H100 80GB HBM3' and 'NVIDIA RTX PRO 6000 Blackwell'."""
    return _contains(device.name, text)


def of_type(node: Node, device: Device, text: str) -> bool:
    """Whether a device of this node is of the type that `text` names: by its own name, or by Ray's names of the node,
    where no device of the node has such a name (Ray knows AMD's products, the kernel driver only their chips)."""
    if any(is_named(one, text) for one in node.devices):
        return is_named(device, text)
    return any(_contains(name, text) for name in node.accelerators)


def of_ray(inventory: Inventory) -> bool:
    """Whether these are the nodes of a running Ray cluster, which assigns the devices itself."""
    return any(node.gpu_slots is not None or node.accelerator for node in inventory.nodes)


def ray_type(text: str, nodes: Sequence[Node], inventory: Inventory, *, key: str) -> str | None:
    """Ray's spelling of the accelerator type that the `key` names, which `nodes` have; None where no type has to be
    required, as all GPUs of the cluster are of it. Without a cluster, `text` itself. Raises InputError: the nodes have
    several such types, or Ray knows none of them."""
    if not of_ray(inventory):
        return text
    exact = {name for node in nodes for name in node.accelerators if name.casefold() == text.casefold()}
    near = set[str]()
    for node in nodes:
        near.update([name for name in node.accelerators if _contains(name, text)] or node.accelerators[:1])
    names = sorted(exact or near)
    if len(names) == 1:
        return names[0]
    if names:
        raise InputError(
            key, got=text, expected=f"one type, {' or '.join(names)}", remedy="Ray requires one type for a process"
        )
    others = [node.host for node in inventory.nodes if node.devices and node not in nodes]
    if not others and all(of_type(node, device, text) for node in nodes for device in node.devices):
        return None
    hosts = ", ".join(node.host for node in nodes)
    raise InputError(
        key, got=text, expected="a type that Ray knows",
        remedy=f"Ray names no type on {hosts}: start Ray there with --resources"
        f" '{{\"accelerator_type:{text}\": 1}}'; available: {inventory.describe()}",
    )  # fmt: skip


def _contains(name: str, text: str) -> bool:
    """Whether the words of `text` are neighbouring words of `name`."""
    words, wanted = (re.findall(r"[0-9a-z]+", one.casefold()) for one in (name, text))
    places = range(len(words) - len(wanted) + 1)
    return bool(wanted) and any(words[place : place + len(wanted)] == wanted for place in places)


def peak_of(name: str, what: str) -> float | None:
    """What of `PEAKS` a GPU reaches in a second, by any name; None where the table lacks it, and for a MIG slice."""
    words = f" {name.upper().replace('-', ' ')} "
    found = next((peaks for kind, peaks in GPUS.items() if f" {kind} " in words), None)
    return None if found is None or what not in PEAKS or " MIG " in words else 1e12 * found[PEAKS.index(what)]


# ---------------------------------------------------------------- devices


@dataclass(frozen=True)
class DevicePool:
    """The kind of device chosen, and the accelerators that the workers can use by node (empty on CPU).

    Each device is for one process: where `per_gpu` processes share a GPU, it is there as many times.
    """

    mode: Resolved
    device: Resolved
    accelerator: Resolved
    pool: tuple[tuple[Node, tuple[Device, ...]], ...]
    per_gpu: int = 1

    @property
    def gpus(self) -> list[Device]:
        return [device for _, devices in self.pool for device in devices]

    @property
    def unit(self) -> str:
        return "GPU" if self.per_gpu == 1 else "GPU share"

    @property
    def on_gpu(self) -> bool:
        return self.device.value == "cuda"

    @property
    def required_type(self) -> str | None:
        """Ray's accelerator type if `scale.accelerator` names one; None for any device."""
        name = str(self.accelerator.value)
        return None if name.partition(":")[0] in ("cpu", "cuda") else name

    def without(self, excluded: Mapping[str, Sequence[Device]]) -> DevicePool:
        """The pool without the devices in `excluded` ({host name: devices})."""
        left = ((node, tuple(one for one in own if one not in excluded.get(node.host, ()))) for node, own in self.pool)
        return replace(self, pool=tuple((node, devices) for node, devices in left if devices))


def choose_devices(scale: ScaleConfig, inventory: Inventory, warnings: list[str]) -> DevicePool:
    """Chooses mode, device and accelerators. Raises InputError if `scale.accelerator` names a device that does not
    exist, or contradicts `scale.mode`."""
    text = (scale.accelerator or "auto").strip()
    pool = _pool(text, inventory)
    # what the devices must be asked for by: "cuda", "cuda:0", or a type as Ray spells it; None for any GPU
    required = None if text in ("auto", "cpu") else text
    if required is not None and not (text == "cuda" or text.startswith("cuda:")):
        required = ray_type(text, [node for node, _ in pool], inventory, key="scale.accelerator")
    pool = tuple((node, own) for node, own in pool if required in (None, text) or required in node.accelerators)
    contradiction = None
    if text == "cpu" and scale.mode in ("single_gpu", "multi_gpu"):
        contradiction = f"a GPU with scale.mode {scale.mode}"
    elif text not in ("auto", "cpu") and scale.mode == "cpu":
        contradiction = "cpu or null with scale.mode cpu"
    elif text.startswith("cuda:") and scale.mode == "multi_gpu":
        contradiction = "more than one device with scale.mode multi_gpu"
    if contradiction is not None:
        raise InputError("scale.accelerator", got=text, expected=contradiction)
    count = sum(len(devices) for _, devices in pool)
    mode = _mode(scale, count, inventory, forced_cpu=text == "cpu", warnings=warnings)
    if inventory.unusable and "cpu" not in (scale.mode, text):
        why = "; ".join(inventory.unusable)
        note = f"GPUs that cannot be used: {why}"
        if mode.value == "cpu":
            note = f"THIS RUN IS ON THE CPU, although there is a GPU that cannot be used: {why}"
            note += "; scale.mode cpu asks for that without this warning"
        warnings.append(note)
    if mode.value == "cpu":
        pool = ()
        device = accelerator = Resolved("cpu", "mode cpu")
    else:
        names = sorted({device.name for _, devices in pool for device in devices})
        device = Resolved("cuda", f"{count} usable: {', '.join(names)}")
        why = "every GPU found" if text == "auto" else "scale.accelerator"
        if text != "auto" and required != text:
            why += f" {text}" + (", as Ray names it" if required else "; every GPU of the cluster is one")
        accelerator = Resolved(required or "cuda", why)
    return DevicePool(mode, device, accelerator, pool)


def share_gpus(scale: ScaleConfig, machines: DevicePool, hosts: Any, warnings: list[str]) -> DevicePool:
    """The machines with each GPU divided as `scale.gpus_per_worker` says; `hosts` is `experts.hosts`. Raises InputError
    for a layout that needs whole GPUs."""
    per_gpu = int(1 / scale.gpus_per_worker + 1e-9)
    if per_gpu == 1:
        return machines
    if not machines.on_gpu:
        warnings.append(f"scale.gpus_per_worker {scale.gpus_per_worker:g} changes nothing: this run is on CPUs")
        return machines
    whole = "scale.strategy fsdp" if scale.strategy == "fsdp" else f"experts.hosts {hosts}"
    if scale.strategy == "fsdp" or isinstance(hosts, dict):
        raise InputError(
            "scale.gpus_per_worker", got=f"{scale.gpus_per_worker:g} with {whole}", expected="1 with it",
            remedy="data-parallel workers, colocated experts and a number of expert hosts can share GPUs",
        )  # fmt: skip
    pool = tuple((node, divided(own, per_gpu)) for node, own in machines.pool)
    return replace(machines, pool=pool, per_gpu=per_gpu)


def divided(gpus: Iterable[Device], per_gpu: int) -> tuple[Device, ...]:
    """Each GPU as what each of `per_gpu` processes gets: a device with that part of its memory."""
    return tuple(
        replace(
            gpu, memory_bytes=gpu.memory_bytes // per_gpu, uuid=f"{gpu.uuid or gpu.index}/{part}",
            free_bytes=None if gpu.free_bytes is None else gpu.free_bytes // per_gpu,
        )
        for gpu in gpus for part in range(per_gpu)
    )  # fmt: skip


def warn_of_lesser_devices(cluster: ClusterConfig, machines: DevicePool, inventory: Inventory) -> list[str]:
    """A warning if a device that the job uses has less than it is meant for."""
    if machines.on_gpu:
        found = ((node, gpu) for node, gpus in machines.pool for gpu in gpus)
        used = [DeviceSize(f"{gpu.name} of {node.host}", True, gpu.memory_bytes, gpu.capability) for node, gpu in found]
    else:
        used = [DeviceSize(f"the CPU of {node.host}", False, node.memory_bytes, None) for node in inventory.nodes]
    result = check_wanted(cluster, used)
    return [f"{result.seen}; {result.key}: the job is meant for {result.expected}"] if result.status == "warn" else []


def _pool(text: str, inventory: Inventory) -> tuple[tuple[Node, tuple[Device, ...]], ...]:
    """The nodes that have GPUs allowed by `scale.accelerator`, with those GPUs."""
    if text == "cpu":
        return ()
    numbered = re.fullmatch(r"cuda:(\d+)", text)
    several = f"there are {len(inventory.nodes)} machines" if len(inventory.nodes) > 1 else ""
    if of_ray(inventory) and len(inventory.devices()) > 1:
        several = several or "Ray assigns the GPUs of a cluster"
    if numbered and several:
        raise InputError(
            "scale.accelerator", got=text, expected=f"a device type, since {several}",
            remedy=f"available: {inventory.describe()}",
        )  # fmt: skip

    def wanted(node: Node, device: Device) -> bool:
        if device.kind != "cuda":
            return False
        if numbered:
            return device.index == int(numbered.group(1))
        return text in ("auto", "cuda") or of_type(node, device, text)

    pairs = ((node, tuple(device for device in node.devices if wanted(node, device))) for node in inventory.nodes)
    pool = tuple((node, devices) for node, devices in pairs if devices)
    if not pool and text != "auto":
        raise InputError(
            "scale.accelerator", got=text, expected="a device of these machines",
            remedy=f"available: {inventory.describe()}",
        )  # fmt: skip
    return pool


def pick_devices(text: str, inventory: Inventory) -> list[Device]:
    """The GPUs that a device string (`scale.accelerator`) allows, node by node. Raises InputError if there is none."""
    return [device for _, devices in _pool(text, inventory) for device in devices]


def _mode(scale: ScaleConfig, gpus: int, inventory: Inventory, *, forced_cpu: bool, warnings: list[str]) -> Resolved:
    """cpu, single_gpu or multi_gpu; falls back to the nearest mode that these machines support."""
    if scale.mode == "cpu":
        return Resolved("cpu", "scale.mode")
    if forced_cpu:
        return Resolved("cpu", "scale.accelerator")
    notes = [note for note in inventory.notes if any(word in note for word in ("GPU", "CUDA", "NVML"))]
    why = notes[-1] if notes else f"{inventory.source} has no GPU"
    if scale.mode == "auto":
        if gpus == 0:
            return Resolved("cpu", f"there is no GPU ({why})")
        if gpus == 1 or scale.workers == 1:
            reason = "there is one GPU" if gpus == 1 else f"scale.workers is 1; {gpus} GPUs found"
            return Resolved("single_gpu", reason)
        return Resolved("multi_gpu", f"there are {gpus} GPUs")
    if gpus == 0:
        return _fell_back("cpu", f"{scale.mode} was asked for, but there is no GPU ({why})", warnings)
    if gpus == 1 and scale.mode == "multi_gpu":
        return _fell_back("single_gpu", "multi_gpu was asked for, but there is one GPU", warnings)
    return Resolved(scale.mode, "scale.mode")


def _fell_back(value: str, reason: str, warnings: list[str]) -> Resolved:
    warnings.append(f"{reason}: fell back to {value}")
    return Resolved(value, f"fell back: {reason}")


def choose_precision(
    precision: PrecisionConfig, machines: DevicePool, inventory: Inventory, warnings: list[str]
) -> Choice:
    """The number format of forward and backward. Raises InputError if the device does not support the configured one,
    and `precision.fallback` is false."""
    known = [device.capability for device in machines.gpus if device.capability is not None]
    capability = min(known) if machines.on_gpu and len(known) == len(machines.gpus) else None
    if precision.dtype == "auto":
        return _measured_precision(machines, inventory, capability)
    problem, instead = None, "fp32"
    if not machines.on_gpu and precision.dtype == "tf32":
        problem = "tf32 is a format of GPUs"
    elif machines.on_gpu and capability is not None:
        shown = f"the GPU has CUDA capability {capability[0]}.{capability[1]}"
        if precision.dtype in ("bf16", "tf32") and capability < BF16_CAPABILITY:
            problem = f"{precision.dtype} needs 8.0 and {shown}"
            instead = "fp16" if precision.dtype == "bf16" and capability >= FP16_CAPABILITY else "fp32"
        elif precision.dtype == "fp16" and capability < FP16_CAPABILITY:
            problem = f"fp16 needs 7.0 and {shown}"
    if problem is not None:
        if not precision.fallback:
            raise InputError(
                "precision.dtype", got=precision.dtype, expected=f"a format for this device: {problem}",
                remedy=f"use {instead}, or precision.fallback: true",
            )  # fmt: skip
        return _fell_back(instead, f"{precision.dtype} was asked for, but {problem}", warnings)
    if precision.dtype == "bf16" and not machines.on_gpu and not any(inventory.cpu_flags.values()):
        warnings.append("bf16 on a CPU without bf16 instructions is emulated: slower than fp32")
    return Resolved(precision.dtype, "precision.dtype")


def choose_fp32_layers(precision: PrecisionConfig, chosen: Choice, warnings: list[str]) -> Choice | None:
    """Layers that stay in fp32; None if none is configured. `chosen` is the format of the other layers."""
    if precision.fp32_layers == []:
        return None
    may_be = chosen.candidates
    if not {"bf16", "fp16"}.intersection(may_be):
        if precision.fp32_layers != "auto":
            warnings.append(f"precision.fp32_layers changes nothing: everything computes in {may_be[0]}")
        return Resolved([], f"everything computes in {may_be[0]}")
    if precision.fp32_layers == "auto":
        how = "measured at the start, one layer at a time in half precision"
        return Deferred(how, (), "the fewest that bring the loss of the real model within the tolerance of fp32's")
    return Resolved(list(precision.fp32_layers), "precision.fp32_layers")


def _measured_precision(machines: DevicePool, inventory: Inventory, capability: tuple[int, int] | None) -> Choice:
    """`auto`: the half precision that the hardware supports is compared with fp32 on the real model."""
    how = "measured on the real model by the workers, and kept only if its numbers stay within tolerance"
    if machines.on_gpu:
        if capability is None:
            return Deferred(how, ("bf16", "fp32"), "the GPU's capability is unknown before the start")
        shown = f"CUDA capability {capability[0]}.{capability[1]}"
        if capability >= BF16_CAPABILITY:
            return Deferred(how, ("bf16", "fp32"), f"{shown} has bf16")
        if capability >= FP16_CAPABILITY:
            return Deferred(how, ("fp16", "fp32"), f"{shown} has fp16 but no bf16")
        return Resolved("fp32", f"{shown} has no fast half precision")
    present = [name for name, has in inventory.cpu_flags.items() if has]
    if present:
        return Deferred(how, ("bf16", "fp32"), f"this CPU has {', '.join(present)}")
    return Resolved("fp32", f"{inventory.cpu_model} has neither AMX nor other bf16 instructions")


# ---------------------------------------------------------------- workers


GPU_THREADS = 8
"""More threads than this do not feed one GPU faster; the other cores are left to data loading."""

CPU_OVERLOAD = 4
"""More workers than this per core are refused as a typing mistake."""


def count_workers(
    scale: ScaleConfig, machines: DevicePool, inventory: Inventory, *, global_batch: int, warnings: list[str]
) -> Resolved:
    """The number of training processes. Raises InputError: more workers than GPUs, than `CPU_OVERLOAD` per core or
    than rows of a global batch, or a number that contradicts the mode."""
    if isinstance(scale.workers, tuple):
        # `scale.workers: [min, max]`: as many as there are GPUs for them, on CPUs cores, of which each takes
        # `scale.threads` of one node.
        least, most = scale.workers
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
    if isinstance(scale.workers, int):
        _check_requested(scale.workers, scale, machines, inventory, global_batch=global_batch)
        if not machines.on_gpu and scale.workers > inventory.cpus:
            warnings.append(f"{scale.workers} workers share {inventory.cpus} CPU cores: slower than one per core")
        return Resolved(scale.workers, "scale.workers")
    if "single_gpu" in (machines.mode.value, scale.mode):
        return Resolved(1, f"mode {machines.mode.value}")
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
    if machines.on_gpu:
        nodes = sorted(machines.pool, key=lambda pair: -len(pair[1]))
        hosts = [node.host for node, devices in nodes for _ in devices][:workers]
        return dict(Counter(hosts))
    hosts = [node.host for node in inventory.nodes if node.cpus > 0] or [inventory.nodes[0].host]
    return dict(Counter(hosts[rank % len(hosts)] for rank in range(workers)))


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


def where_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} on {host}" for host, count in counts.items())


def choose_threads(
    scale: ScaleConfig, counts: dict[str, int], machines: DevicePool, inventory: Inventory, warnings: list[str],
    *, other_processes: Mapping[str, int] | None = None,
) -> Resolved:  # fmt: skip
    """CPU threads of each process, the same for all: equal thread counts give bit-identical sums. `counts` are the
    workers of each node, `other_processes` the others, such as expert hosts."""
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
    cores = Counter[str]()
    for node in inventory.nodes:
        cores[node.host] += node.cpus
    return dict(cores)
