"""A process of Ray itself is killed: the driver starts Ray again, and the series is that of an unbroken run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIRST_STEP_S = 150
#: In the order in which they die; none of them is a worker, and Ray starts none of them again.
PROCESSES = ("TrainController", "raylet/raylet", "DashboardAgent", "gcs_server")
#: What is said to have died: with one of its agents, Ray ends the raylet and all actors of the node.
NAMED = ("controller", "raylet", "raylet|controller", "gcs_server")


def process_of(place: Any, word: str) -> int:
    """The process with this word in its command line, of those started in this place."""
    ours = place.processes()
    if word == "DashboardAgent":  # its title hides its environment, by which a place knows its processes
        raylet = process_of(place, "raylet/raylet")
        ours = [int(pid) for pid in Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()]
    return min(pid for pid in ours if word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))


@pytest.mark.timeout(590)
def test_a_run_survives_the_death_of_each_process_of_ray(
    start_cli: Callable[..., Any], fit: Callable[..., Any], guest_job: Callable[..., Any], place: Any
) -> None:
    job = guest_job(name="broken", model={"pause": 0.03, "dropout": 0.2}, loop={"max_steps": 150}, save={"every": 5})
    command = start_cli("train", str(place.write(job)), cwd=place.folder, env=place.env)
    for attempt, word in enumerate(PROCESSES, start=1):
        place.wait_for(place.steps_of(attempt, more_than=10), limit=FIRST_STEP_S, command=command)
        os.kill(process_of(place, word), signal.SIGKILL)
    finished = command.finish(timeout=FIRST_STEP_S)
    assert finished.code == 0, finished.text
    broken, unbroken = place.run, fit({**job, "name": "unbroken"})
    assert broken.losses() == unbroken.losses() and len(broken.losses()) == 150
    assert broken.evals() == unbroken.evals()
    attempts = broken.events("attempt")
    assert [row["attempt"] for row in attempts] == [1, 2, 3, 4, 5]
    assert all(row["from_step"] > 0 for row in attempts[1:]), "each from a checkpoint"
    faults = broken.events("fault")
    assert [(row["error"], row["failed_attempt"]) for row in faults] == [("ClusterLost", n) for n in (1, 2, 3, 4)]
    assert all(re.search(words, row["message"]) for row, words in zip(faults, NAMED, strict=True))
    for row in faults:
        assert f"{row['message']}; a new private Ray starts" in finished.out, finished.text
    assert "state-dump" not in finished.text, "Ray's own pages about a dead process"
    assert "resume with" not in finished.out
    assert place.end(within=20) == []
