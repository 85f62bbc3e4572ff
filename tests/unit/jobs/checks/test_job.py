"""What `check JOB.yaml` says about the trainings that it measured of a job."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.checks.training import Arm, check_job
from jobs.job.spec import load_spec

MIB = 1 << 20
HALF, FP32, BF16 = Arm("fp32", 8, 0), Arm("fp32", 16, 0), Arm("bf16", 16, 0)


def trained(arm: Arm, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "losses": [2.5 - 0.1 * step for step in range(8)], "moved": True, "rows": arm.rows, "asked": arm.rows,
        "step_s": 0.005 if arm.precision == "bf16" else 0.01, "data_s": 0.002, "budget": 1000 * MIB,
        "peak_bytes": 100 * MIB + 10 * MIB * arm.rows, **changes,
    }  # fmt: skip
    return fields


def results(found: dict[Arm, dict[str, Any]], *overrides: str) -> dict[str, Any]:
    checks = check_job(list(found), list(found.values()), load_spec(None, overrides).spec, source="my:rows", rows=1234)
    return {check.name: check for check in checks}


GOOD = {arm: trained(arm) for arm in (HALF, FP32, BF16)}


@pytest.mark.covers("BP-21")
def test_all_four_questions_are_answered_with_numbers() -> None:
    found = results(GOOD)
    assert [check.status for check in found.values()] == ["ok"] * 4
    assert found["job data"].seen == "1,234 rows of my:rows; 8 steps of 16 rows in fp32: losses 2.5 to 1.8"
    assert found["job precision"].seen == (
        "a step of 16 rows: fp32 10 ms; bf16 5 ms, 2.00 times as fast, with the losses of fp32; best bf16"
    )
    memory = found["job memory"].seen
    assert memory.startswith("a peak of 260 MiB of 1000 MiB") and "10 MiB a row: about 80 rows would fit" in memory
    assert found["job loaders"].seen == "data.loader_workers=0 waits 20.0% of a step for its rows"


def test_a_format_that_the_job_sets_is_a_warning_where_another_is_faster_or_trains_otherwise() -> None:
    slow = results(GOOD, "precision.dtype=fp32")["job precision"]
    assert (slow.status, slow.key) == ("warn", "precision.dtype") and slow.remedy == "faster here: precision.dtype=bf16"
    wrong = {**GOOD, BF16: trained(BF16, losses=[3.0] * 8)}
    assert results(wrong)["job precision"].seen.endswith("best fp32"), "its losses are others"
    refused = results(wrong, "precision.dtype=bf16")["job precision"]
    assert refused.status == "warn" and refused.remedy == "trains like fp32 here: precision.dtype=fp32"
    same = {**GOOD, BF16: trained(BF16, step_s=0.0099)}
    assert results(same, "precision.dtype=fp32")["job precision"].status == "ok", "within noise"


def test_memory_that_is_nearly_full_or_too_small_is_named() -> None:
    full = results({FP32: trained(FP32, budget=280 * MIB)})["job memory"]
    assert full.status == "warn" and "loop.activation_checkpointing" in full.remedy
    fewer = results({FP32: trained(FP32, rows=4)})["job memory"]
    assert (fewer.status, fewer.remedy) == ("warn", "set loop.micro_batch_size=4, or leave it auto")


def test_loaders_are_judged_by_the_steps_that_were_measured() -> None:
    more = {Arm("fp32", 16, count): trained(FP32, step_s=step) for count, step in ((1, 0.008), (2, 0.004), (4, 0.0041))}
    found = results({**GOOD, **more})["job loaders"]
    assert (found.status, found.remedy) == ("warn", "set data.loader_workers=2, or auto")
    assert "best data.loader_workers=2 (0: 10 ms a step, 1: 8 ms a step, 2: 4 ms a step" in found.seen
    given = {Arm("fp32", 16, 2): trained(FP32, step_s=0.004), FP32: trained(FP32)}
    assert results(given)["job loaders"].status == "ok"


def test_losses_that_are_not_finite_and_weights_that_stay_are_failures() -> None:
    for changes in ({"losses": [2.5, float("nan")]}, {"losses": []}, {"moved": False}):
        assert results({FP32: trained(FP32, **changes)})["job data"].status == "fail"
