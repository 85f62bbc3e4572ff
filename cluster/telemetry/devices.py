"""One device at one moment, with the same keys for a CPU and for the GPUs of NVIDIA and AMD.

Utilisation, memory, temperature, clock and power; read by the sampler, several times a minute.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.devices.gpus import Device, amd_devices, import_nvml, visible_devices
from cluster.devices.limits import ROOT, cpu_description, memory_bytes, text_of

# ---------------------------------------------------------------- device


@dataclass(frozen=True)
class DeviceSample:
    """What a device does at the moment. A figure that cannot be read is None, and `unavailable` says why.

    Attributes:
        kind: "cpu" or "cuda" (as torch calls AMD's devices too).
        index: as torch counts the visible devices; 0 for the CPU.
        utilisation: percent of the time since the last sample; of a CPU, of all usable cores.
        memory_total, memory_used: bytes; of a CPU the machine's memory, or its cgroup's limit.
        memory_run: bytes of `memory_used` that the processes of the run hold.
        memory_other: the rest: other processes, and what the driver or the kernel keeps.
        temperature_c, power_w, clock_mhz, memory_clock_mhz: of the device.
        throttle: reasons for which it is slower than it could be; empty: none.
        unavailable: key -> why it is None.
    """

    kind: str
    index: int
    name: str
    uuid: str | None
    utilisation: float | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    memory_run: int | None = None
    memory_other: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle: list[str] | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """As torch names it: cpu, cuda:0."""
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


def reading(values: dict[str, Any], reasons: dict[str, str]) -> dict[str, Any]:
    """Fields of a `DeviceSample` from values that may be None, with the reason of each that is."""
    unavailable = {key: reasons.get(key, "not reported") for key, value in values.items() if value is None}
    return {**values, "unavailable": unavailable}


# ---------------------------------------------------------------- cpu

SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "x86_pkg_temp", "cpu-thermal")
"""Names of the kernel's temperature sensors of CPUs."""


class CpuReader:
    """Reads the CPU; utilisation counts from the last call, over these cores or those in the affinity mask."""

    def __init__(self, *, cores: set[int] | None = None, root: Path = ROOT) -> None:
        self._root = root
        self._cores = cores if cores is not None else os.sched_getaffinity(0)
        self._name = cpu_description(root=root)[0]
        self._before = self._busy_and_total()

    def sample(self, *, run_bytes: int) -> DeviceSample:
        """The CPU now; `run_bytes` are the resident bytes of the run's processes."""
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
        for line in text_of(self._root / "proc/stat").splitlines():
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
            if text_of(place).strip() in SENSORS
            for value in (*place.parent.glob("temp*_input"), *place.parent.glob("temp"))
            if (text := text_of(value).strip()).lstrip("-").isdigit()
        ]
        return max(found, default=None)

    def _clock(self) -> float | None:
        """Mean over the cores."""
        folder = self._root / "sys/devices/system/cpu"
        texts = [text_of(folder / f"cpu{core}/cpufreq/scaling_cur_freq").strip() for core in sorted(self._cores)]
        known = [int(text) / 1000 for text in texts if text.isdigit()]
        if not known:
            lines = text_of(self._root / "proc/cpuinfo").splitlines()
            known = [float(line.rpartition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        return statistics.fmean(known) if known else None


def shared_memory(*, root: Path = ROOT) -> tuple[int | None, int | None]:
    """(total, free) bytes of /dev/shm; None where there is none."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None, None
    return found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail


# ---------------------------------------------------------------- gpu

THROTTLE = {
    0x2: "application clocks",
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "thermal (software)",
    0x40: "thermal (hardware)",
    0x80: "power brake",
    0x100: "display clocks",
}
"""Bits of NVML's throttle reasons; 0x1 is an idle GPU, which is not slowed down."""


def open_gpus(environ: Mapping[str, str], *, root: Path = ROOT, nvml: Any = None) -> NvmlReader | AmdReader:
    """A reader of the GPUs that a process with this environment sees, in torch's order; of none where there is none."""
    nvml = import_nvml() if nvml is None else nvml
    found = visible_devices(environ, nvml=nvml)
    if found.devices:
        return NvmlReader(found.devices, nvml)
    amd = amd_devices(environ, root=root)
    return AmdReader(amd.devices, root=root, notes=[] if amd.devices else [*found.notes, *amd.notes])


class NvmlReader:
    """Reads NVIDIA's GPUs. NVML stays open; each device is found by its UUID, since NVML counts hidden devices too."""

    def __init__(self, devices: list[Device], nvml: Any) -> None:
        self.notes: list[str] = []
        self._nvml, self._devices = nvml, devices
        nvml.nvmlInit()

    def sample(self, pids: Collection[int]) -> list[DeviceSample]:
        return [self._read(device, set(pids)) for device in self._devices]

    def _read(self, device: Device, pids: set[int]) -> DeviceSample:
        nvml, reasons = self._nvml, dict[str, str]()
        graphics, memory_of, temperature = 0, 2, 0  # NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU

        def ask(key: str, read: Callable[[], Any]) -> Any:
            try:
                return read()
            except (nvml.NVMLError, AttributeError) as error:
                reasons[key] = f"NVML: {error}"
                return None

        handle = ask("memory_used", lambda: nvml.nvmlDeviceGetHandleByUUID(device.uuid))
        if handle is None:
            keys: dict[str, Any] = dict.fromkeys(_FIGURES)
            return DeviceSample("cuda", device.index, device.name, device.uuid,
                                **reading(keys, dict.fromkeys(_FIGURES, reasons["memory_used"])))  # fmt: skip
        memory = ask("memory_used", lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        used = None if memory is None else int(memory.used)
        held = self._held(ask("memory_run", lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)), pids, reasons)
        newer = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)  # NVML has renamed it
        bits = ask("throttle", lambda: int((newer or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)))
        watts = ask("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        reasons.setdefault("memory_other", reasons.get("memory_run", reasons.get("memory_used", "")))
        values = {
            "utilisation": ask("utilisation", lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            "memory_total": None if memory is None else int(memory.total),
            "memory_used": used,
            "memory_run": held,
            "memory_other": None if used is None or held is None else max(0, used - held),
            "temperature_c": ask("temperature_c", lambda: float(nvml.nvmlDeviceGetTemperature(handle, temperature))),
            "power_w": None if watts is None else watts / 1000,
            "clock_mhz": ask("clock_mhz", lambda: float(nvml.nvmlDeviceGetClockInfo(handle, graphics))),
            "memory_clock_mhz": ask("memory_clock_mhz", lambda: float(nvml.nvmlDeviceGetClockInfo(handle, memory_of))),
            "throttle": None if bits is None else [name for bit, name in THROTTLE.items() if bits & bit],
        }
        return DeviceSample("cuda", device.index, device.name, device.uuid, **reading(values, reasons))

    def _held(self, processes: Any, pids: set[int], reasons: dict[str, str]) -> int | None:
        """Bytes of the run's processes; None where NVML names processes that this process cannot recognise.

        In a container NVML shows the process ids of the host, or none.
        """
        if processes is None:
            return None
        own = [one.usedGpuMemory for one in processes if one.pid in pids]
        if any(size is None for size in own):
            reasons["memory_run"] = "the driver does not report the memory of single processes"
            return None
        if not own and processes:
            reasons["memory_run"] = "NVML lists processes by ids of another namespace (a container)"
            return None
        return sum(int(size) for size in own)


_FIGURES = (
    "utilisation", "memory_total", "memory_used", "memory_run", "memory_other", "temperature_c", "power_w", "clock_mhz",
    "memory_clock_mhz", "throttle",
)  # fmt: skip


class AmdReader:
    """Reads AMD's GPUs from the files of the kernel driver (amdgpu), which rocm-smi and amdsmi read too."""

    def __init__(self, devices: list[Device], *, root: Path = ROOT, notes: Sequence[str] = ()) -> None:
        self.notes, self._devices = list(notes), devices
        cards = sorted((root / "sys/class/drm").glob("card[0-9]*/device"), key=lambda path: (len(str(path)), str(path)))
        self._cards = [card for card in cards if (card / "mem_info_vram_total").exists()]

    def sample(self, pids: Collection[int]) -> list[DeviceSample]:
        return [self._read(device) for device in self._devices]

    def _card(self, device: Device) -> Path | None:
        """The card of this unique id; without ids, the one of the same number."""
        for card in self._cards:
            if device.uuid and f"GPU-{text_of(card / 'unique_id').strip()}" == device.uuid:
                return card
        nameless = device.uuid is None and device.index < len(self._cards)
        return self._cards[device.index] if nameless else None

    def _read(self, device: Device) -> DeviceSample:
        card = self._card(device)
        sensors = next(iter(sorted(card.glob("hwmon/hwmon*"))), None) if card else None
        used, total = _number(card, "mem_info_vram_used"), _number(card, "mem_info_vram_total")
        celsius, watts = _number(sensors, "temp1_input"), _number(sensors, "power1_average", "power1_input")
        values = {
            "utilisation": _number(card, "gpu_busy_percent"),
            "memory_total": None if total is None else int(total),
            "memory_used": None if used is None else int(used),
            "memory_run": None,
            "memory_other": None,
            "temperature_c": None if celsius is None else celsius / 1000,
            "power_w": None if watts is None else watts / 1e6,
            "clock_mhz": _active_clock(card, "pp_dpm_sclk"),
            "memory_clock_mhz": _active_clock(card, "pp_dpm_mclk"),
            "throttle": None,
        }
        none = "the amdgpu driver does not report it" if card else "the driver shows no card with this unique id"
        return DeviceSample(
            "cuda", device.index, device.name, device.uuid, **reading(values, dict.fromkeys(_FIGURES, none))
        )


def _active_clock(card: Path | None, name: str) -> float | None:
    """The line marked with a star, such as `1: 1700Mhz *`."""
    for line in text_of(card / name).splitlines() if card else ():
        if line.rstrip().endswith("*"):
            digits = "".join(one for one in line.partition(":")[2] if one.isdigit() or one == ".")
            return float(digits) if digits else None
    return None


def _number(folder: Path | None, *names: str) -> float | None:
    for name in names if folder else ():
        text = text_of(folder / name).strip()  # pyright: ignore[reportOptionalOperand]
        if text.lstrip("-").isdigit():
            return float(text)
    return None
