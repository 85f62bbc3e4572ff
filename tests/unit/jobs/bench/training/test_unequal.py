"""Bench `unequal`: two small processes of which one does everything many times; no Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.bench.harness.command import bench_verb
from raytrain.errors import InputError


@pytest.mark.timeout(240)
def test_both_arms_run_in_turn_and_the_slow_worker_takes_fewer_rows(tmp_path: Path) -> None:
    out = tmp_path / "unequal.json"
    keys = ["slowness=12"]  # so unequal that no noise hides it
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


def test_a_batch_of_which_nothing_can_be_moved_is_refused() -> None:
    with pytest.raises(InputError) as caught:
        bench_verb("unequal", ["batch=12"], out=None, quick=False, as_json=False)
    assert caught.value.key == "batch" and "16 rows" in str(caught.value)
