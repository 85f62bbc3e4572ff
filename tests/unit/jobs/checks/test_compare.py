"""The checks that compare nodes and devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from jobs.checks.node import (
    DeviceRates,
    NodeReport,
    check_clocks,
    check_monitoring,
    check_platform,
    check_rates,
    check_repeatable,
    check_versions,
)
from jobs.checks.node import watched_bytes as measure_watched

GOOD = {"raytrain": "0.1.0", "torch": "2.13.0+cpu", "ray": "2.60.0"}


def node(
    *, python: str = "3.11.7", runtime: str | None = None, kind: str = "cuda", **versions: str | None
) -> NodeReport:  # fmt: skip
    devices: list[dict[str, Any]] = [{"kind": kind if runtime else "cpu", "runtime": runtime}]
    return NodeReport("a", {"python": python, "versions": {**GOOD, **versions}}, {}, devices, [])


def rates(flops: float = 100.0, *, name: str = "A100", device: str = "cuda:0", **other: Any) -> DeviceRates:
    values: dict[str, Any] = {"repeatable": {"bf16": True}, "memory_bytes_per_s": 1e12, "copy_bytes_per_s": 2e10}
    return DeviceRates(device, name, {"bf16": flops * 1e12}, cudnn=9, **{**values, **other})


def statuses(reports: Mapping[str, NodeReport]) -> dict[str, str]:
    return {result.name: result.status for result in check_versions(reports)}


@pytest.mark.covers("COMPAT-03", "TRB-31")
def test_versions_are_new_enough_and_the_same() -> None:
    assert set(statuses({"a": node(), "b": node()}).values()) == {"ok"}
    assert statuses({"a": node(torch="2.8.1")}) == {"python": "ok", "torch": "fail", "ray": "ok"}
    assert statuses({"a": node(python="3.10.2")})["python"] == "fail"
    assert statuses({"a": node(ray=None)})["ray"] == "fail"
    (torch,) = [r for r in check_versions({"a": node(), "b": node(torch="2.14.0")}) if r.name == "torch"]
    assert torch.status == "fail" and torch.seen == "2.13.0+cpu on a; 2.14.0 on b"
    (old,) = [r for r in check_versions({"a": node(), "b": node(ray="2.9.3")}) if r.name == "ray"]
    assert "2.60 or newer" in old.expected and "on b" in old.remedy and "on a" not in old.remedy


@pytest.mark.covers("COMPAT-04", "TRB-35")
@pytest.mark.parametrize(
    ("runtime", "status"),
    [("CUDA 13.0", "ok"), ("CUDA 11.8", "ok"), ("CUDA 11.7", "fail"), ("ROCm 6.2", "ok"), ("ROCm 6.1", "fail"),
     (None, "na")],
)  # fmt: skip
def test_the_platform_of_the_gpus_is_new_enough(runtime: str | None, status: str) -> None:
    result = check_platform({"a": node(runtime=runtime)})
    assert result.status == status
    assert (runtime or "raytrain trains on the CPU") in result.seen


@pytest.mark.parametrize(("said", "status"), [(10.2, "ok"), (8.9, "warn"), (12.1, "warn"), (9.2, "ok"), (11.9, "ok")])
def test_a_clock_outside_the_time_of_the_question_is_wrong(said: float, status: str) -> None:
    result = check_clocks({"a": (20.0, 20.4, 20.5), "b": (10.0, said, 11.0)})
    assert result.status == status and ("b " in result.seen) == (status == "warn")


def test_a_device_that_computes_differently_is_named() -> None:
    good = {"a": [rates()], "b": [rates()]}
    assert check_repeatable(good).status == "ok"
    wrong = check_repeatable({**good, "c": [rates(), rates(device="cuda:1", repeatable={"bf16": True, "fp32": False})]})
    assert wrong.status == "fail" and "cuda:1 of c in fp32" in wrong.seen and "bf16" not in wrong.seen


@pytest.mark.covers("VER-05")
def test_memory_that_telemetry_does_not_see_is_named() -> None:
    real = measure_watched(torch.device("cpu"))
    assert real is not None and 256 << 20 <= real < 300 << 20, "a real allocation of this process"
    good = check_monitoring({"a": [rates(watched_bytes=real)], "b": [rates(watched_bytes=None)]})
    assert good.status == "ok" and f"{real / 2**20:.0f} MiB on cuda:0 of a" in good.seen and "of b" not in good.seen
    for wrong in (0, 128 << 20, 512 << 20):
        result = check_monitoring({"a": [rates(watched_bytes=real)], "b": [rates(watched_bytes=wrong)]})
        assert result.status == "warn" and f"{wrong >> 20} MiB on cuda:0 of b" in result.seen
    assert check_monitoring({"a": [rates()]}).status == "na"


@pytest.mark.parametrize(
    ("slow", "what"),
    [(rates(84.0), "bf16 TFLOP/s"), (rates(memory_bytes_per_s=8.4e11), "memory GB/s"),
     (rates(copy_bytes_per_s=1.6e10), "host to device GB/s")],
)  # fmt: skip
def test_a_device_slower_than_its_kind_is_flagged(slow: DeviceRates, what: str) -> None:
    (result,) = check_rates({"a": [rates(), rates(device="cuda:1")], "b": [slow]})
    assert result.status == "warn" and f"cuda:0 of b {what}" in result.seen and "of a" not in result.seen


def test_each_kind_is_compared_with_itself_and_small_differences_are_none() -> None:
    (result,) = check_rates({"a": [rates(100.0), rates(86.0)], "b": [rates(100.0)]})
    assert result.status == "ok"
    fast, slow = check_rates({"a": [rates(100.0)], "b": [rates(8.0, name="T4")]})
    assert fast.status == slow.status == "ok" and "A100" in fast.seen and "T4" in slow.seen
