"""AMD devices, as listed by the kernel driver under /sys, without vendor tools.

PyTorch on ROCm calls these devices `cuda`, so that is their kind here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cluster.devices.nvidia import Device, FoundDevices, select_visible

NODES = "sys/class/kfd/kfd/topology/nodes"
VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""HIP uses the first of these that is set, after `ROCR_VISIBLE_DEVICES` has been applied."""
VIDEO_MEMORY = (1, 2)
"""Heap types of device memory: visible to the host, and not visible to it."""


def amd_devices(environ: Mapping[str, str], *, root: Path) -> FoundDevices:
    """The devices that HIP shows to a process with this environment; none without the driver.

    Args:
        root: the directory to use as ``/``.
    """
    found: list[Device] = []
    for folder in sorted((root / NODES).glob("*"), key=lambda path: (len(path.name), path.name)):
        facts = _facts(folder / "properties")
        if not facts.get("simd_count"):  # a CPU
            continue
        target = facts.get("gfx_target_version", 0)
        name = f"AMD gfx{target // 10000}{target // 100 % 100:x}{target % 100:x}"
        banks = [_facts(path) for path in sorted(folder.glob("mem_banks/*/properties"))]
        size = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in VIDEO_MEMORY)
        unique = facts.get("unique_id", 0)
        uuid = f"GPU-{unique:016x}" if unique else None
        found.append(Device("cuda", name, size, capability=None, uuid=uuid, index=len(found)))
    problems: list[str] = []
    for variable in ("ROCR_VISIBLE_DEVICES", next((name for name in VISIBLE if name in environ), "")):
        if variable in environ and found:
            chosen, problem = select_visible(environ[variable], [device.uuid or "" for device in found])
            problems += [f"{variable}={environ[variable]!r}: {problem}"] if problem else []
            found = [replace(found[index], index=place) for place, index in enumerate(chosen)]
    return FoundDevices(found, list(problems), problems)


def _facts(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    if not path.is_file():
        return {}
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
