"""Benches that start processes, run with small sizes: their documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.bench.harness.options import bench_verb
from jobs.bench.moves import over_around

ALONE = {"in process, 2 thread(s)", "in process, 1 thread(s)"}


@pytest.mark.covers("TEST-08")
def test_every_layout_and_implementation_is_checked_and_timed_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "experts.json"
    assert bench_verb("experts", [], out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    checks = {check["name"]: check["passed"] for check in document["gate"]["checks"]}
    assert len(checks) == 4 and all(checks.values())
    ratios = {ratio["name"]: ratio for ratio in document["ratios"]}
    for dtype in ("fp32", "bf16"):
        exchange = document["values"]["exchange"][dtype]
        assert set(exchange["ms"]) == ALONE | {"1 + 2", "2 colocated"} and min(exchange["ms"].values()) > 0
        for name in exchange["ms"]:
            assert len(document["arms"][f"{dtype}, {name}"]["values"]) == 3
        calm = ratios[f"{dtype}: 1 + 2 / in process, 2 thread(s)"]
        assert calm["goal"] == {"at_least": None, "at_most": 1.25}
        assert len(calm["values"]) == len(exchange["calm_rounds"]) >= 1
        two, one = (f"{dtype}, {name}" for name in ("2 colocated", "in process, 1 thread(s)"))
        pair = ratios[f"{dtype}: 2 colocated / in process, 1 thread(s)"]
        arms = zip(document["arms"][two]["values"], document["arms"][one]["values"], strict=True)
        assert set(pair["values"]) <= {a / b for a, b in arms}, "two workers over one, measured in the same rounds"
    assert all(claim["verdict"] == "not measurable here" for claim in document["claims"])


@pytest.mark.timeout(240)
def test_experts_move_and_the_losses_stay_the_same_bit_for_bit(tmp_path: Path) -> None:
    out = tmp_path / "moves.json"
    keys = ["skew=2.0", "slowness=[1,8]", "blocks=4"]  # a difference far above the noise
    assert bench_verb("moves", keys, out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    assert document["gate"]["passed"] and len(document["gate"]["checks"]) == 1
    assert set(document["arms"]) == {"round-robin", "moving"}
    values = document["values"]
    decided = [row["step"] for row in values["decisions"]]
    assert decided[0] == 4 and all(step % 4 == 0 for step in decided), "not at a multiple of experts.rebalance_every"
    assert all(row["reason"] and row["seconds"] >= 0 for row in values["decisions"])
    homes = [change for move in values["moves"] for change in move["changes"] if change[0] == "home"]
    assert homes, "no expert moved"
    assert all(move["bytes"] > 0 and move["seconds"] > 0 for move in values["moves"] if move["bytes"])
    done, compared = iter(values["moves"]), 0
    for decision in values["decisions"]:
        legs = [move for _, move in zip(range(decision["instalments"]), done, strict=False)]
        if legs and len(legs) == decision["instalments"]:  # the last ones may not have finished when the bench ends
            measured, compared = sum(move["bytes"] for move in legs), compared + 1
            assert decision["bytes"] <= measured < 1.1 * decision["bytes"], "names and shapes are added"
    assert compared, "no decision was carried out"
    assert len(values["step_times"]["moving"]) == 32
    assert values["after_switch"] == over_around(
        values["step_times"]["moving"], ((move["step"], move["step"] + 1) for move in values["moves"])
    )


def test_the_cost_of_a_lifecycle_is_measured_idle_and_in_its_changes(tmp_path: Path) -> None:
    out = tmp_path / "lifecycle.json"
    assert bench_verb("lifecycle", ["steps=50"], out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    assert document["gate"]["passed"] and set(document["arms"]) == {"without", "idle"}
    values = document["values"]
    assert len(values["step_times"]) == 50
    kinds = [kind for kind, _ in values["changes"]]
    assert sorted({*kinds}) == ["birth", "merge", "prune"] and len(kinds) == 9, "one every five steps, done in the next"
    assert len(document["claims"]) == 3


@pytest.mark.covers("PERF-02", "FUT-05")
def test_our_run_in_ray_equals_ddp_under_torchrun_and_both_rates_are_reported(
    run_cli: Callable[..., Any], tmp_path: Path
) -> None:
    """For one worker the unit test of the plain loop shows equality bit for bit, without Ray."""
    out = tmp_path / "loop.json"
    options = ("threads=1", "blocks=2", "workers=[2]")
    done = run_cli("bench", "loop", "--quick", *options, "--out", str(out), cwd=tmp_path, timeout=240)
    assert done.code == 0, done.text
    document = json.loads(out.read_text())
    (gate,) = document["gate"]["checks"]
    assert document["gate"]["passed"] and "DDP" in gate["name"] and "3 losses" in gate["detail"]
    ratio = next(row for row in document["ratios"] if row["name"] == "plain DDP / ours, 2 worker(s)")
    values = document["values"]["2 worker(s)"]
    ours, theirs = (document["arms"][f"{name}, 2 worker(s)"]["values"] for name in ("ours", "plain DDP"))
    assert ratio["goal"]["at_least"] == 1.0
    assert ratio["values"] == [a / b for a, b in zip(theirs, ours, strict=True)]
    assert values["threads"] == 1 and set(values["samples_per_s"]) == set(values["losses"])
    assert values["samples_per_s"]["ours"] == pytest.approx(4 / (sum(ours) / 2))
    assert len(values["losses"]["ours"]) == 5
