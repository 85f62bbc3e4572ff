"""Bench `kills`: whether a run stays usable after kills at any moment. It measures no speed.

First a process that saves checkpoints in a loop is killed again and again, at random moments within a save. Then whole
runs with expert hosts, all of their processes at once; each is resumed from the run folder alone.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Say
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import await_exit, log_tail
from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder

#: A kill comes at a random moment within this time after a save began.
SAVE_S = 0.05
TIMEOUT_S = 240.0


class KillsOptions(BenchOptions):
    """Kills at any moment."""

    MEASURES: ClassVar[str] = "whether a run is usable after kills: of a saving process, and of whole runs"
    QUICK: ClassVar[dict[str, Any]] = {"kills": 5, "run_kills": 1, "values": 20_000}

    kills: Count = Field(100, description="kills of a process that saves in a loop")
    run_kills: Count = Field(5, description="kills of all processes of a run with expert hosts")
    hosts: Count = Field(2, description="expert hosts of that run")
    values: Count = Field(1_000_000, description="values of a checkpoint")
    save_every: Count = Field(5, description="steps between checkpoints of that run")


def run(options: KillsOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Kill, and look at what is left; see `KillsOptions`.

    Raises:
        RunError: a resumed run did not go on in time.
    """
    found = BenchMeasurement("kills", quick, options.model_dump(), "a usable checkpoint after each kill")
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder:
        say(f"{options.kills} kills of a process that saves")
        usable, torn = _kill_saves(options, RunFolder(str(Path(folder) / "saves")))
        say(f"{options.run_kills} kills of a whole run with {options.hosts} expert hosts")
        resumed, repeated = _kill_runs(options, Path(folder))
    found.values |= {"usable": usable, "torn": torn, "resumed_from": resumed, "steps_repeated": repeated}
    every = f"{usable} of {options.kills} were usable; {torn} kills left a checkpoint that was not complete"
    exact = "after each kill of a saving process, the newest complete checkpoint is exact"
    found.gate(Check(exact, usable == options.kills, every))
    most = max(repeated, default=0)
    found.gate(
        Check("each killed run goes on", most <= 2 * options.save_every, f"{len(resumed)} resumed, {most} steps again")
    )
    found.claim("no kill leaves an unusable run", found.passed, f"{every}; {len(resumed)} runs resumed")
    return found


def _kill_saves(options: KillsOptions, folder: RunFolder) -> tuple[int, int]:
    """(kills after which the newest valid checkpoint is exact and not older than the one before, incomplete ones)."""
    import torch

    from raytrain.checkpoint.reader import newest_valid

    torch.set_num_threads(1)  # the threads of OpenMP are not there in a forked process, which would wait for them
    draw, newest, usable, torn = random.Random(options.seed), 0, 0, 0
    for _ in range(options.kills):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _save_forever(folder, newest, options.values, writing)
        for _ in range(draw.randint(2, 3)):  # a save returns after the one before it is complete
            os.read(reading, 1)
        select.select([], [], [], draw.uniform(0, SAVE_S))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        found = newest_valid(folder)
        loaded, torn = found.checkpoint, torn + bool(found.refused)
        exact = loaded is not None and bool((loaded.parts["model"]["w"] == float(loaded.step)).all())
        usable += exact and loaded is not None and loaded.step > newest
        newest = loaded.step if loaded is not None else newest
    return usable, torn


def _save_forever(folder: RunFolder, start: int, values: int, pipe: int) -> None:
    """In the child: a checkpoint for each step, and a byte for each save that returned."""
    import torch

    from raytrain.checkpoint.writer import CheckpointWriter

    writer = CheckpointWriter(folder, keep=2, asynchronous=True)
    for step in range(start + 1, 10**9):
        writer.save({"model": {"w": torch.full((values,), float(step))}}, {"step": step}, step=step)
        os.write(pipe, b".")


def _kill_runs(options: KillsOptions, place: Path) -> tuple[list[int], list[int]]:
    """(the step from which each killed run went on, how many steps it repeated)."""
    draw, latest = random.Random(options.seed), place / "runs" / "latest"
    command = [
        sys.executable, "-m", "jobs", "train", f"save.dir={place / 'runs'}", "loop.log_every=1",
        "loop.max_steps=1000000", f"save.every={options.save_every}", f"experts.hosts={options.hosts}",
        "precision.dtype=fp32", "model.layers=1", "model.width=32", "telemetry.tensorboard=false",
    ]  # fmt: skip
    resumed: list[int] = []
    repeated: list[int] = []
    last = 0
    for number in range(options.run_kills + 1):
        process = _started(command if number == 0 else [*command[:4], "--resume", str(latest)], place)
        _until(lambda count=number + 1: len(_starts(latest)) >= count, process, place)
        begin = _starts(latest)[-1]
        if number:
            resumed.append(begin)
            repeated.append(last - begin)
        goal = begin + draw.randint(1, 4 * options.save_every)
        _until(lambda step=goal: _last_step(latest) >= step, process, place)
        select.select([], [], [], draw.uniform(0, 0.2))
        if number == options.run_kills:
            process.send_signal(signal.SIGTERM)
            await_exit(process, within_s=60.0)
        else:
            _kill_all(process)
            last = _last_step(latest)
    return resumed, repeated


def _started(command: list[str], place: Path) -> subprocess.Popen[bytes]:
    with (place / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=place, start_new_session=True)


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the command and all processes below it."""
    below = [process.pid]
    for pid in below:
        for thread in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                below += map(int, thread.read_text().split())
            except OSError:  # it has ended
                continue
    for pid in below:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def _rows(latest: Path, name: str, kind: str) -> list[dict[str, Any]]:
    if not latest.exists():
        return []
    run = RunFolder.open(str(latest))
    return [row for row in run.read_rows(getattr(run, name)) if row["kind"] == kind]


def _starts(latest: Path) -> list[int]:
    """The step from which each attempt started."""
    return [int(row["from_step"]) for row in _rows(latest, "events", "attempt")]


def _last_step(latest: Path) -> int:
    rows = _rows(latest, "metrics", "train")
    return int(rows[-1]["step"]) if rows else 0


def _until(reached: Callable[[], bool], process: subprocess.Popen[bytes], place: Path) -> None:
    ends = time.monotonic() + TIMEOUT_S
    while not reached():
        if process.poll() is not None or time.monotonic() > ends:
            raise RunError(f"the run ended or hung; {log_tail(place / 'log')}")
        time.sleep(0.02)
