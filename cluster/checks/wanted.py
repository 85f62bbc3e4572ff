"""Compares the devices with those that a job is meant for: `cluster.wanted_memory` and `cluster.wanted_capability`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cluster.checks.preflight import CheckResult
from cluster.config import ClusterConfig

#: Devices that the text names; of the others it says how many.
NAMED_AT_MOST = 4


class DeviceSize(NamedTuple):
    """What is compared of a GPU or of a node's CPU: `capability` is None on a CPU, and where nobody knows it."""

    name: str
    is_gpu: bool
    memory_bytes: int | None
    capability: tuple[int, int] | None


def check_wanted(config: ClusterConfig, devices: Iterable[DeviceSize]) -> CheckResult:
    """A warning if a device has less than the job is meant for; the job can still train there. What is not known of a
    device counts as enough."""
    memory, capability = config.wanted_memory, config.wanted_capability
    wanted = [f"{_gib(memory)} of memory"] if memory else []
    wanted += [f"compute capability {capability}"] if capability else []
    if not wanted:
        return CheckResult("wanted_devices", "na", "the job names no devices that it is meant for", "any device")
    least = None if capability is None else divmod(round(10 * capability), 10)  # 8.6 is (8, 6)
    short = [f"{one.name} has {' and '.join(less)}" for one in devices if (less := _less(one, memory, least))]
    expected = " and ".join(wanted)
    if not short:
        return CheckResult("wanted_devices", "ok", "no device has less", expected)
    named = "; ".join(short[:NAMED_AT_MOST]) + f" and {len(short) - NAMED_AT_MOST} more" * (len(short) > NAMED_AT_MOST)
    key = "cluster.wanted_memory" if memory else "cluster.wanted_capability"
    remedy = f"scale.accelerator and cluster.address choose other devices; {key} says what the job is meant for"
    return CheckResult("wanted_devices", "warn", named, expected, remedy, key)


def _less(device: DeviceSize, memory: int | None, least: tuple[int, int] | None) -> list[str]:
    """What a device has less of."""
    less = [_gib(device.memory_bytes)] if memory and device.memory_bytes and device.memory_bytes < memory else []
    if least and not device.is_gpu:
        return [*less, "no compute capability"]
    if least and device.capability is not None and device.capability < least:
        return [*less, f"compute capability {'.'.join(map(str, device.capability))}"]
    return less


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
