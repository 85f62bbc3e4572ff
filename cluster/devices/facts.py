"""The facts about the devices of this machine: the same keys for a GPU of NVIDIA or AMD and for a CPU. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.devices.inventory import Inventory
from cluster.devices.limits import ROOT
from cluster.devices.nvidia import Device, driver_version
from cluster.devices.torch_build import TorchBuild, installed_torch

BF16_CAPABILITY, FP16_CAPABILITY = (8, 0), (7, 0)
"""NVIDIA's compute capabilities from which tensor cores compute in these formats."""


def device_facts(inventory: Inventory, *, torch: TorchBuild | None = None, nvml: Any = None) -> list[dict[str, Any]]:
    """A row for each device of this machine that a process may use: its GPUs, else the CPU.

    Each row has the keys kind (cuda, rocm or cpu), index, name, uuid, memory_total_bytes, memory_free_bytes,
    capability, features, driver and runtime; what does not apply is None or empty. `features` are the number
    formats with fast matrix products.

    Args:
        inventory: of this machine.
        torch: what torch is built for; by default the installed one.
        nvml: the pynvml module or a substitute; by default it is imported if installed.
    """
    build = torch or installed_torch()
    node = inventory.nodes[0]
    if node.devices:
        driver = driver_version(nvml=nvml)
        return [_gpu(device, driver if device.kind == "cuda" else None, build) for device in node.devices]
    return [
        {
            "kind": "cpu", "index": 0, "name": inventory.cpu_model, "uuid": None,
            "memory_total_bytes": node.memory_bytes, "memory_free_bytes": node.free_bytes, "capability": None,
            "features": [name for name, present in inventory.cpu_flags.items() if present], "driver": None,
            "runtime": f"torch {build.version}" if build.version else None,
        }
    ]  # fmt: skip


def _gpu(device: Device, driver: str | None, build: TorchBuild) -> dict[str, Any]:
    is_amd = device.kind != "cuda" or (build.hip is not None and build.cuda is None)
    runtime = f"ROCm {build.hip}" if is_amd else f"CUDA {build.cuda}"
    return {
        "kind": "rocm" if is_amd else "cuda", "index": device.index, "name": device.name, "uuid": device.uuid,
        "memory_total_bytes": device.memory_bytes, "memory_free_bytes": device.free_bytes,
        "capability": None if device.capability is None else list(device.capability),
        "features": fast_formats(device.capability), "driver": driver,
        "runtime": runtime if build.hip or build.cuda else None,
    }  # fmt: skip


def fast_formats(capability: tuple[int, int] | None) -> list[str]:
    """The number formats that tensor cores of this compute capability multiply fast; empty where it is unknown."""
    if capability is None:
        return []
    if capability >= BF16_CAPABILITY:
        return ["bf16", "fp16", "tf32"]
    return ["fp16"] if capability >= FP16_CAPABILITY else []


def machine_limits(inventory: Inventory, *, root: Path = ROOT) -> Mapping[str, Any]:
    """What a process on this machine may use: {cores, cores_reason, memory_total_bytes, memory_free_bytes,
    machine_memory_bytes, shared_memory_total_bytes, shared_memory_free_bytes}; None where it is unknown."""
    import shutil

    from cluster.devices.limits import machine_memory, usable_cores

    cores, why = usable_cores(root=root)
    node, shared = inventory.nodes[0], root / "dev/shm"
    usage = shutil.disk_usage(shared) if shared.is_dir() else None
    return {
        "cores": cores, "cores_reason": why, "memory_total_bytes": node.memory_bytes,
        "memory_free_bytes": node.free_bytes, "machine_memory_bytes": machine_memory(root=root),
        "shared_memory_total_bytes": usage and usage.total, "shared_memory_free_bytes": usage and usage.free,
    }  # fmt: skip
