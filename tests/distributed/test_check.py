"""`raytrain check` on this machine (test_nodes.py: on two nodes): its verdict follows what it did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.devices.limits import cpu_description

MACHINE = ["storage", "shared_storage", "disk", "memory", "shared_memory", "network", "visible_devices", "devices"]


@pytest.mark.timeout(240)
@pytest.mark.covers("DEV-10", "VER-04", "CLI-26")
def test_every_format_of_this_machine_trains_in_one_fit(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    done = run_cli("check", "--json", cwd=tmp_path, timeout=200)
    assert done.code == 0, done.text
    report = json.loads(done.out)
    formats = ["fp32", "bf16"] if any(cpu_description()[1].values()) else ["fp32"]
    names = [check["name"] for check in report["checks"]]
    assert names == [
        "python", "torch", "ray", "platform", *MACHINE, "clocks", "repeated_products", "rates", "collectives",
        *(f"training in {dtype}" for dtype in formats),
    ]  # fmt: skip
    assert {check["status"] for check in report["checks"]} <= {"ok", "na", "warn"} and report["status"] == "ok"
    trained = [row for row in report["training"] if row["what"] == "training"]
    assert [(row["rank"], row["precision"]) for row in trained] == [(rank, f) for rank in (0, 1) for f in formats]
    for row in trained:
        first, second = row["losses"]
        assert second < first < 1.05 * math.log(256) and row["moved"]
    assert [row["losses"] for row in trained[: len(formats)]] == [row["losses"] for row in trained[len(formats) :]]
    moved = [row for row in report["training"] if row["what"] == "collectives"]
    assert all(row["all_reduce"] > 0 < row["all_to_all"] and row["world_size"] == 2 for row in moved)
    assert not list((tmp_path / "runs").iterdir()), "nothing is left where it wrote"
    record = next(iter(report["nodes"].values()))
    assert record["environment"]["versions"]["torch"] and record["devices"][0]["kind"] in ("cpu", "cuda", "rocm")


@pytest.mark.timeout(120)
@pytest.mark.covers("DEV-14", "DEV-09", "CLI-25")
def test_storage_that_cannot_be_written_turns_the_verdict_and_ends_with_1(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    broken = run_cli("check", "save.dir=file/runs", cwd=tmp_path)
    assert broken.code == 1, broken.text
    assert "FAILED" in broken.out and "storage" in broken.out and "training            left out" in broken.out
    assert "set save.dir to a folder" in " ".join(broken.out.split())
    short = run_cli("check", "--short", "--quick", cwd=tmp_path)
    assert short.code == 0, short.text
    (line,) = short.out.splitlines()
    assert line.startswith("ok: 1 node, 1 x ") and "CUDA devices 0; torch 2." in line and " 0 failed" in line
    wrong = run_cli("check", "cluster.address=127.0.0.1:1", cwd=tmp_path)
    assert wrong.code == 2 and "cluster.address" in wrong.text
    typo = run_cli("check", "scale.worker=2", cwd=tmp_path)
    assert typo.code == 2 and "scale.workers" in typo.text
