"""Samples of a node: this machine's own, and stand-ins for GPUs of NVIDIA and AMD."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hardware import GIB, Nvml, uuid

from cluster.telemetry.devices import AmdReader, CpuReader, NvmlReader, open_gpus
from cluster.telemetry.processes import RunProcesses
from cluster.telemetry.sampler import NodeSampler

DEVICE_KEYS = {
    "kind", "index", "name", "uuid", "utilisation", "memory_total", "memory_used", "memory_run", "memory_other",
    "temperature_c", "power_w", "clock_mhz", "memory_clock_mhz", "throttle", "unavailable",
}  # fmt: skip


class Watched(Nvml):
    """NVML with what telemetry asks for, different for each GPU, by its index in NVML."""

    def __init__(self, *gpus: str, processes: dict[int, list[tuple[int, int | None]]], **more: Any) -> None:
        super().__init__(*gpus, **more)
        self.processes = processes

    def nvmlDeviceGetHandleByUUID(self, name: str) -> tuple[int, None]:
        return next(index for index in range(len(self.gpus)) if uuid(index) == name), None

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[int, None]) -> Any:
        found = super().nvmlDeviceGetMemoryInfo(handle)
        return SimpleNamespace(total=found.total, free=found.free - handle[0] * GIB, used=(1 + handle[0]) * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: tuple[int, None]) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes.get(handle[0], [])]

    def nvmlDeviceGetUtilizationRates(self, handle: tuple[int, None]) -> Any:
        return SimpleNamespace(gpu=10 * handle[0])

    def nvmlDeviceGetTemperature(self, handle: tuple[int, None], sensor: int) -> int:
        assert sensor == 0
        return 40 + handle[0]

    def nvmlDeviceGetPowerUsage(self, handle: tuple[int, None]) -> int:
        self._may_fail("nvmlDeviceGetPowerUsage", handle[0])
        return 1000 * (100 + handle[0])

    def nvmlDeviceGetClockInfo(self, handle: tuple[int, None], kind: int) -> int:
        return {0: 1500, 2: 2600}[kind] + handle[0]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: tuple[int, None]) -> int:
        return (0x1, 0x4, 0x40, 0x44)[handle[0]]


@pytest.mark.covers("MON-04")
def test_a_gpu_is_found_by_its_uuid_whatever_its_place_among_the_visible_ones() -> None:
    nvml = Watched("T4", "A100", "H100", "B200", processes={3: [(7, 5 * GIB // 2), (99, GIB)], 1: []})
    reader = open_gpus({"CUDA_VISIBLE_DEVICES": "3,1"}, nvml=nvml)
    assert isinstance(reader, NvmlReader) and nvml.open == 1
    first, second = reader.sample([7])
    assert (first.index, first.uuid, first.name) == (0, uuid(3), "NVIDIA B200")
    assert (first.utilisation, first.temperature_c, first.power_w) == (30.0, 43.0, 103.0)
    assert (first.clock_mhz, first.memory_clock_mhz) == (1503.0, 2603.0)
    assert first.throttle == ["power cap", "thermal (hardware)"]
    assert (first.memory_total, first.memory_used) == (180 * GIB, 4 * GIB)
    assert (first.memory_run, first.memory_other) == (5 * GIB // 2, 3 * GIB // 2)
    assert (second.index, second.uuid, second.memory_run, second.memory_other) == (1, uuid(1), 0, 2 * GIB)
    assert set(asdict(first)) == DEVICE_KEYS


@pytest.mark.covers("MON-03")
def test_what_cannot_be_read_is_none_with_the_reason_and_hides_nothing_else() -> None:
    failing = {("nvmlDeviceGetPowerUsage", 0): "NotSupported"}
    nvml = Watched("T4", processes={0: [(4_000_000, GIB)]}, errors=failing)
    (gpu,) = open_gpus({}, nvml=nvml).sample([7])
    assert gpu.power_w is None and gpu.unavailable["power_w"] == "NVML: NotSupported"
    assert gpu.memory_run is None and "another namespace" in gpu.unavailable["memory_run"]
    assert gpu.temperature_c == 40.0 and set(gpu.unavailable) == {"power_w", "memory_run", "memory_other"}
    none = open_gpus({}, nvml=Nvml(errors={("nvmlInit", None): "LibraryNotFound"}), root=Path("/nowhere"))
    assert none.sample([]) == [] and "no NVIDIA GPU" in none.notes[0]


def test_an_amd_gpu_is_read_from_the_card_with_its_unique_id(tmp_path: Path) -> None:
    for place, number in enumerate((0xA, 0xB)):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{place}"
        (node / "mem_banks/0").mkdir(parents=True)
        facts = f"simd_count 304\ngfx_target_version 90402\nunique_id {number}\n"
        (node / "properties").write_text(facts)
        (node / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {192 * GIB}\n")
    for card, number, busy in ((0, 0xB, 71), (1, 0xA, 12)):
        folder = tmp_path / f"sys/class/drm/card{card}/device"
        (folder / "hwmon/hwmon3").mkdir(parents=True)
        files = {
            "unique_id": f"{number:016x}", "gpu_busy_percent": busy, "mem_info_vram_total": 192 * GIB,
            "mem_info_vram_used": busy * GIB, "pp_dpm_sclk": "0: 500Mhz\n1: 1700Mhz *", "pp_dpm_mclk": "0: 900Mhz *",
            "hwmon/hwmon3/temp1_input": 1000 * busy, "hwmon/hwmon3/power1_average": 310_000_000,
        }  # fmt: skip
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")
    reader = open_gpus({}, root=tmp_path, nvml=Nvml())
    assert isinstance(reader, AmdReader)
    first, second = reader.sample([])
    assert (first.utilisation, first.memory_used, first.temperature_c) == (12.0, 12 * GIB, 12.0)
    assert (second.utilisation, second.power_w, second.clock_mhz, second.memory_clock_mhz) == (
        71.0,
        310.0,
        1700.0,
        900.0,
    )
    assert set(asdict(second)) == DEVICE_KEYS and set(second.unavailable) == {"memory_run", "memory_other", "throttle"}


def test_the_cpu_counts_the_ticks_of_the_usable_cores_and_reads_its_sensors(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    stat = tmp_path / "proc/stat"
    stat.write_text("cpu 9 9 9 9 9 9 9 9\ncpu0 10 0 10 80 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\n")
    sensor = tmp_path / "sys/class/hwmon/hwmon1"
    sensor.mkdir(parents=True)
    (sensor / "name").write_text("k10temp\n")
    (sensor / "temp1_input").write_text("61500\n")
    reader = CpuReader(cores={0}, root=tmp_path)
    stat.write_text("cpu 9 9 9 9 9 9 9 9\ncpu0 40 0 10 140 10 0 0 0\ncpu1 900 0 0 0 0 0 0 0\n")
    sample = reader.sample(run_bytes=5)
    assert sample.utilisation == pytest.approx(30.0) and sample.temperature_c == 61.5
    assert reader.sample(run_bytes=5).utilisation is None, "no tick has passed"
    assert set(asdict(sample)) == DEVICE_KEYS


@pytest.mark.covers("MEM-02", "MON-12")
def test_this_process_and_its_children_are_the_run_and_their_memory_is_of_this_machine() -> None:
    """MEM-02: a second process that allocates 500 MB is seen, free and used add up to the total."""
    sampler = NodeSampler("n", environ={})
    before = sampler.sample()
    script = "import sys; held = bytearray(b'x') * 500_000_000; print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        after = sampler.sample()
    finally:
        child.communicate()
    row = next(one for one in after["processes"] if one["pid"] == child.pid)
    assert 500_000_000 < row["anonymous"] <= row["rss"] < 600_000_000 and script[:20] in row["name"]
    assert child.pid not in [one["pid"] for one in before["processes"]]
    cpu = after["devices"][0]
    assert cpu["memory_run"] == sum(one["rss"] for one in after["processes"])
    assert (
        cpu["memory_other"] == max(0, cpu["memory_used"] - cpu["memory_run"])
        and cpu["memory_used"] < cpu["memory_total"]
    )
    assert cpu["device"] == "cpu" and set(cpu) == DEVICE_KEYS | {"device"}
    assert json.loads(json.dumps(after)) == after and after["shm_free"] <= after["shm_total"]
    assert [one["cpu_percent"] for one in before["processes"]] == [None] * len(before["processes"])


def test_the_cpu_time_of_a_process_is_that_since_the_last_sample() -> None:
    now = [100.0]
    processes = RunProcesses(clock=lambda: now[0])
    processes.sample()
    begin = time.process_time()
    while time.process_time() - begin < 0.3:
        pass
    now[0] = 101.0
    used = next(one.cpu_percent for one in processes.sample() if one.pid == os.getpid())
    assert used is not None and 20 < used < 45 + 100 * (time.process_time() - begin - 0.3)
