"""The record of a machine's devices: the same keys for every kind, and what NVML says of each GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from hardware import GIB, GPUS, Nvml, amd_driver, uuid

from cluster.devices.inventory import TorchBuild, device_facts, fast_formats, local_inventory, machine_limits

CUDA = TorchBuild("2.13.0+cu130", cuda="13.0")
ROCM = TorchBuild("2.13.0+rocm7", hip="7.0")
CPU = TorchBuild("2.13.0+cpu")
KEYS = [
    "kind", "index", "name", "uuid", "memory_total_bytes", "memory_free_bytes", "capability", "features", "driver",
    "runtime",
]  # fmt: skip


@pytest.mark.covers("DEV-05", "SRC-01")
def test_every_kind_of_device_has_the_same_keys(tmp_path: Path) -> None:
    nvml = Nvml("A100", "T4")
    inventory = local_inventory(environ={"CUDA_VISIBLE_DEVICES": "1,0"}, nvml=nvml, torch=CUDA)
    first, second = device_facts(inventory, torch=CUDA, nvml=nvml)
    none = Nvml(errors={("nvmlInit", None): "LibraryNotFound"})
    amd_driver(tmp_path, ["MI300X"])
    amd_inventory = local_inventory(environ={}, nvml=none, torch=ROCM, root=tmp_path)
    (amd,) = device_facts(amd_inventory, torch=ROCM, nvml=none)
    (cpu,) = device_facts(local_inventory(environ={}, nvml=none, torch=CPU), torch=CPU, nvml=none)
    assert all(list(row) == KEYS for row in (first, second, amd, cpu))
    assert [row["kind"] for row in (first, second, amd, cpu)] == ["cuda", "cuda", "rocm", "cpu"]
    assert (first["name"], first["uuid"], first["index"]) == (GPUS["T4"].name, uuid(1), 0), "as CUDA shows them"
    assert first["capability"] == [7, 5] and first["features"] == ["fp16"]
    assert second["features"] == ["bf16", "fp16", "tf32"] and second["runtime"] == "CUDA 13.0"
    assert first["driver"] and amd["runtime"] == "ROCm 7.0" and amd["driver"] is None
    for row, name in ((first, "T4"), (second, "A100")):
        assert row["memory_total_bytes"] == GPUS[name].memory_gib * GIB > row["memory_free_bytes"] > 0
    assert cpu["memory_total_bytes"] >= cpu["memory_free_bytes"] > 0 and cpu["runtime"] == "torch 2.13.0+cpu"


@pytest.mark.covers("DEV-11", "COMPAT-01", "COMPAT-02")
@pytest.mark.parametrize(
    ("capability", "formats"),
    [
        (None, []),
        ((6, 1), []),
        ((7, 0), ["fp16"]),
        ((7, 5), ["fp16"]),
        ((8, 0), ["bf16", "fp16", "tf32"]),
        ((9, 0), ["bf16", "fp16", "tf32"]),
        ((12, 1), ["bf16", "fp16", "tf32"]),
    ],
)
def test_fast_formats_follow_from_the_capability(capability: tuple[int, int] | None, formats: list[str]) -> None:
    assert fast_formats(capability) == formats


def test_limits_are_those_of_the_cgroup_beside_the_machines(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text(str(4 << 30))
    (group / "memory.current").write_text(str(1 << 30))
    none = Nvml(errors={("nvmlInit", None): "LibraryNotFound"})
    inventory = local_inventory(environ={}, nvml=none, torch=CPU, root=tmp_path)
    limits = machine_limits(inventory, root=tmp_path)
    assert (limits["memory_total_bytes"], limits["memory_free_bytes"]) == (4 << 30, 3 << 30)
    assert limits["machine_memory_bytes"] == 64 << 30 and limits["shared_memory_total_bytes"] is None
