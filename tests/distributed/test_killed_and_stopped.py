"""The command is killed or stopped at any moment, and its run resumes: real processes, real signals."""

from __future__ import annotations

import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Job = Callable[..., dict[str, Any]]
FIRST_STEP_S = 150
END_S = 60


@pytest.mark.timeout(590)
@pytest.mark.covers("DATA-22", "LOOP-13", "PAR-13")
def test_a_run_that_was_killed_stopped_or_lost_a_worker_trains_as_if_uninterrupted(
    start_cli: Callable[..., Any], fit: Callable[..., Any], guest_job: Job, place: Any
) -> None:
    """Three commands that end badly in three ways, each resumed at once, the last one in a run that loses a worker.

    Workers outlive a driver that is killed by two seconds, some fifty steps.
    """
    notes = {name: place.folder / name for name in ("go", "killed")}
    job = guest_job(
        name="broken",
        model={"dropout": 0.2, "pause": 0.02, "fault": "lives_hard", "at": 2 * 110 + 1, "note": str(place.folder)},
        precision={"dtype": "fp16"},
        loop={"max_steps": 150, "micro_batch_size": 2, "eval_every": 25},
        save={"every": 5},
        scale={"workers": 3, "mode": "cpu"},
    )
    is_killed(start_cli("train", str(place.write(job)), cwd=place.folder, env=place.env), place)
    is_stopped(start_cli("train", "--resume", "runs/latest", cwd=place.folder, env=place.env), place)
    is_left(start_cli("train", "--resume", "runs/latest", cwd=place.folder, env=place.env), place)
    notes["go"].touch()
    broken = place.run
    assert fit(None, resume=broken.path).path == broken.path
    assert notes["killed"].exists()
    unbroken = fit({**job, "name": "unbroken"})
    assert len(unbroken.events("attempt")) == 1
    assert broken.losses() == unbroken.losses() and len(broken.losses()) == 150
    assert broken.evals() == unbroken.evals() and len(broken.evals()) == 6
    check_attempts(broken)
    result = broken.result
    assert (result["status"], result["steps"]) == ("done", 150)
    assert sum(result["time"].values()) == pytest.approx(result["wall_s"], rel=0.01)
    assert result["time"]["restart"] > 0
    assert broken.plan["mode"] == {"value": "cpu", "reason": "scale.mode"}


def is_killed(command: Any, place: Any) -> None:
    """SIGKILL to the whole group, in training."""
    place.wait_for(place.steps_of(1, more_than=7), limit=FIRST_STEP_S, command=command)
    command.signal_group(signal.SIGKILL)
    command.process.wait(timeout=30)
    assert not (place.run.path / "result.json").exists()


def is_stopped(command: Any, place: Any) -> None:
    """SIGTERM to the command: it saves, and leaves nothing of itself behind, which was private while it ran."""
    place.wait_for(place.steps_of(2, more_than=4), limit=FIRST_STEP_S, command=command)
    listening = place.listening()
    (home,) = [home for home in place.temp.glob("rt-*") if (home / "token").exists()]  # not the killed command's
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (home, home / "token")]
    command.process.send_signal(signal.SIGTERM)
    stopped = command.finish(timeout=END_S)
    assert stopped.code == 130, stopped.text
    assert "Warning" not in stopped.out + stopped.err, stopped.text
    assert listening and listening <= {"127.0.0.1", "::1"}, listening
    assert modes == [0o700, 0o600]
    run = place.run
    result = run.result
    assert result["status"] == "interrupted" and result["weights"] is None
    assert result["steps"] == run.losses()[-1][0] == run.checkpoints()[-1] < 110
    assert (run.path / "report" / "report.html").exists()
    assert stopped.out.count("rank 0 came to this life") == 1, stopped.text
    assert "rank 1 came" not in stopped.out + stopped.err, (
        "only rank 0 prints to the console; each worker has its own log"
    )
    for rank in (0, 1, 2):
        assert f"rank {rank} came to this life" in (run.path / "logs" / f"rank_{rank:05d}.log").read_text()


def is_left(command: Any, place: Any) -> None:
    """Ctrl-C while rank 0 hangs in step 111 and does not come to save; the second one leaves at once."""
    run = place.run
    place.wait_for(lambda: run.losses()[-1][0] == 110, limit=FIRST_STEP_S, command=command)
    command.signal_group(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        command.process.wait(timeout=1)
    command.signal_group(signal.SIGINT)
    left = command.finish(timeout=END_S)
    assert left.code == 130, left.text
    assert "stopping: the workers save and return" in left.out
    newest = f"the newest checkpoint is of step {run.checkpoints()[-1]}"
    assert f"\nexited without waiting for the workers; {newest}\n" in left.out
    assert run.result["status"] == "interrupted" and run.result["reason"] == "exited without waiting for the workers"
    assert place.end(within=20) == []


def check_attempts(broken: Any) -> None:
    """Three commands and their two successors, each from a later checkpoint; only the worker's death is a fault."""
    attempts = broken.events("attempt")
    assert [row["attempt"] for row in attempts] == [1, 2, 3, 4, 5]
    steps = [row["from_step"] for row in attempts]
    assert steps[0] == 0 < steps[1] < steps[2] <= steps[3] < steps[4] and steps[3] <= 110, attempts
    assert {row["precision"] for row in attempts} == {"fp16"}, "a lost worker is not a failure of the precision"
    (fault,) = broken.events("fault")
    assert (fault["error"], fault["rank"], fault["failed_attempt"]) == ("WorkerDied", 1, 4)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("moment", "number"), [("imports", signal.SIGINT), ("ray starts", signal.SIGTERM), ("workers start", signal.SIGHUP)]
)
def test_a_signal_during_start_up_ends_the_command_at_once(
    start_cli: Callable[..., Any], guest_job: Job, place: Any, moment: str, number: int
) -> None:
    job = guest_job(model={"builder": "guest_code:waiting_net"})
    command = start_cli("train", str(place.write(job)), cwd=place.folder, env=place.env)
    maps = Path(f"/proc/{command.process.pid}/maps")
    reached = {
        "imports": lambda: "libtorch" in maps.read_text(),
        "ray starts": lambda: list(place.temp.glob("rt-*/r/session_*/sockets")),
        "workers start": lambda: place.titles("RayTrainWorker"),
    }
    place.wait_for(reached[moment], limit=FIRST_STEP_S, command=command)
    command.process.send_signal(number)
    ended = command.finish(timeout=END_S)
    assert ended.code == 130, ended.text
    assert "Traceback" not in ended.text and "Exception" not in ended.text, ended.text
    assert place.end(within=20) == [] and list(place.temp.glob("rt-*")) == []
    if moment == "imports":
        assert not (place.folder / "runs").exists()
        return
    run = place.run
    assert run.result["status"] == "interrupted" and run.result["steps"] == 0
    assert run.losses() == [] and run.checkpoints() == [] and not (run.path / "weights").exists()
    assert f"raytrain train --resume {run.path.relative_to(place.folder)}" in ended.out.replace("\n", "")
