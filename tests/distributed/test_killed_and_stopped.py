"""The whole command dies or is stopped, at any moment, and goes on: real processes, real signals."""

from __future__ import annotations

import json
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
    for attempt in (1, 2):
        what = ["--resume", "runs/latest"] if attempt > 1 else [str(place.write(job))]
        command = start_cli("train", *what, cwd=place.folder, env=place.env)
        place.wait_for(place.steps_of(attempt, more_than=7), limit=FIRST_STEP_S, command=command)
        command.signal_group(signal.SIGKILL)
        killed = place.run
        assert not (killed.path / "result.json").exists()
    assert fit(None, resume=killed.path).path == killed.path
    unbroken = fit({**job, "name": "unbroken"})
    assert killed.losses() == unbroken.losses() and len(killed.losses()) == 120
    assert killed.evals() == unbroken.evals() and len(killed.evals()) == 6
    attempts = [(row["attempt"], row["from_step"]) for row in killed.events("attempt")]
    assert [number for number, _ in attempts] == [1, 2, 3]
    assert 0 == attempts[0][1] < attempts[1][1] <= attempts[2][1] < 120, attempts
    result = killed.result
    assert (result["status"], result["steps"]) == ("done", 120)
    assert sum(result["time"].values()) == pytest.approx(result["wall_s"], rel=0.01)


@pytest.mark.timeout(580)
@pytest.mark.covers("PAR-13", "LOOP-01", "PAR-14")
def test_a_command_of_two_workers_talks_once_keeps_to_itself_and_stops_when_told(
    start_cli: Callable[..., Any], fit: Callable[..., Any], guest_job: Job, place: Any
) -> None:
    job = guest_job(
        model={"fault": "talks_and_later_waits", "at": 60, "note": str(place.folder / "go"), "pause": 0.03},
        optim={"lr": 0.03},
        loop={"max_steps": 90, "eval_every": 30},
        save={"every": 15},
        scale={"workers": 2},
    )
    command = start_cli("train", str(place.write(job)), cwd=place.folder, env=place.env)
    place.wait_for(place.steps_of(1, more_than=4), limit=FIRST_STEP_S, command=command)
    listening = place.listening()
    (home,) = place.temp.glob("rt-*")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (home, home / "token")]
    command.process.send_signal(signal.SIGTERM)
    stopped = command.finish(timeout=END_S)
    assert stopped.code == 130, stopped.text
    assert listening and listening <= {"127.0.0.1", "::1"}, listening
    assert modes == [0o700, 0o600]
    check_console(stopped, place.run)
    check_saved_where_it_stopped(place.run)
    assert place.end(within=20) == [] and list(place.temp.glob("rt-*")) == []

    command = start_cli("train", "--resume", "runs/latest", cwd=place.folder, env=place.env)
    run = place.run
    place.wait_for(lambda: run.losses()[-1][0] == 59, limit=FIRST_STEP_S, command=command)
    command.signal_group(signal.SIGINT)  # as Ctrl-C does; rank 0 hangs in step 60 and does not come to save
    with pytest.raises(subprocess.TimeoutExpired):
        command.process.wait(timeout=1)
    command.signal_group(signal.SIGINT)
    left = command.finish(timeout=END_S)
    assert left.code == 130, left.text
    assert "stopping: the workers save and return" in left.out
    assert run.result["status"] == "interrupted" and run.result["reason"] == "left without waiting for the workers"
    assert place.end(within=20) == []

    (place.folder / "go").touch()
    done = fit(None, resume=run.path)
    assert done.path == run.path and done.result["status"] == "done"
    assert [step for step, _ in done.losses()] == list(range(1, 91))
    assert done.evals()[-1][1] < 0.5 * done.evals()[0][1] and done.result["best_eval_loss"] == done.evals()[-1][1]
    manifests = {step: json.loads((done.checkpoint(step) / "manifest.json").read_text()) for step in done.checkpoints()}
    assert manifests[90]["eval_loss"] == done.evals()[-1][1] and manifests[90]["world_size"] == 2
    assert done.plan["strategy"]["value"] == "data_parallel"


def check_console(stopped: Any, run: Any) -> None:
    """Rank 0's line stands on the console once, rank 1's nowhere; each has its own log."""
    assert stopped.out.count("pass 3 of rank 0") == 1, stopped.text
    assert "pass 3 of rank 1" not in stopped.out + stopped.err
    assert "Warning" not in stopped.out + stopped.err, stopped.text
    for rank in (0, 1):
        assert (run.path / "logs" / f"rank_{rank:05d}.log").read_text().count(f"pass 3 of rank {rank}") == 1


def check_saved_where_it_stopped(run: Any) -> None:
    """The step after which the workers returned is on disk, and the record says how to go on."""
    result = run.result
    assert result["status"] == "interrupted" and result["weights"] is None
    assert 5 <= result["steps"] < 60
    assert result["steps"] == run.losses()[-1][0] == run.checkpoints()[-1]
    assert (run.path / "report" / "report.html").exists()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("moment", "number"), [("imports", signal.SIGINT), ("ray starts", signal.SIGTERM), ("workers start", signal.SIGINT)]
)
def test_a_signal_during_start_up_ends_the_command_at_once(
    start_cli: Callable[..., Any], guest_job: Job, place: Any, moment: str, number: int
) -> None:
    command = start_cli("train", str(place.write(guest_job())), cwd=place.folder, env=place.env)
    maps = Path(f"/proc/{command.process.pid}/maps")
    come = {
        "imports": lambda: "libtorch" in maps.read_text(),
        "ray starts": lambda: list(place.temp.glob("rt-*/r/session_*/sockets")),
        "workers start": lambda: place.titles("RayTrainWorker"),
    }
    place.wait_for(come[moment], limit=FIRST_STEP_S, command=command)
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
    assert f"raytrain train --resume {run.path}" in ended.out.replace("\n", "")
