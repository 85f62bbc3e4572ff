"""The CPU of this machine as a device: utilisation, memory, temperature and clock from /proc and /sys."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

from cluster.devices.limits import ROOT, cpu_description, memory_bytes
from cluster.telemetry.device import DeviceSample, reading

SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "x86_pkg_temp", "cpu-thermal")
"""Names of the kernel's temperature sensors of CPUs."""


class CpuReader:
    """Reads the CPU; utilisation counts from the last call.

    Args:
        cores: the cores to count; by default those in this process's affinity mask.
        root: the directory to use as ``/``.
    """

    def __init__(self, *, cores: set[int] | None = None, root: Path = ROOT) -> None:
        self._root = root
        self._cores = cores if cores is not None else os.sched_getaffinity(0)
        self._name = cpu_description(root=root)[0]
        self._before = self._busy_and_total()

    def sample(self, *, run_bytes: int) -> DeviceSample:
        """The CPU now.

        Args:
            run_bytes: resident bytes of the run's processes.
        """
        total, free = memory_bytes(root=self._root)
        used = total - free
        before, self._before = self._before, self._busy_and_total()
        spent = self._before[1] - before[1]
        values = {
            "utilisation": 100 * (self._before[0] - before[0]) / spent if spent > 0 else None,
            "memory_total": total or None,
            "memory_used": used if total else None,
            "memory_run": run_bytes,
            "memory_other": max(0, used - run_bytes) if total else None,
            "temperature_c": self._temperature(),
            "power_w": None,
            "clock_mhz": self._clock(),
            "memory_clock_mhz": None,
            "throttle": None,
        }
        none = "the kernel does not report it for a CPU"
        reasons = {
            "utilisation": "no time has passed since the last sample",
            "temperature_c": "the machine shows no temperature sensor of its CPU",
            "clock_mhz": "/proc/cpuinfo and /sys do not name it",
            "power_w": none,
            "memory_clock_mhz": none,
            "throttle": none,
        }
        return DeviceSample("cpu", 0, self._name, None, **reading(values, reasons))

    def _busy_and_total(self) -> tuple[int, int]:
        """Clock ticks of the cores: (spent working, all)."""
        busy = whole = 0
        for line in _text(self._root / "proc/stat").splitlines():
            name, *ticks = line.split() or [""]
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self._cores:
                counts = [int(one) for one in ticks[:8]]  # guest time is contained in user time
                whole += sum(counts)
                busy += sum(counts) - counts[3] - counts[4]  # idle, and waiting for a disk
        return busy, whole

    def _temperature(self) -> float | None:
        """Of the hottest CPU sensor."""
        sensors = self._root / "sys/class"
        places = [*sensors.glob("hwmon/hwmon*/name"), *sensors.glob("thermal/*/type")]
        found = [
            int(text) / 1000
            for place in places
            if _text(place).strip() in SENSORS
            for value in (*place.parent.glob("temp*_input"), *place.parent.glob("temp"))
            if (text := _text(value).strip()).lstrip("-").isdigit()
        ]
        return max(found, default=None)

    def _clock(self) -> float | None:
        """Mean over the cores."""
        folder = self._root / "sys/devices/system/cpu"
        texts = [_text(folder / f"cpu{core}/cpufreq/scaling_cur_freq").strip() for core in sorted(self._cores)]
        known = [int(text) / 1000 for text in texts if text.isdigit()]
        if not known:
            lines = _text(self._root / "proc/cpuinfo").splitlines()
            known = [float(line.rpartition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        return statistics.fmean(known) if known else None


def shared_memory(*, root: Path = ROOT) -> tuple[int | None, int | None]:
    """(total, free) bytes of /dev/shm; None where there is none."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None, None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
