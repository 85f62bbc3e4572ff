"""What compiling needs, cuDNN's search, and the platform: each with the machine faked."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab import MOE, make_session, token_rows, train

from cluster.devices.inventory import TorchBuild, local_inventory, missing_for_compile
from experts import grouped
from experts import grouped as grouped_check
from raytrain.accelerator import platform
from raytrain.train.device import SHAPES_AT_MOST, CudnnBenchmark


@pytest.fixture(autouse=True)
def flag_back() -> Iterator[None]:
    before = torch.backends.cudnn.benchmark
    yield
    torch.backends.cudnn.benchmark = before


def tool(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.covers("COMP-06")
def test_a_torch_before_2_cannot_compile_and_newer_ones_can(tmp_path: Path) -> None:
    tool(tmp_path, "g++")
    found = {"PATH": str(tmp_path)}
    why = missing_for_compile("cpu", torch_version="1.13.1", environ=found)
    assert why is not None and "1.13.1" in why and "2.0" in why
    for version in ("2.0.0", "2.13.0+cpu", "3.1.0"):
        assert missing_for_compile("cpu", torch_version=version, environ=found) is None


def test_a_cpu_needs_a_cpp_compiler(tmp_path: Path) -> None:
    empty = {"PATH": str(tmp_path)}
    assert "g++" in str(missing_for_compile("cpu", environ=empty))
    assert "clang++-99" in str(missing_for_compile("cpu", environ={**empty, "CXX": "clang++-99"}))
    own = tool(tmp_path, "my-c++")
    assert missing_for_compile("cpu", environ={"PATH": "", "CXX": str(own)}) is None


def test_a_gpu_needs_triton_and_a_c_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = {"PATH": str(tmp_path)}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton" in str(missing_for_compile("cuda", environ=empty))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    assert "CC" in str(missing_for_compile("cuda", environ=empty))
    tool(tmp_path, "clang")
    assert missing_for_compile("cuda", environ=empty) is None


def batches(*rows: int) -> list[dict[str, Any]]:
    return [{"x": torch.zeros(n, 3), "labels": torch.zeros(n), "note": "no tensor"} for n in rows]


@pytest.mark.covers("DEV-13", "BP-10")
def test_cudnn_searches_on_a_gpu_until_there_are_too_many_shapes() -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    benchmark = CudnnBenchmark("auto", device=gpu, deterministic=False)
    assert torch.backends.cudnn.benchmark is True
    for batch in batches(*range(1, SHAPES_AT_MOST + 1)) * 2:
        assert benchmark.observe(batch) is None
    (batch,) = batches(SHAPES_AT_MOST + 1)
    event = benchmark.observe(batch)
    assert event is not None and event["shapes"] == SHAPES_AT_MOST + 1 and not event["value"]
    assert torch.backends.cudnn.benchmark is False
    assert benchmark.observe(batch) is None, "told once"
    for asked, device, deterministic, on in (
        ("auto", cpu, False, False), ("auto", gpu, True, False), (True, cpu, False, True), (False, gpu, False, False),
    ):  # fmt: skip
        CudnnBenchmark(asked, device=device, deterministic=deterministic)
        assert torch.backends.cudnn.benchmark is on
    asked_for = CudnnBenchmark(True, device=gpu, deterministic=False)
    for batch in batches(*range(1, 2 * SHAPES_AT_MOST)):
        assert asked_for.observe(batch) is None
    assert torch.backends.cudnn.benchmark, "true stays on"


def test_rocm_and_cuda_are_distinguished_by_the_version_only() -> None:
    rocm = platform(SimpleNamespace(hip="6.4.1", cuda=None))
    cuda = platform(SimpleNamespace(hip=None, cuda="12.8"))
    assert (rocm.name, rocm.version, rocm.collectives, rocm.convolutions) == ("rocm", "6.4.1", "RCCL", "MIOpen")
    assert (cuda.name, cuda.version, cuda.collectives, cuda.convolutions) == ("cuda", "12.8", "NCCL", "cuDNN")
    assert platform(SimpleNamespace(cuda=None)).name == "cpu"


def kfd(root: Path, *nodes: dict[str, int]) -> None:
    """AMD's kernel driver with these nodes."""
    for number, facts in enumerate(nodes):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{number}"
        (folder / "mem_banks/0").mkdir(parents=True)
        size = facts.pop("bytes", 0)
        (folder / "properties").write_text("".join(f"{name} {value}\n" for name, value in facts.items()))
        (folder / "mem_banks/0/properties").write_text(f"heap_type 1\nsize_in_bytes {size}\n")


@pytest.mark.covers("DEV-17")
def test_both_makers_are_found_without_a_vendors_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's devices stand under /sys; torch calls them cuda, and only its version says that it is ROCm."""
    strix = {"simd_count": 80, "gfx_target_version": 110501, "unique_id": 0, "bytes": 96 << 30}
    rdna = {"simd_count": 96, "gfx_target_version": 110000, "unique_id": 0xABC, "bytes": 24 << 30}
    kfd(tmp_path, {"simd_count": 0, "cpu_cores_count": 16}, strix, rdna)
    monkeypatch.setenv("PATH", "")
    both = local_inventory(environ={}, root=tmp_path, nvml=NoDriver, torch=TorchBuild()).devices()
    assert [(d.kind, d.name, d.memory_bytes >> 30, d.index) for d in both] == [
        ("cuda", "AMD gfx1151", 96, 0), ("cuda", "AMD gfx1100", 24, 1),
    ]  # fmt: skip
    for variable in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        (one,) = local_inventory(environ={variable: "1"}, root=tmp_path, nvml=NoDriver, torch=TorchBuild()).devices()
        assert (one.name, one.index) == ("AMD gfx1100", 0)
    assert (
        local_inventory(environ={"HIP_VISIBLE_DEVICES": ""}, root=tmp_path, nvml=NoDriver, torch=TorchBuild()).devices()
        == []
    )
    for fake, name in ((SimpleNamespace(hip="6.4", cuda=None), "rocm"), (SimpleNamespace(hip=None, cuda="13"), "cuda")):
        assert platform(fake).name == name


class NoDriver:
    """pynvml on a machine without NVIDIA's driver."""

    class NVMLError(Exception):
        """What it raises."""

    @staticmethod
    def nvmlInit() -> None:
        raise NoDriver.NVMLError("no driver")


def test_a_kernel_that_is_wrong_on_this_device_is_an_event_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rows were on a GPU whose grouped product is wrong: the experts compute in a loop, with equal losses."""
    data, experts = {"train": token_rows(32), "eval_fraction": 0.0}, {"num_experts": 4, "top_k": 2}
    expected, _ = train(make_session(MOE, data, loop={"max_steps": 2}, experts=experts))
    monkeypatch.setattr(grouped, "_can_group", lambda *_of: True)
    monkeypatch.setattr(grouped_check, "_VERDICTS", {})
    right = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda *given, **named: 2 * right(*given, **named))
    session = make_session(MOE, data, loop={"max_steps": 2}, experts=experts)
    session.prepare("fp32")
    assert len(grouped_check._VERDICTS) == 2, "compared before anything is measured"
    rows, _ = train(session)
    found = [row for row in rows.events if row["kind"] == "fallback"]
    assert len(found) == 2 and "in a loop instead of as a grouped product" in found[0]["reason"]
    assert rows.losses == expected.losses and len(rows.losses) > 0
