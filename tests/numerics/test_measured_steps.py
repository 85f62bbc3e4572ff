"""Candidates measured in new processes: the search against brute force, and agreement of workers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gang import run_gang
from lab import Rows
from probes import (
    activations,
    by_everybody,
    precision_and_rows,
    silent,
    under_a_budget,
    under_an_address_space_limit,
    wide,
)

from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.startup import Calibration, settle_precision
from raytrain.autotune.step_probe import StepProbe
from raytrain.errors import RunError
from raytrain.plan.choice import Deferred
from raytrain.runs.folder import RunFolder

SIZES = (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.covers("TUNE-03", "TUNE-09")
def test_a_memory_budget_is_answered_as_brute_force_does(tmp_path: Path) -> None:
    """Nine tenths of the memory there is lie between the peaks of 16 and 32 rows."""
    (found,) = run_gang(under_a_budget, str(tmp_path), world_size=1)
    peaks, limit = found["peaks"], found["limit"]
    best = max(size for size, peak in peaks.items() if peak <= limit)
    assert best == 16
    assert abs(SIZES.index(found["chosen"]) - SIZES.index(best)) <= 1
    assert peaks[found["chosen"]] <= limit
    assert found["used"] == found["chosen"] and found["accumulation"] == 64 // found["chosen"]
    # in the following steps the process stays within its budget
    assert found["run_peak"] <= 0.9 * found["room"]
    record = found["record"]
    for trial in record["trials"]:  # kernels differ between small sizes, which is why each prediction is confirmed
        if trial["predicted_bytes"] is not None:
            assert trial["predicted_bytes"] == pytest.approx(trial["peak_bytes"], rel=0.15)
    assert record["peak_bytes"] <= limit and record["budget_bytes"] == pytest.approx(limit, rel=1e-3)
    # the plan's estimate for a row; a memory limit must leave room for half of it
    assert found["row_estimate"] == pytest.approx(found["row_bytes"], rel=0.1)
    half, same, twice = (str(int(factor * found["chosen"])) for factor in (0.5, 1, 2))
    advised = record["predicted_peaks"]
    assert list(advised) == [half, same, twice] and advised[half] < advised[same] <= limit < advised[twice]
    (event,) = found["events"]
    assert event["what"] == "micro_batch" and event["value"] == found["chosen"] and "may take" in event["reason"]
    assert found["again"] == (found["chosen"], [])  # measured once; a restarted attempt takes it up


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("vocabulary", [256, 16384])
def test_the_plan_knows_what_many_words_need_in_half_precision_too(vocabulary: int, precision: str) -> None:
    """Of a small GPT of 16,384 words, most is the cross-entropy, which stays in fp32."""
    ((estimated, measured),) = run_gang(activations, vocabulary, precision, world_size=1)
    assert estimated == pytest.approx(measured, rel=0.1)


@pytest.mark.covers("TUNE-01", "FUT-02")
def test_real_failures_to_allocate_are_answered_as_brute_force_does(tmp_path: Path) -> None:
    (found,) = run_gang(under_an_address_space_limit, str(tmp_path), world_size=1)
    assert found["outcomes"] == {"ok", "out_of_memory"}
    assert abs(SIZES.index(found["chosen"]) - SIZES.index(max(found["fits"]))) <= 1


def test_precisions_are_compared_with_rows_that_fit(tmp_path: Path) -> None:
    (found,) = run_gang(precision_and_rows, str(tmp_path), world_size=1)
    (rows,) = found["rows"]
    assert 8 <= rows <= 32 and found["record"]["settings"]["precision"] == found["chosen"]
    assert found["micro_batch"] == found["record"]["value"] < 64
    again = ["micro_batch"] if found["chosen"] != "fp32" else []  # fp32's own measurement is not made twice
    assert found["decisions"] == ["micro_batch", "precision", *again]


def test_if_no_row_fits_in_fp32_a_run_that_measures_precisions_says_which_keys_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = wide()
    open_precision = Deferred("measured", ("bf16", "fp32"), "a test")
    session.job = replace(session.job, plan=replace(session.job.plan, precision=open_precision))
    measure = StepProbe.measure

    def limited(probe: StepProbe, candidate: Candidate, **named: Any) -> Measurement:
        return replace(measure(probe, candidate, **named), outcome="out_of_memory", reason="above the budget")

    monkeypatch.setattr(StepProbe, "measure", limited)
    calibration = Calibration(session, RunFolder(str(tmp_path)), Rows(), silent)
    with pytest.raises(RunError, match=r"not even a micro-batch of 1 row fits.*a lower precision\.dtype"):
        settle_precision(calibration, forced=None, loaded=None)


def test_workers_measure_as_one() -> None:
    first, second = run_gang(by_everybody, world_size=2)
    assert first["good"] == second["good"] and first["good"]["outcome"] == "ok"
    assert len(first["good"]["pass_s"]) == 2 and first["good"]["grad_norm"] > 0
    for told, reason in ((first, "on another worker"), (second, "from a test")):
        assert told["bad"]["outcome"] == "out_of_memory" and told["bad"]["reason"] == reason
        assert told["late"]["outcome"] == "out_of_memory" and told["late"]["reason"] == reason
        assert not told["late"]["pass_s"]
        assert told["in_turn"] == (reason, 1), "the round in which one of them failed does not count on the other"
        assert told["unchanged"] and told["losses"] == told["plain"] and len(told["losses"]) == 4
    assert first["slowest"] == second["slowest"] >= 0.05, "the second worker's"
    # each worker knows its own limit, and the tightest budget holds for all
    assert (first["limit"], second["limit"]) == (10_000_000_000, 10_000_000_001)
    assert first["budget"] == second["budget"] <= 10_000_000_000
