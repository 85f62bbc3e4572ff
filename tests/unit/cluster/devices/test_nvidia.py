"""GPUs as NVML shows them, and as CUDA shows them to a process: none hides another, and MIG devices are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hardware import GIB, GPUS, MIG_SLICE, Nvml, amd_driver, mig_uuid, uuid

from cluster.config import ClusterConfig
from cluster.devices.gpus import narrow_visible, visible_devices
from cluster.devices.inventory import Inventory, TorchBuild, installed_torch, local_inventory
from cluster.preflight import check_visible_devices
from jobs.checks.node import check_devices
from raytrain.config.sections import PrecisionConfig, ScaleConfig
from raytrain.plan.machines import allowed_bytes, choose_devices, choose_precision

CUDA = TorchBuild("2.13.0+cu130", cuda="13.0")
ROCM = TorchBuild("2.13.0+rocm7", hip="7.0")


def found(nvml: Nvml, text: str | None = None, *, torch: TorchBuild = CUDA, **options: Any) -> Inventory:
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    return local_inventory(environ=environ, nvml=nvml, torch=torch, **options)


@pytest.mark.parametrize("name", [name for name, gpu in GPUS.items() if not gpu.rocm])
def test_each_type_of_gpu_is_found_with_its_memory_and_capability(name: str) -> None:
    inventory = found(Nvml(name, name))
    first, second = inventory.devices()
    assert (first.name, first.capability, second.index) == (GPUS[name].name, GPUS[name].capability, 1)
    assert inventory.unusable == ()
    if GPUS[name].unified:
        (node,) = inventory.nodes
        assert (first.memory_bytes, first.free_bytes) == (node.memory_bytes, node.free_bytes)
    else:
        assert first.memory_bytes == GPUS[name].memory_gib * GIB


@pytest.mark.parametrize(
    ("name", "formats"),
    [("T4", ("fp16", "fp32")), ("A100", ("bf16", "fp32")), ("H100", ("bf16", "fp32")), ("B200", ("bf16", "fp32")),
     ("RTX", ("bf16", "fp32")), ("GB10", ("bf16", "fp32")), ("Orin", ("bf16", "fp32")), ("MI300X", ("bf16", "fp32"))],
)  # fmt: skip
def test_a_plan_knows_what_each_type_of_gpu_computes_in_and_how_much_it_holds(
    tmp_path: Path, name: str, formats: tuple[str, ...]
) -> None:
    if GPUS[name].rocm:
        amd_driver(tmp_path, [name])
        inventory = found(Nvml(errors={("nvmlInit", None): "LibraryNotFound"}), torch=ROCM, root=tmp_path)
    else:
        inventory = found(Nvml(name))
    warnings: list[str] = []
    machines = choose_devices(ScaleConfig(), inventory, warnings)
    assert machines.mode.value == "single_gpu" and warnings == []
    assert choose_precision(PrecisionConfig(), machines, inventory, warnings).candidates == formats
    room = allowed_bytes(ClusterConfig(memory_fraction=0.5), machines, inventory, workers=1)
    (node,) = inventory.nodes
    if GPUS[name].unified:
        assert room == (node.free_bytes or 0) // 2
    else:
        free = GPUS[name].memory_gib - (0 if GPUS[name].rocm else 1)
        assert room == free * GIB // 2


def test_amds_gpus_are_found_by_their_kernel_driver(tmp_path: Path) -> None:
    amd_driver(tmp_path, ["MI300X", "MI300X"])
    nvml = Nvml(errors={("nvmlInit", None): "LibraryNotFound"})
    inventory = found(nvml, torch=ROCM, root=tmp_path)
    assert [(one.name, one.memory_bytes // GIB) for one in inventory.devices()] == [("AMD gfx942", 192)] * 2
    assert inventory.unusable == ()
    assert [one.index for one in found(nvml, "1", torch=ROCM, root=tmp_path).devices()] == [0]
    wrong = found(nvml, "7", torch=ROCM, root=tmp_path)
    assert wrong.devices() == [] and "no device '7'" in wrong.unusable[0]


@pytest.mark.covers("TRB-29")
@pytest.mark.parametrize("error", ["GpuIsLost", "Unknown"])
def test_a_gpu_that_cannot_be_read_does_not_hide_the_others(error: str) -> None:
    nvml = Nvml("A100", "A100", "A100", errors={("nvmlDeviceGetHandleByIndex", 1): error})
    inventory = found(nvml)
    assert [one.uuid for one in inventory.devices()] == [uuid(0), uuid(2)]
    assert inventory.unusable == (f"GPU 1 cannot be read: {error}",)
    checked = check_devices(inventory.unusable, inventory.describe())  # of `raytrain check`
    assert (checked.status, checked.seen) == ("fail", f"GPU 1 cannot be read: {error}")
    complete = found(Nvml("A100", "A100", "A100"))
    checked = check_devices(complete.unusable, complete.describe())
    assert checked.status == "ok" and [f"cuda:{n} " in checked.seen for n in range(4)] == [True, True, True, False]
    assert [one.uuid for one in found(nvml, "2,1").devices()] == [uuid(2)]
    assert nvml.open == 0


@pytest.mark.parametrize("what", ["MemoryInfo", "Name", "UUID", "CudaComputeCapability"])
def test_what_nvml_does_not_know_of_a_gpu_is_unknown_and_the_gpu_is_used(what: str) -> None:
    inventory = found(Nvml("H100", "H100", errors={(f"nvmlDeviceGet{what}", 0): "Unknown"}))
    assert [one.index for one in inventory.devices()] == [0, 1] and inventory.unusable == ()


@pytest.mark.parametrize("error", ["nvmlDeviceGetCount", "nvmlInit"])
def test_an_nvml_that_is_there_and_fails_is_named(error: str) -> None:
    inventory = found(Nvml("A100", errors={(error, None): "LibRmVersionMismatch"}))
    assert inventory.devices() == [] and "LibRmVersionMismatch" in inventory.unusable[0]


def test_without_a_driver_nothing_is_unusable() -> None:
    assert found(Nvml(errors={("nvmlInit", None): "LibraryNotFound"})).unusable == ()
    assert found(Nvml("A100"), "").unusable == () and found(Nvml("A100"), "").devices() == []


MIG_0 = {0: 3}


@pytest.mark.parametrize(
    ("mig", "text", "chosen"),
    [
        ({}, mig_uuid(0, 1), None),
        (MIG_0, None, mig_uuid(0, 0)),
        (MIG_0, "0", mig_uuid(0, 0)),
        (MIG_0, mig_uuid(0, 2), mig_uuid(0, 2)),
        (MIG_0, mig_uuid(0, 2)[:14], mig_uuid(0, 2)),
        (MIG_0, f"{mig_uuid(0, 1)},{mig_uuid(0, 2)}", mig_uuid(0, 1)),
        (MIG_0, f"1,{mig_uuid(0, 1)}", mig_uuid(0, 1)),
        (MIG_0, "1", uuid(1)),
        ({1: 2}, None, mig_uuid(1, 0)),
    ],
)
def test_cuda_shows_one_mig_device(mig: dict[int, int], text: str | None, chosen: str | None) -> None:
    inventory = found(Nvml("A100", "A100", mig=mig), text)
    assert [one.uuid for one in inventory.devices()] == ([] if chosen is None else [chosen])
    for device in inventory.devices():
        part = chosen is not None and chosen.startswith("MIG-")
        assert device.index == 0 and device.capability == (8, 0)
        assert device.memory_bytes == (10 if part else 80) * GIB and device.name.endswith(MIG_SLICE) == part
        if part:
            assert narrow_visible({} if text is None else {"CUDA_VISIBLE_DEVICES": text}, [device]) == chosen
    assert bool(inventory.unusable) == (chosen is None), inventory.unusable


def test_the_mig_devices_that_cuda_hides_are_named() -> None:
    notes = " ".join(visible_devices({}, nvml=Nvml("A100", "A100", mig=MIG_0)).notes)
    assert mig_uuid(0, 1) in notes and "GPU 1 (NVIDIA A100" in notes and "picks another" in notes
    unusable = found(Nvml("A100", mig={0: 0})).unusable
    assert unusable == ("GPU 0 (NVIDIA A100-SXM4-80GB): MIG is on, and it has no MIG devices",)


def test_the_check_of_the_variable_knows_mig_devices() -> None:
    nvml = Nvml("A100", mig=MIG_0)
    assert check_visible_devices(environ={"CUDA_VISIBLE_DEVICES": mig_uuid(0, 1)}, nvml=nvml).status == "ok"
    unknown = check_visible_devices(environ={"CUDA_VISIBLE_DEVICES": mig_uuid(5, 1)}, nvml=nvml)
    assert unknown.status == "warn" and mig_uuid(5, 1) in unknown.seen


@pytest.mark.covers("TRB-28")
@pytest.mark.parametrize(
    ("build", "cuda", "problem"),
    [
        (TorchBuild("2.13.0+cpu"), 13000, "torch 2.13.0+cpu is built for CPUs only"),
        (ROCM, 13000, "is built for ROCm only"),
        (CUDA, 12080, "needs CUDA 13.0, the driver supports 12.8"),
        (CUDA, 13000, ""), (TorchBuild("2.13.0+cu128", cuda="12.8"), 12020, ""), (TorchBuild(), 12020, ""),
    ],
)  # fmt: skip
def test_gpus_that_the_installed_torch_cannot_use_are_no_devices(build: TorchBuild, cuda: int, problem: str) -> None:
    inventory = found(Nvml("T4", cuda=cuda), torch=build)
    assert len(inventory.devices()) == (0 if problem else 1)
    assert problem in " ".join(inventory.unusable) and bool(problem) == bool(inventory.unusable)
    checked = check_devices(inventory.unusable, inventory.describe())  # of `raytrain check`
    assert (checked.status == "fail") == bool(problem) and problem in checked.seen


def test_the_build_of_the_installed_torch_is_read_without_importing_it(tmp_path: Path) -> None:
    import torch

    found = installed_torch()
    assert (found.version, found.cuda, found.hip) == (torch.__version__, torch.version.cuda, torch.version.hip)
    text = "__version__ = '2.12.0+cu126'\ncuda: Optional[str] = '12.6'\nhip: Optional[str] = None\n"
    (tmp_path / "version.py").write_text(text)
    assert installed_torch(tmp_path / "version.py") == TorchBuild("2.12.0+cu126", cuda="12.6")
    assert installed_torch(tmp_path / "missing.py") == TorchBuild()
