"""Plan rules about devices: which ones the workers get, and which number formats those support.

Pure: the `scale` and `precision` sections and an inventory in, choices out. A fall-back is never silent: it is in the
reason and in `warnings`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cluster.checks.preflight import DeviceSize, check_wanted
from cluster.config import ClusterConfig
from cluster.devices.inventory import Device, Inventory, Node
from raytrain.config.sections import PrecisionConfig, ScaleConfig
from raytrain.errors import InputError
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.rules.accelerators import of_ray, of_type, ray_type

BF16_CAPABILITY = (8, 0)
FP16_CAPABILITY = (7, 0)


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
        """What one process gets, in messages."""
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
    """Chooses mode, device and accelerators.

    Raises:
        InputError: `scale.accelerator` names a device that does not exist, or contradicts `scale.mode`.
    """
    text = (scale.accelerator or "auto").strip()
    pool = _pool(text, inventory)
    required = _required(text, pool, inventory)
    pool = tuple((node, own) for node, own in pool if required in (None, text) or required in node.accelerators)
    _refuse_contradiction(scale, text)
    count = sum(len(devices) for _, devices in pool)
    mode = _mode(scale, count, inventory, forced_cpu=text == "cpu", warnings=warnings)
    _warn_of_unusable(scale, text, inventory, mode, warnings)
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
    """The machines with each GPU divided as `scale.gpus_per_worker` says.

    Args:
        hosts: `experts.hosts`.

    Raises:
        InputError: a layout that needs whole GPUs.
    """
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


def _required(text: str, pool: Sequence[tuple[Node, tuple[Device, ...]]], inventory: Inventory) -> str | None:
    """What the devices must be asked for by: "cuda", "cuda:0", or a type as Ray spells it; None for any GPU."""
    if text in ("auto", "cpu"):
        return None
    if text.partition(":")[0] == "cuda":
        return text
    return ray_type(text, [node for node, _ in pool], inventory, key="scale.accelerator")


def warn_of_mixed_gpus(machines: DevicePool, warnings: list[str]) -> None:
    """Adds a warning if the workers get GPUs of several kinds."""
    names = sorted({gpu.name for gpu in machines.gpus})
    if len(names) > 1:
        warnings.append(
            f"GPUs of {len(names)} kinds ({', '.join(names)}): each step waits for the slowest;"
            " scale.shares auto gives the faster ones more, scale.accelerator picks one kind"
        )


def warn_of_lesser_devices(cluster: ClusterConfig, machines: DevicePool, inventory: Inventory) -> list[str]:
    """A warning if a device that the job uses has less than it is meant for."""
    if machines.on_gpu:
        used = [
            DeviceSize(f"{gpu.name} of {node.host}", True, gpu.memory_bytes, gpu.capability)
            for node, gpus in machines.pool for gpu in gpus
        ]  # fmt: skip
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
    """The GPUs that a device string (`scale.accelerator`) allows, node by node.

    Raises:
        InputError: there is none.
    """
    return [device for _, devices in _pool(text, inventory) for device in devices]


def _refuse_contradiction(scale: ScaleConfig, text: str) -> None:
    wants_gpu = scale.mode in ("single_gpu", "multi_gpu")
    if text == "cpu" and wants_gpu:
        expected = f"a GPU with scale.mode {scale.mode}"
    elif text not in ("auto", "cpu") and scale.mode == "cpu":
        expected = "cpu or null with scale.mode cpu"
    elif text.startswith("cuda:") and scale.mode == "multi_gpu":
        expected = "more than one device with scale.mode multi_gpu"
    else:
        return
    raise InputError("scale.accelerator", got=text, expected=expected)


def _mode(scale: ScaleConfig, gpus: int, inventory: Inventory, *, forced_cpu: bool, warnings: list[str]) -> Resolved:
    """cpu, single_gpu or multi_gpu; falls back to the nearest mode that these machines support."""
    if scale.mode == "cpu":
        return Resolved("cpu", "scale.mode")
    if forced_cpu:
        return Resolved("cpu", "scale.accelerator")
    why = _why_no_gpu(inventory)
    if scale.mode == "auto":
        if gpus == 0:
            return Resolved("cpu", f"there is no GPU ({why})")
        if gpus == 1 or scale.workers == 1:
            reason = "there is one GPU" if gpus == 1 else f"scale.workers is 1; {gpus} GPUs found"
            return Resolved("single_gpu", reason)
        return Resolved("multi_gpu", f"there are {gpus} GPUs")
    if scale.mode == "single_gpu":
        if gpus:
            return Resolved("single_gpu", "scale.mode")
        return _fell_back("cpu", f"single_gpu was asked for, but there is no GPU ({why})", warnings)
    if gpus >= 2:
        return Resolved("multi_gpu", "scale.mode")
    if gpus == 1:
        return _fell_back("single_gpu", "multi_gpu was asked for, but there is one GPU", warnings)
    return _fell_back("cpu", f"multi_gpu was asked for, but there is no GPU ({why})", warnings)


def _fell_back(value: str, reason: str, warnings: list[str]) -> Resolved:
    warnings.append(f"{reason}: fell back to {value}")
    return Resolved(value, f"fell back: {reason}")


def _warn_of_unusable(scale: ScaleConfig, text: str, inventory: Inventory, mode: Resolved, warnings: list[str]) -> None:
    """Adds a warning about GPUs that exist and cannot be used, unless the job asks for CPUs."""
    if not inventory.unusable or "cpu" in (scale.mode, text):
        return
    why = "; ".join(inventory.unusable)
    if mode.value != "cpu":
        warnings.append(f"GPUs that cannot be used: {why}")
        return
    warnings.append(
        f"THIS RUN IS ON THE CPU, although there is a GPU that cannot be used: {why}; scale.mode cpu asks for that"
        " without this warning"
    )


def _why_no_gpu(inventory: Inventory) -> str:
    """The inventory's note on missing devices, otherwise that there is no GPU."""
    notes = [note for note in inventory.notes if "GPU" in note or "CUDA" in note or "NVML" in note]
    return notes[-1] if notes else f"{inventory.source} has no GPU"


