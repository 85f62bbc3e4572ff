"""Bench `scaling` with small sizes: one worker and two do equal work, of which each of two does half."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.bench.harness.options import bench_verb


@pytest.mark.timeout(240)
@pytest.mark.covers("INF-21")
@pytest.mark.filterwarnings("ignore")  # Ray's own, of its options for data
def test_two_workers_do_the_work_of_one_in_halves_and_the_times_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "scaling.json"
    assert bench_verb("scaling", [], out=str(out), quick=True, as_json=False) == 0
    found = json.loads(out.read_text())
    checks = {check["name"]: check for check in found["gate"]["checks"]}
    assert len(checks) == 3 and all(check["passed"] for check in checks.values())
    losses = checks["the losses of two workers equal those of one: equal work"]
    assert losses["detail"].startswith("5 losses"), "of the first step, and of four blocks of ten"
    for counts in found["values"]["rows of each of two workers, by job"]:
        assert sum(counts) == 8 and len(counts) == 2 and min(counts) >= 2, "units are pulled, none is computed twice"
    training, inference = found["ratios"]
    assert training["name"] == "seconds of a training step, two workers / one" and len(training["values"]) == 3
    assert inference["name"] == "seconds of an inference job, two workers / one" and len(inference["values"]) == 1
    for ratio in (training, inference):
        what = ratio["name"].removeprefix("seconds of a").lstrip("n ").partition(",")[0]
        two, one = (found["arms"][f"{what}, {name}"]["values"] for name in ("two workers", "one worker"))
        assert ratio["values"] == pytest.approx([both / alone for both, alone in zip(two, one, strict=True)])
        assert ratio["goal"] == {"at_least": None, "at_most": 0.55}
