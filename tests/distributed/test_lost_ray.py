"""A process of Ray itself is killed: the driver starts Ray again, and the series is that of an unbroken run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIRST_STEP_S = 150
#: In the order in which they die; none of them is a worker, and Ray starts none of them again.
PROCESSES = ("TrainController", "raylet/raylet", "gcs_server")


def process_of(place: Any, word: str) -> int:
    """The process with this word in its command line, of those started in this place."""
    found = [pid for pid in place.processes() if word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace")]
    return min(found)


@pytest.mark.timeout(500)
def test_a_run_survives_the_death_of_each_process_of_ray(
    start_cli: Callable[..., Any], fit: Callable[..., Any], guest_job: Callable[..., Any], place: Any
) -> None:
    job = guest_job(name="broken", model={"pause": 0.03, "dropout": 0.2}, loop={"max_steps": 120}, save={"every": 5})
    command = start_cli("train", str(place.write(job)), cwd=place.folder, env=place.env)
    for attempt, word in enumerate(PROCESSES, start=1):
        place.wait_for(place.steps_of(attempt, more_than=10), limit=FIRST_STEP_S, command=command)
        os.kill(process_of(place, word), signal.SIGKILL)
    finished = command.finish(timeout=FIRST_STEP_S)
    assert finished.code == 0, finished.text
    broken, unbroken = place.run, fit({**job, "name": "unbroken"})
    assert broken.losses() == unbroken.losses() and len(broken.losses()) == 120
    assert broken.evals() == unbroken.evals()
    attempts = broken.events("attempt")
    assert [row["attempt"] for row in attempts] == [1, 2, 3, 4]
    assert all(row["from_step"] > 0 for row in attempts[1:]), "each from a checkpoint"
    faults = broken.events("fault")
    assert [(row["error"], row["failed_attempt"]) for row in faults] == [("ClusterLost", n) for n in (1, 2, 3)]
    named = ("controller", "raylet", "gcs_server")
    assert all(word in row["message"] for row, word in zip(faults, named, strict=True))
    for row in faults:
        assert f"{row['message']}; a new private Ray starts" in finished.out, finished.text
    assert "state-dump" not in finished.text, "Ray's own pages about a dead process"
    assert "resume with" not in finished.out
    assert place.end(within=20) == []