def choose_precision(
    precision: PrecisionConfig, machines: DevicePool, inventory: Inventory, warnings: list[str]
) -> Choice:
    """The number format of forward and backward.

    Raises:
        InputError: the device does not support the configured format, and `precision.fallback` is false.
    """
    known = [device.capability for device in machines.gpus if device.capability is not None]
    capability = min(known) if machines.on_gpu and len(known) == len(machines.gpus) else None
    if precision.dtype == "auto":
        return _measured_precision(machines, inventory, capability)
    problem, instead = _unable(precision.dtype, machines, capability)
    if problem:
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
    """Layers that stay in fp32; None if none is configured.

    Args:
        chosen: the format of the other layers.
    """
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


def _unable(dtype: str, machines: DevicePool, capability: tuple[int, int] | None) -> tuple[str, str]:
    """(why the devices do not support `dtype`, the nearest format they support), or ("", dtype) if they do."""
    if not machines.on_gpu:
        return ("tf32 is a format of GPUs", "fp32") if dtype == "tf32" else ("", dtype)
    if capability is None:
        return "", dtype
    shown = f"the GPU has CUDA capability {capability[0]}.{capability[1]}"
    if dtype in ("bf16", "tf32") and capability < BF16_CAPABILITY:
        can_fp16 = dtype == "bf16" and capability >= FP16_CAPABILITY
        return f"{dtype} needs 8.0 and {shown}", "fp16" if can_fp16 else "fp32"
    if dtype == "fp16" and capability < FP16_CAPABILITY:
        return f"fp16 needs 7.0 and {shown}", "fp32"
    return "", dtype
