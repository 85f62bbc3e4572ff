"""The whole command dies or is stopped, at any moment, and goes on: real processes, real signals."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

Job = Callable[..., dict[str, Any]]
FIRST_STEP_S = 150
END_S = 60


@pytest.mark.timeout(580)
@pytest.mark.covers("DATA-22")
def test_three_workers_killed_twice_and_resumed_at_once_train_as_if_unbroken(
    start_cli: Callable[..., Any], fit: Callable[..., Any], guest_job: Job, place: Any
) -> None:
    job = guest_job(
        name="killed",
        model={"dropout": 0.2, "pause": 0.02},
        loop={"max_steps": 60, "micro_batch_size": 2, "eval_every": 10},
        save={"every": 5},
        scale={"workers": 3},
    )
    unbroken = fit({**job, "name": "unbroken"})
    assert unbroken.result["steps"] == 60
    command = start_cli("train", str(place.write(job)), cwd=place.folder, env=place.env)
    for step in (12, 33):
        place.wait_for(place.step_reached(step), limit=FIRST_STEP_S, command=command)
        command.signal_group(signal.SIGKILL)
        killed = place.run
        assert not (killed.path / "result.json").exists()
        command = start_cli("train", "--resume", "runs/latest", cwd=place.folder, env=place.env)
    done = command.finish(timeout=FIRST_STEP_S + END_S)
    assert done.code == 0, done.text
    assert place.run.path == killed.path
    assert killed.losses() == unbroken.losses() and len(killed.losses()) == 60
    assert killed.evals() == unbroken.evals() and len(killed.evals()) == 6
    attempts = [(row["attempt"], row["from_step"]) for row in killed.events("attempt")]
    assert [number for number, _ in attempts] == [1, 2, 3]
    assert attempts[0][1] == 0 and attempts[1][1] in (5, 10, 15) and attempts[2][1] >= 25, attempts
    result = killed.result
    assert (result["status"], result["steps"]) == ("done", 60)
    assert sum(result["time"].values()) == pytest.approx(result["wall_s"], rel=0.01)
    assert result["time"]["lost"] > 0
