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
        loop={"max_steps": 120, "micro_batch_size": 2, "eval_every": 20},
        save={"every": 5},
        scale={"workers": 3},
    )
    command = start_cli("train", str(place.write(job)), cwd=place.folder, env=place.env)
    for attempt in (1, 2):
        place.wait_for(place.steps_of(attempt, more_than=7), limit=FIRST_STEP_S, command=command)
        command.signal_group(signal.SIGKILL)
        killed = place.run
        assert not (killed.path / "result.json").exists()
        command = start_cli("train", "--resume", "runs/latest", cwd=place.folder, env=place.env)
    done = command.finish(timeout=FIRST_STEP_S + END_S)
    assert done.code == 0, done.text
    assert place.run.path == killed.path
    unbroken = fit({**job, "name": "unbroken"})
    assert killed.losses() == unbroken.losses() and len(killed.losses()) == 120
    assert killed.evals() == unbroken.evals() and len(killed.evals()) == 6
    attempts = [(row["attempt"], row["from_step"]) for row in killed.events("attempt")]
    assert [number for number, _ in attempts] == [1, 2, 3]
    assert 0 == attempts[0][1] < attempts[1][1] < attempts[2][1] < 120, attempts
    result = killed.result
    assert (result["status"], result["steps"]) == ("done", 120)
    assert sum(result["time"].values()) == pytest.approx(result["wall_s"], rel=0.01)
