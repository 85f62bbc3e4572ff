"""Bench `restart`: the downtime of a run after the death of a worker, against that of a bare `TorchTrainer`.

Both train the same dense model, save every few steps, and restart all workers from the latest checkpoint. A value is
the time from the SIGKILL of a worker to the end of the first step of the workers that replace the group.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.inputs import gpt_model, job_of, write_text
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import await_exit, log_tail, restored_environment
from raytrain.config.decode import dump_yaml
from raytrain.errors import RunError

#: Seconds of `raytrain train` over those of Ray's own restart.
GOAL = Goal(at_most=1.2)
#: Environment variable: the file in which the workers note each step, `PID STEP` in a line.
NOTE = "RAYTRAIN_BENCH_STEPS"
TIMEOUT_S = 240.0
OURS, BARE = "raytrain train", "TorchTrainer"


class RestartOptions(BenchOptions):
    """Deaths of a worker."""

    MEASURES: ClassVar[str] = "interruption of a run when a worker dies, against that of a bare TorchTrainer"
    QUICK: ClassVar[dict[str, Any]] = {
        "blocks": 1, "dropped": 0, "layers": 1, "width": 16, "context": 16, "batch": 4, "steps_before": 11,
    }  # fmt: skip

    blocks: Count = Field(5, description="runs of each kind, with one death each")
    dropped: int = Field(1, ge=0, description="runs before those, which fill the page cache")
    workers: Count = Field(2, description="workers of a run")
    layers: Count = Field(4, description="of the GPT")
    heads: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    context: Count = Field(64, description="tokens of a row")
    batch: Count = Field(12, description="rows of a step, over all workers")
    save_every: Count = Field(10, description="steps between checkpoints")
    steps_before: Count = Field(25, description="steps before the death")


class StepNotes:
    """An observer of our run: notes each step."""

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "train":
            note_step(row["step"])


def note_step(step: int) -> None:
    """Append the step and this process to the notes; called by one worker of a run."""
    with open(os.environ[NOTE], "a") as notes:
        notes.write(f"{os.getpid()} {step}\n")


def run(options: RestartOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `RestartOptions`.

    Raises:
        RunError: a run ended, or did not go on in time.
    """
    found = BenchMeasurement("restart", quick, options.model_dump(), "seconds from the death to the next step")
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder, restored_environment():
        place = Path(folder)
        text = write_text(place, batch=options.batch, context=options.context, steps=50, seed=options.seed)
        job, settings = _our_job(options, place, text), _settings(options, place, text)
        commands = {
            OURS: [sys.executable, "-m", "jobs", "train", str(job)],
            BARE: [sys.executable, "-m", "jobs.bench.failures.torch_trainer", str(settings)],
        }
        say(f"{options.dropped + options.blocks} runs of each kind, with one death each")
        lost: dict[str, list[int]] = {name: [] for name in commands}
        arms = {name: partial(_downtime, command, place, options, lost[name]) for name, command in commands.items()}
        times = alternate(arms, blocks=options.blocks, dropped=options.dropped)
    steps = max(max(repeated) for repeated in lost.values())
    # a save that was under way at the death does not count
    both = Check(
        "both go on from a checkpoint", steps <= 2 * options.save_every, f"at most {steps} steps were repeated"
    )
    found.arms |= times
    found.values["steps_repeated"] = lost
    if not found.gate(both):
        return found
    found.compare(times, of=OURS, to=BARE, goal=GOAL, name="seconds of a restart, raytrain train / TorchTrainer")
    return found


def _threads(options: RestartOptions) -> int:
    return max(1, options.thread_count // options.workers)


def _our_job(options: RestartOptions, place: Path, text: Path) -> Path:
    job = job_of(
        options, gpt_model(options), text, name="restart", workers=options.workers, threads=_threads(options),
        precision={"dtype": "fp32"}, loop={"global_batch_size": options.batch, "log_every": 1},
        save={"dir": str(place / "runs"), "every": options.save_every},
        telemetry={"observers": ["jobs.bench.failures.restart:StepNotes"], "tensorboard": False},
    )  # fmt: skip
    path = place / "job.yaml"
    path.write_text(dump_yaml(job))
    return path


def _settings(options: RestartOptions, place: Path, text: Path) -> Path:
    keys = ("layers", "heads", "width", "context", "workers", "save_every", "seed")
    settings = {key: getattr(options, key) for key in keys}
    settings |= {"batch": options.batch // options.workers, "threads": _threads(options), "text": str(text),
                 "storage": str(place / "storage")}  # fmt: skip
    path = place / "settings.json"
    path.write_text(json.dumps(settings))
    return path


def _downtime(command: list[str], place: Path, options: RestartOptions, repeated: list[int]) -> float:
    """Seconds from the death of a worker to the next step; appends how many steps ran again to `repeated`.

    Raises:
        RunError: the run ended, or did not go on in time.
    """
    notes, log = place / f"steps-{uuid.uuid4().hex}", place / "log"
    environment = {**os.environ, NOTE: str(notes)}
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=place, env=environment)
    try:
        before = _until(lambda: _after(notes, options.steps_before), process, log)
        os.kill(before[0], signal.SIGKILL)
        killed = time.perf_counter()
        last = _last(notes)
        after = _until(lambda: _first_of_another(notes, before[0]), process, log)
        seconds = time.perf_counter() - killed
        repeated.append(max(0, last[1] + 1 - after[1]))
    finally:
        process.send_signal(signal.SIGINT)
        await_exit(process, within_s=60.0)
    return seconds


def _lines(notes: Path) -> list[tuple[int, int]]:
    """(PID, step) of each complete line."""
    text = notes.read_text() if notes.exists() else ""
    rows = [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]
    return [(int(pid), int(step)) for pid, step in rows]


def _last(notes: Path) -> tuple[int, int]:
    return _lines(notes)[-1]


def _after(notes: Path, step: int) -> tuple[int, int] | None:
    lines = _lines(notes)
    return lines[-1] if lines and lines[-1][1] >= step else None


def _first_of_another(notes: Path, pid: int) -> tuple[int, int] | None:
    return next((line for line in _lines(notes) if line[0] != pid), None)


def _until(
    reached: Callable[[], tuple[int, int] | None], process: subprocess.Popen[bytes], log: Path
) -> tuple[int, int]:
    ends = time.monotonic() + TIMEOUT_S
    while (found := reached()) is None:
        if process.poll() is not None or time.monotonic() > ends:
            raise RunError(f"the run ended or hung; {log_tail(log)}")
        time.sleep(0.005)
    return found
