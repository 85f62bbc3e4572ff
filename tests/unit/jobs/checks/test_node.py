"""What one node finds out about itself, and what it says of a real fault."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.preflight import CheckResult
from jobs.checks import node
from jobs.checks.node import (
    check_devices,
    check_limits,
    check_load,
    check_network,
    examine,
    is_repeatable,
    measure,
    shared_storage,
)
from jobs.checks.training import FIT_STEPS, check_copies, check_training
from raytrain.data.rows.residency import TransferCounts

CPU = torch.device("cpu")


@pytest.fixture
def storage(tmp_path: Path) -> tuple[Path, str]:
    (tmp_path / "token").mkdir()
    (tmp_path / "token/driver").write_text("token")
    return tmp_path, "token"


def test_a_node_reports_facts_and_every_check(storage: tuple[Path, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        report = examine(str(storage[0]), "token", "me", driver=("127.0.0.1", port), interface=None)
    names = [
        "storage",
        "shared_storage",
        "disk",
        "memory",
        "shared_memory",
        "network",
        "visible_devices",
        "devices",
        "load",
        "kernel_caches",
    ]
    assert [result.name for result in report.results] == names
    assert {r.status for r in report.results if r.name in ("storage", "shared_storage", "devices")} == {"ok"}
    assert (storage[0] / "token/me").read_text() == "token"
    assert report.limits["cores"] >= 1
    assert report.environment["versions"]["torch"] and report.devices


def test_storage_that_is_not_shared_or_not_writable_is_named(storage: tuple[Path, str], tmp_path: Path) -> None:
    assert shared_storage(str(storage[0]), "token", "me").status == "ok"
    for wrong in (shared_storage(str(tmp_path / "elsewhere"), "token", "me"), shared_storage(str(tmp_path), "x", "me")):
        assert wrong.status == "fail" and wrong.key == "save.dir" and "URI" in wrong.remedy
    (storage[0] / "token/driver").write_text("of another cluster")
    assert "another content" in shared_storage(str(storage[0]), "token", "me").seen
    (storage[0] / "token/driver").write_text("token")
    (storage[0] / "token/taken").mkdir()
    assert shared_storage(str(storage[0]), "token", "taken").status == "fail", "cannot write there"


def test_a_driver_that_cannot_be_reached_and_a_missing_interface_are_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        driver = server.getsockname()[:2]
        assert check_network(driver, "lo").status == check_network(driver, None).status == "ok"
        assert check_network(driver, None).seen.endswith("collectives over lo")
        missing = check_network(driver, "eth99")
    assert missing.status == "fail" and missing.key == "cluster.interface" and "lo" in missing.seen
    closed = check_network(driver, None)
    assert closed.status == "fail" and "refused" in closed.seen and "ports" in closed.remedy


@pytest.mark.parametrize(("free", "status"), [(2 << 30, "ok"), (1 << 29, "fail"), (None, "ok")])
def test_too_little_memory_fails_and_a_cgroup_is_named(free: int | None, status: str) -> None:
    limits: dict[str, Any] = {"cores": 2, "cores_reason": "a quota", "memory_free_bytes": free,
                              "memory_total_bytes": 4 << 30, "machine_memory_bytes": 64 << 30}  # fmt: skip
    result = check_limits(limits)
    assert result.status == status and "a cgroup allows 4 GiB of 64 GiB" in result.seen
    assert "cgroup" not in check_limits({**limits, "machine_memory_bytes": 4 << 30}).seen


@pytest.mark.covers("VER-01")
def test_a_gpu_that_cannot_be_used_fails_with_its_reason() -> None:
    assert check_devices((), "2 cores").status == "ok"
    result = check_devices(("T4: torch is built for CPUs only",), "2 cores")
    assert result.status == "fail" and "built for CPUs only" in result.seen


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_products_that_differ_by_one_bit_are_noticed(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_repeatable(CPU, dtype)
    calls, multiply = list[int](), node.multiply

    def flips(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = multiply(one, other)
        calls.append(1)
        if len(calls) == node.REPEATS:  # the last repetition only
            product[3, 5] = torch.nextafter(product[3, 5], torch.tensor(torch.inf, dtype=product.dtype))
        return product

    monkeypatch.setattr(node, "multiply", flips)
    assert not is_repeatable(CPU, dtype)


def test_the_rates_of_a_device_are_those_of_its_formats() -> None:
    found = measure(CPU)
    assert "fp32" in found.flops and set(found.flops) == set(found.repeatable)
    assert min(found.flops.values()) > 0 < found.memory_bytes_per_s
    assert found.copy_bytes_per_s is None and all(found.repeatable.values())


def row(**changes: Any) -> dict[str, Any]:
    good = {"what": "training", "rank": 1, "precision": "bf16", "losses": [5.5, 5.4], "steps": FIT_STEPS, "moved": True,
            "device": "cuda:0", "devices": ["cuda:0"], "seconds": 0.1,
            "copies": vars(TransferCounts(4, 4096, pinned=4, non_blocking=4))}  # fmt: skip
    good |= {"products": {"bfloat16": 9, "float32": 1}, "wanted": "bfloat16"}
    good |= {"products": {"float32": 9}, "wanted": "float32"} if changes.get("precision") == "fp32" else {}
    return {**good, **changes}


@pytest.mark.covers("VER-06")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": [5.5, float("nan")]}, "losses"),
        ({"steps": 1}, "took 1 step"),
        ({"moved": False}, "no step changed"),
        ({"devices": ["cpu", "cuda:0"]}, "holds weights on cpu, cuda:0"),
        ({"products": {"float32": 9, "bfloat16": 1}}, "products in bfloat16 and float32"),
        ({"products": {}}, "products in no format"),
    ],
)
def test_a_worker_that_does_not_train_fails_its_precision(changes: dict[str, Any], said: str) -> None:
    other = row(precision="fp32")
    fine: Callable[..., Any] = check_training
    assert [result.status for result in fine([row(), other], workers=1)] == ["ok", "ok", "ok"]
    wrong, fp32, _ = check_training([row(rank=0), row(**changes), other], workers=1)
    assert wrong.name == "training in bf16" and wrong.status == "fail" and "rank 1" in wrong.seen and said in wrong.seen
    assert fp32.status == "ok"


@pytest.mark.covers("VER-03")
def test_the_copies_of_batches_are_judged_by_what_the_workers_counted() -> None:
    def found(*copies: TransferCounts, device: str = "cuda:0") -> CheckResult:
        return check_copies([row(rank=rank, device=device, copies=vars(one)) for rank, one in enumerate(copies)])

    pinned = TransferCounts(4, 500_000, pinned=4, non_blocking=4)
    fine = found(pinned, pinned)
    assert fine.status == "ok" and fine.name == "batch_copies"
    assert fine.seen == "8 tensors of batches (1.0 MB) copied to cuda: 8 from pinned memory, 8 non-blocking"
    waited = found(pinned, TransferCounts(4, 100, pageable=4))
    assert waited.status == "fail" and "4 whose source was ordinary memory" in waited.seen
    blocked = found(TransferCounts(4, 100, pinned=4, non_blocking=3, pageable=1))
    assert blocked.status == "fail", "from pinned memory, and still the host waited"
    none = found(pinned, TransferCounts(in_place=4))
    assert none.status == "fail" and "none were counted on rank 1 in bf16" in none.seen
    shown = found(TransferCounts(in_place=4), device="cpu")
    assert shown.status == "na" and shown.seen.startswith("not shown: ")


def test_a_machine_that_others_use_is_warned_of() -> None:
    busy = check_load(6.4, 4)
    assert (busy.status, busy.seen) == (
        "warn",
        "6.4 threads at work on 4 cores",
    ) and "end other programs" in busy.remedy
    assert check_load(5.9, 4).status == "ok" and check_load().status in ("ok", "warn")
