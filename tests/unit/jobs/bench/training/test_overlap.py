"""Bench `overlap`: two small processes, no Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.bench.harness.command import bench_verb


@pytest.mark.timeout(240)
def test_three_arms_run_in_turn_and_train_alike(tmp_path: Path) -> None:
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


def test_one_bucket_shows_nothing(tmp_path: Path) -> None:
    out = tmp_path / "overlap.json"
    assert bench_verb("overlap", ["bucket_mb=64"], out=str(out), quick=True, as_json=False) == 1
    document = json.loads(out.read_text())
    assert not document["gate"]["passed"] and document["ratios"] == []
