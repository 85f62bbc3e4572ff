"""Memory and CPU use of this process and machine, read from /proc. Starts no threads."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.devices.limits import ROOT, memory_bytes


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of this process: currently resident, and the peak since the start or the last `reset_peak`."""

    rss: int
    peak: int


def process_memory(*, root: Path = ROOT) -> MemoryUse:
    """Host memory of this process from /proc/self/status; zeros if there is no such file.

    Device memory is not included.
    """
    fields: dict[str, int] = {}
    try:
        lines = (root / "proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return MemoryUse(rss=0, peak=0)
    for line in lines:
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            fields[name] = int(value.split()[0]) * 1024
    rss = fields.get("VmRSS", 0)
    return MemoryUse(rss=rss, peak=max(rss, fields.get("VmHWM", 0)))


def reset_peak(*, root: Path = ROOT) -> bool:
    """Resets the peak to the current value; False if the kernel does not allow it."""
    try:
        (root / "proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


class CpuMeter:
    """CPU time of this process between two calls, in percent of one core: 200 means two busy cores.

    The first call of `percent` measures from the creation of the meter.
    """

    def __init__(self) -> None:
        self._wall, self._cpu = time.monotonic(), _cpu_seconds()

    def percent(self) -> float:
        """Percent since the last call; 0 if no time has passed."""
        wall, cpu = time.monotonic(), _cpu_seconds()
        spent, passed = cpu - self._cpu, wall - self._wall
        self._wall, self._cpu = wall, cpu
        return 100.0 * spent / passed if passed > 0 else 0.0


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def system_sample(*, root: Path = ROOT) -> dict[str, float]:
    """One sample of this machine: one-minute load average, and total and free bytes that this process may use."""
    total, free = memory_bytes(root=root)
    return {"load": os.getloadavg()[0], "memory_bytes": total, "free_bytes": free}
