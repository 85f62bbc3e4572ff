"""Failures inside a run, made for real: what Ray restarts, what the rules decide, what the record says.

The runs share one local cluster; each breaks in its own way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Fit = Callable[..., Any]


@pytest.mark.timeout(240)
@pytest.mark.covers("LOOP-13")
def test_a_killed_worker_costs_nothing_but_time(fit: Fit, guest_job: Callable[..., Any], tmp_path: Path) -> None:
    def job(fault: str) -> dict[str, Any]:
        return guest_job(
            model={"dropout": 0.2, "fault": fault, "at": 9, "note": str(tmp_path / "killed")},
            precision={"dtype": "bf16"},
            loop={"max_steps": 12, "eval_every": 6},
            save={"every": 4},
            scale={"workers": 2},
        )

    unbroken, broken = fit(job(""), save=tmp_path / "a"), fit(job("is_killed_once"), save=tmp_path / "b")
    assert (tmp_path / "killed").exists()
    assert broken.losses() == unbroken.losses() and len(broken.losses()) == 12
    assert broken.evals() == unbroken.evals()
    assert broken.result["status"] == "done"
    attempts = broken.events("attempt")
    assert [row["attempt"] for row in attempts] == [1, 2]
    assert 0 < attempts[1]["from_step"] < 9
    assert {row["precision"] for row in attempts} == {"bf16"}, "a lost peer is no failure of a precision"
    (fault,) = broken.events("fault")
    assert (fault["error"], fault["rank"]) == ("WorkerDied", 1)
    assert broken.result["time"]["restart"] > 0
