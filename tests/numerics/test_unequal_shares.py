"""Unequal shares of a batch: the same step as one process, the same series after a resume, measured without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import unequal
from gang import run_gang

from raytrain.plan.shares import Shares

STEPS = 12
TWO = Shares(unequal.MICRO, (unequal.MICRO, unequal.MICRO), (1.0, 3.0)).to_json()
THREE = Shares(unequal.MICRO, (3 * unequal.MICRO, unequal.MICRO, unequal.MICRO), (1.0, 0.75, 1.0)).to_json()


def test_unequal_shares_train_the_steps_of_one_process_within_1e_12() -> None:
    reference = unequal.steps_taken(0, 1, None, STEPS)
    ways = {"two": run_gang(unequal.steps_taken, TWO, STEPS, world_size=2)}
    ways["three"] = run_gang(unequal.steps_taken, THREE, STEPS, world_size=3)
    assert [made["rows"] for made in ways["two"]] == [[2] * 6, [2, 2]]
    assert [made["rows"] for made in ways["three"]] == [[6, 4], [2, 2], [2]]
    for way, ranks in ways.items():
        for rank, made in enumerate(ranks):
            where = f"{way}, rank {rank}"
            for name in ("losses", "norms", "evals"):
                np.testing.assert_allclose(made[name], reference[name], rtol=0, atol=1e-12, err_msg=f"{where} {name}")
            for key, value in reference["weights"].items():
                np.testing.assert_allclose(made["weights"][key], value, rtol=0, atol=1e-12, err_msg=f"{where} {key}")
        assert len({made["digest"] for made in ranks}) == 1, f"{way}: the ranks differ"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    """(run folder, what each of three ranks did) of a run that nothing stopped."""
    folder = str(tmp_path_factory.mktemp("runs") / "whole")
    return folder, run_gang(unequal.life, {"run": folder, "shares": THREE, "steps": 10}, world_size=3)


def test_a_run_with_shares_resumes_bit_for_bit(whole: tuple[str, list[dict[str, Any]]]) -> None:
    folder, unbroken = whole
    resumed = run_gang(unequal.life, {"run": folder, "shares": THREE, "steps": 10, "resume": 6}, world_size=3)
    for made, then in zip(resumed, unbroken, strict=True):
        assert made["losses"] == {step: loss for step, loss in then["losses"].items() if step > 6}
        assert made["rows"] == {step: rows for step, rows in then["rows"].items() if step > 6}
        assert made["digest"] == then["digest"]


def test_other_shares_and_another_world_see_each_row_once_an_epoch(whole: tuple[str, list[dict[str, Any]]]) -> None:
    folder, unbroken = whole
    resumed = run_gang(unequal.life, {"run": folder, "shares": TWO, "steps": 10, "resume": 6}, world_size=2)
    for step in range(7, 11):
        now, then = ([row for made in ranks for row in made["rows"][step]] for ranks in (resumed, unbroken))
        assert now == then, "the order of rows is a function of seed, epoch and position alone"
    assert sorted(row for step in (1, 2, 3, 4) for made in unbroken for row in made["rows"][step]) == list(
        range(unequal.ROWS)
    )


def test_a_slow_worker_is_measured_without_a_trace_and_once(tmp_path: Path) -> None:
    first, last = run_gang(unequal.measured, str(tmp_path / "run"), world_size=2)
    for made in (first, last):
        assert made["untouched"] and made["same"]
        assert made["rows"] == first["rows"] and sum(made["rows"]) == unequal.GLOBAL
        assert made["rows"][1] < made["rows"][0], f"rank 1 does everything {unequal.SLOWNESS + 1} times"
    (event,) = first["events"]
    assert event["kind"] == "decision" and event["what"] == "shares" and "times as long for a row" in event["reason"]
    assert first["record"]["value"] == event["value"] and len(first["record"]["trials"]["pass_s"]) == 2
