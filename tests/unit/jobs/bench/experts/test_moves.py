"""Bench `moves`: both arms train alike, and experts do move in one of them. Seven small processes; no Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.bench.experts.moves import _after_switches
from jobs.bench.harness.command import bench_verb


@pytest.mark.timeout(240)
def test_experts_move_and_the_losses_stay_the_same_bit_for_bit(tmp_path: Path) -> None:
    out = tmp_path / "moves.json"
    keys = ["skew=2.0", "slowness=[1,8]", "blocks=4"]  # so skewed and unequal that no noise hides it
    assert bench_verb("moves", keys, out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    assert document["gate"]["passed"] and len(document["gate"]["checks"]) == 1
    assert set(document["arms"]) == {"round-robin", "moving"}
    values = document["values"]
    decided = [row["step"] for row in values["decisions"]]
    assert decided[0] == 4 and all(step % 4 == 0 for step in decided), "a decision at most each experts.rebalance_every"
    assert all(row["reason"] and row["seconds"] >= 0 for row in values["decisions"])
    homes = [change for move in values["moves"] for change in move["changes"] if change[0] == "home"]
    assert homes, "no expert moved"
    assert all(move["bytes"] > 0 and move["seconds"] > 0 for move in values["moves"] if move["bytes"])
    done, compared = iter(values["moves"]), 0
    for decision in values["decisions"]:
        legs = [move for _, move in zip(range(decision["instalments"]), done, strict=False)]
        if legs and len(legs) == decision["instalments"]:  # the last ones may be under way when the bench ends
            measured, compared = sum(move["bytes"] for move in legs), compared + 1
            assert decision["bytes"] <= measured < 1.1 * decision["bytes"], "names and shapes come on top"
    assert compared, "no decision was carried out"
    assert len(values["step_times"]["moving"]) == 32
    assert values["after_switch"] == _after_switches(
        values["step_times"]["moving"], [move["step"] for move in values["moves"]]
    )


def test_the_step_after_a_switch_is_held_against_those_around_it() -> None:
    times = [1.0] * 10 + [3.0] + [2.0] * 4
    assert _after_switches(times, [10, 15]) == [3.0], "step 11 against ten before and four after it; 15 was the last"
