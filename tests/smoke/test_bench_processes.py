"""Benches that start processes, run with small sizes: their documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.bench.experts.moves import _after_switches
from jobs.bench.harness.command import bench_verb

ALONE = {"in process, 2 thread(s)", "in process, 1 thread(s)"}


@pytest.mark.covers("TEST-08")
def test_every_layout_and_implementation_is_checked_and_timed_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "experts.json"
    assert bench_verb("experts", [], out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    checks = {check["name"]: check["passed"] for check in document["gate"]["checks"]}
    assert len(checks) == 11 and all(checks.values())
    for dtype in ("fp32", "bf16"):
        large, small = (document["values"]["exchange"][f"{dtype} {size}"] for size in ("64 x 16", "32 x 8"))
        assert set(large["layouts"]) == ALONE | {"1 + 2", "2 colocated"} and set(small["layouts"]) == ALONE | {"1 + 2"}
        for layout in large["layouts"].values():
            assert layout["ms"] > 0 and layout["cpu_s"] > 0
        assert 0 < large["layouts"]["1 + 2"]["share_of_transport"] < 1
        assert len(document["arms"][f"{dtype} 64 x 16, 1 + 2"]["values"]) == 3
        assert len(document["arms"][f"{dtype} 32 x 8, 1 + 2"]["values"]) == 2
        ratios = {ratio["name"]: ratio for ratio in document["ratios"]}
        calm = ratios[f"{dtype} 64 x 16: 1 + 2 / in process, 2 thread(s)"]
        assert calm["goal"] == {"at_least": None, "at_most": 1.25}
        assert len(calm["values"]) == len(large["calm_rounds"]) >= 1
        two, one = (f"{dtype} 64 x 16, {name}" for name in ("2 colocated", "in process, 1 thread(s)"))
        pair = ratios[f"{dtype} 64 x 16: 2 colocated / in process, 1 thread(s)"]
        arms = zip(document["arms"][two]["values"], document["arms"][one]["values"], strict=True)
        assert set(pair["values"]) <= {a / b for a, b in arms}, "two workers over one, measured in the same rounds"
        for name in ("sorted", "masks", "loop", "grouped"):
            assert len(document["arms"][f"{dtype} 64 x 16, {name}"]["values"]) == 3
    assert document["values"]["inflight"].keys() == {"one in flight", "two in flight"}
    assert len(document["arms"]["a training step, two in flight"]["values"]) == 3
    assert all(claim["verdict"] == "not measurable here" for claim in document["claims"])


@pytest.mark.covers("PAR-05")
def test_strategies_are_predicted_and_measured_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "strategies.json"
    assert bench_verb("strategies", ["settle_s=0"], out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    (check,) = document["gate"]["checks"]
    assert check["passed"] and check["name"] == "experts: every strategy trains the same"
    names = {"1 process", "1 worker, 2 expert hosts"}
    assert {name: len(arm["values"]) for name, arm in document["arms"].items()} == {f"experts: {n}": 3 for n in names}
    found = document["values"]["jobs"]["experts"]
    assert {name: len(losses) for name, losses in found["losses"].items()} == dict.fromkeys(names, 4)
    rows = found["strategies"]
    assert {row["name"] for row in rows} == names and all(row["predicted_s"] > 0 for row in rows)
    assert [row["predicted_s"] for row in rows] == sorted(row["predicted_s"] for row in rows)
    assert found["predicted_best"] == rows[0]["name"] and found["fastest"] in names
    (ratio,) = document["ratios"]
    assert ratio["goal"] == {"at_least": None, "at_most": 1.1}
    best, fastest = (document["arms"][f"experts: {found[name]}"]["values"] for name in ("predicted_best", "fastest"))
    assert ratio["values"] == [a / b for a, b in zip(best, fastest, strict=True)]


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
    assert values["after_switch"] == _after_switches(
        values["step_times"]["moving"], [move["step"] for move in values["moves"]]
    )


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
    assert len(values["losses"]["ours"]) == 5 and values["cpu_s_per_step"]["ours"] > 0


@pytest.mark.timeout(240)
def test_three_arms_run_in_turn_and_train_equally(tmp_path: Path) -> None:
    out = tmp_path / "overlap.json"
    assert bench_verb("overlap", [], out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    assert document["gate"]["passed"] and len(document["gate"]["checks"]) == 2
    assert {name: len(arm["values"]) for name, arm in document["arms"].items()} == dict.fromkeys(
        ("after", "during", "undivided"), 3
    )
    values = document["values"]
    assert values["buckets"] > 2 and values["waited_s"].keys() == document["arms"].keys()
    rounds = values["auto"]["rounds"]
    assert len(rounds["after"]) == len(rounds["during"]) >= 1 and isinstance(values["auto"]["value"], bool)
    assert [ratio["name"] for ratio in document["ratios"]] == ["after / during", "undivided / after"]
    assert {claim["verdict"] for claim in document["claims"]} == {"not measurable here"}


@pytest.mark.timeout(120)
def test_a_session_trains_with_and_without_telemetry_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "telemetry.json"
    assert bench_verb("telemetry", [], out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    assert document["gate"]["passed"] and document["values"]["samples"] >= 3
    assert {name: len(arm["values"]) for name, arm in document["arms"].items()} == {"with telemetry": 3, "without": 3}
    assert 0 < document["values"]["sample_s"] < 0.1


def test_a_single_bucket_fails_the_gate(tmp_path: Path) -> None:
    out = tmp_path / "overlap.json"
    assert bench_verb("overlap", ["bucket_mb=64"], out=str(out), quick=True, as_json=False) == 1
    document = json.loads(out.read_text())
    assert not document["gate"]["passed"] and document["ratios"] == []


@pytest.mark.timeout(240)
def test_both_arms_run_in_turn_and_the_slow_worker_gets_fewer_rows(tmp_path: Path) -> None:
    out = tmp_path / "unequal.json"
    keys = ["slowness=12"]  # a difference far above the noise
    assert bench_verb("unequal", keys, out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    assert document["gate"]["passed"] and len(document["gate"]["checks"]) == 2
    assert {name: len(arm["values"]) for name, arm in document["arms"].items()} == {
        "equal shares": 3, "measured shares": 3
    }  # fmt: skip
    values = document["values"]
    assert sum(values["rows"]) == 12 and values["rows"][0] > values["rows"][1]
    assert values["pass_s"][1] > values["pass_s"][0] > 0 and values["probe_s"] > 0
    assert document["ratios"][0]["goal"]["at_least"] == 1.35
    assert document["claims"][0]["verdict"] == "not measurable here"


@pytest.mark.timeout(300)
def test_estimates_puts_what_is_predicted_beside_what_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "estimates.json"
    code = bench_verb("estimates", ['only=["own module"]', "threads=1"], out=str(out), quick=True, as_json=False)
    document = json.loads(out.read_text())
    assert code == 0 and document["gate"]["passed"]
    (row,) = document["values"]["jobs"]
    assert row["time_ratio"] == row["predicted_s"] / row["measured_s"] and len(row["times"]) == 2
    assert row["measured_bytes"] == max(row["peaks"]) - row["floor"]
    assert row["memory_ratio"] == row["predicted_bytes"] / row["measured_bytes"]
    assert 0.9 <= row["memory_ratio"] <= 1.25, "a user's module is traced"
    assert any("own module" in line for line in document["values"]["table"])
