"""What `check JOB.yaml` says about the numbers that it measured of a job."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.checks.job import JobNumbers, check_job
from jobs.job.spec import load_spec
from raytrain.autotune.loaders import LoaderRate, LoaderRates
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.precision import GateReport

MIB = 1 << 20


def reading(rows: int, *, peak: int | None, outcome: Any = "ok", reason: str = "") -> Measurement:
    return Measurement(
        Candidate("fp32", rows), outcome, peak_bytes=peak, floor_bytes=90 * MIB, loss=2.5, grad_norm=0.7, reason=reason
    )


def timed(precision: str, pass_s: float, rows: int = 16) -> Measurement:
    return Measurement(Candidate(precision, rows), "ok", pass_s=(pass_s,) * 3, update_s=(0.001,) * 3, loss=2.5)


def gate(*, off: float = 0.0, error: str | None = None) -> GateReport:
    losses = tuple(2.5 - 0.1 * step for step in range(8))
    if error is not None:
        return GateReport("bf16", "fp32", error=error)
    worse = tuple((1 + off) * loss for loss in losses)
    return GateReport(
        "bf16", "fp32", losses=worse, reference_losses=losses, norms=(1.0,) * 8, reference_norms=(1.0,) * 8
    )


def numbers(**changes: Any) -> JobNumbers:
    fields: dict[str, Any] = {
        "rows": 16, "measured_rows": 16, "budget": 1000 * MIB,
        "memory": (reading(16, peak=260 * MIB), reading(8, peak=180 * MIB)),
        "times": (timed("fp32", 0.009), timed("bf16", 0.004)), "gates": (gate(),), "read_s": 0.0025,
        "loaders": None, "why_none": "not searched, rows are in memory", **changes,
    }  # fmt: skip
    return JobNumbers(**fields)


def results(found: JobNumbers, *overrides: str) -> dict[str, Any]:
    checks = check_job(found, load_spec(None, overrides).spec, source="my:rows", rows=1234)
    return {check.name: check for check in checks}


@pytest.mark.covers("BP-21")
def test_all_four_questions_are_answered_with_numbers() -> None:
    found = results(numbers())
    assert [check.status for check in found.values()] == ["ok"] * 4
    assert "1,234 rows of my:rows; first loss 2.5, gradient norm 0.7; 8 steps of 16 rows in fp32: 2.5 to 1.8" in (
        found["job data"].seen
    )
    assert found["job precision"].seen == (
        "fp32 10 ms a step of 16 rows; bf16 5 ms, 2.00 times as fast, with the losses of fp32 over 8 steps; best bf16"
    )
    memory = found["job memory"].seen
    assert "a peak of 260 MiB of 1000 MiB" in memory.replace("1,000", "1000") and "10 MiB a row" in memory
    assert memory.endswith("about 90 rows would fit"), memory
    assert "reading 16 rows takes 2.5 ms, 20.0% of a step; not searched" in found["job loaders"].seen


def test_a_format_that_the_job_sets_is_a_warning_where_another_is_faster_or_trains_otherwise() -> None:
    slow = results(numbers(), "precision.dtype=fp32")["job precision"]
    assert (slow.status, slow.key) == ("warn", "precision.dtype") and slow.remedy == "faster here: precision.dtype=bf16"
    wrong = numbers(gates=(gate(off=0.2),))
    assert results(wrong)["job precision"].seen.endswith("best fp32"), "its losses are others"
    refused = results(wrong, "precision.dtype=bf16")["job precision"]
    assert refused.status == "warn" and refused.remedy.endswith("precision.dtype=fp32") and "but " in refused.seen
    same = numbers(times=(timed("fp32", 0.009), timed("bf16", 0.0089)))
    assert results(same, "precision.dtype=fp32")["job precision"].status == "ok", "within noise"
    none = numbers(times=(timed("fp32", 0.009),), gates=(gate(error="no kernel"),))
    assert "bf16 fails: no kernel" in results(none)["job precision"].seen


def test_memory_that_is_nearly_full_or_too_small_is_named() -> None:
    full = results(numbers(budget=280 * MIB))["job memory"]
    assert full.status == "warn" and "loop.activation_checkpointing" in full.remedy
    fewer = results(numbers(measured_rows=4, memory=(reading(4, peak=250 * MIB),)))["job memory"]
    assert (fewer.status, fewer.remedy) == ("warn", "set loop.micro_batch_size=4, or leave it auto")
    short = reading(1, peak=None, outcome="out_of_memory", reason="a peak of 2 GiB, the budget is 1 GiB")
    none = results(numbers(measured_rows=1, memory=(short,), times=(), gates=()))
    assert [none[name].status for name in ("job data", "job memory")] == ["fail", "fail"]
    assert "a peak of 2 GiB" in none["job data"].seen and "job precision" not in none


def test_loaders_are_judged_by_the_rates_that_were_measured() -> None:
    rates = tuple(LoaderRate(count, batches, 1.0) for count, batches in ((0, 10), (1, 18), (2, 35), (4, 60), (8, 61)))
    found = numbers(loaders=LoaderRates(Candidate("fp32", 16), 8, rates))
    best = results(found)["job loaders"]
    assert best.status == "ok" and best.seen.startswith("best data.loader_workers=4: 60 batches/s of 16 rows")
    assert "0: 10, 1: 18, 2: 35, 8: 61" in best.seen
    few = results(found, "data.loader_workers=1")["job loaders"]
    assert (few.status, few.key) == ("warn", "data.loader_workers") and "the job has 1" in few.seen
    assert results(found, "data.loader_workers=8")["job loaders"].status == "ok"


def test_a_loss_that_is_not_finite_is_a_failure() -> None:
    wrong = reading(16, peak=260 * MIB, outcome="nonfinite", reason="loss nan, gradient norm nan")
    found = results(numbers(memory=(wrong,), times=(), gates=()))
    assert found["job data"].status == "fail" and "loss nan" in found["job data"].seen
