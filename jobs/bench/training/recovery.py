"""Bench `recovery`: how long a run stands still when an expert host dies, and when a worker does.

One real `raytrain train`. A host and a worker are killed with SIGKILL in turn, each some steps after the last; a value
is the time from the kill to the next step that is committed and on record, reload included. A dead host is replaced
while Ray's workers stay; a dead worker is a restart of Ray's worker group.
"""

from __future__ import annotations

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
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, Say, alternate, compare, median_interval
from jobs.bench.harness.options import BenchOptions
from jobs.bench.harness.processes import await_exit, restored_environment
from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder

#: A host's death against a restart of the worker group, and seconds for the default recipe on a CPU.
GOAL, SECONDS_GOAL = Goal(at_least=1.0), Goal(at_most=5.0)
#: Every process of the run inherits it, Ray's workers and actors too.
MARK = "RAYTRAIN_BENCH_RUN"
POLL_S = 0.01
PATIENCE_S = 180.0
HOST, WORKER = "expert host", "worker"
TITLES = {HOST: b"ray::ExpertHost", WORKER: b"ray::RayTrainWorker"}


class RecoveryOptions(BenchOptions):
    """Deaths of an expert host and of a worker in a run of the default recipe."""

    MEASURES: ClassVar[str] = "interruption of a run when an expert host dies, against that of a dead worker"
    QUICK: ClassVar[dict[str, Any]] = {"blocks": 1, "layers": 1, "width": 32, "steps_between": 12, "save_every": 5}

    blocks: Count = Field(5, description="deaths of each kind")
    hosts: Count = Field(2, description="expert hosts")
    layers: Count = Field(4, description="of the GPT")
    width: Count = Field(128, description="of the GPT")
    save_every: Count = Field(10, description="steps between checkpoints")
    steps_between: Count = Field(40, description="steps from one recovery to the next death")


def run(options: RecoveryOptions, *, quick: bool, say: Say) -> BenchMeasurement:
    """Measure; see `RecoveryOptions`.

    Raises:
        RunError: the run ended, or did not go on in time.
    """
    found = BenchMeasurement(
        "recovery", quick, options.model_dump(), "seconds from the kill to the next committed step"
    )
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder, restored_environment():
        os.environ[MARK] = uuid.uuid4().hex
        command = RecoveryCommand(options, Path(folder))
        try:
            say("starting a run")
            command.await_step(options.steps_between)
            say(f"{options.blocks} deaths of an expert host and of a worker, in turn")
            turns = {kind: partial(command.survive, kind) for kind in (HOST, WORKER)}
            times = alternate(turns, blocks=options.blocks, dropped=0)
            events = command.run.read_rows(command.run.events)
        finally:
            command.end()
    rewinds = [row["seconds"] for row in events if row["kind"] == "decision" and row.get("what") == "rewind"]
    attempts = sum(row["kind"] == "attempt" for row in events)
    detail = f"{len(rewinds)} rewinds and {attempts} attempts for {options.blocks} deaths of each kind"
    passed = len(rewinds) == options.blocks and attempts == options.blocks + 1
    if not found.gate(Check("a host's death costs no restart, a worker's one", passed, detail)):
        return found
    found.arms |= times
    found.values["rewind_s"] = rewinds
    ratio = compare(times, of=WORKER, to=HOST, name=f"{WORKER} / {HOST}", goal=GOAL)
    found.ratios.append(ratio)
    host = median_interval(times[HOST])
    found.claim(
        "an expert host's death costs less than a restart of Ray's worker group, and at most 5 s",
        ratio.low > 1 and SECONDS_GOAL.met(host.median),
        f"{host.median:.2f} s [{host.low:.2f}, {host.high:.2f}] against "
        f"{median_interval(times[WORKER]).median:.2f} s; worst {max(times[HOST]):.2f} s",
    )
    return found


class RecoveryCommand:
    """A run of the default recipe, every step on record."""

    def __init__(self, options: RecoveryOptions, folder: Path) -> None:
        self.options = options
        overrides = [
            f"save.dir={folder / 'runs'}", "loop.log_every=1", "loop.max_steps=1000000", "loop.eval_every=1000000",
            f"save.every={options.save_every}", f"experts.hosts={options.hosts}", "precision.dtype=fp32",
            f"model.layers={options.layers}", f"model.width={options.width}", "telemetry.tensorboard=false",
        ]  # fmt: skip
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jobs", "train", *overrides], stdout=log, stderr=log, cwd=folder
            )
        self._latest = folder / "runs" / "latest"

    @property
    def run(self) -> RunFolder:
        """Its folder."""
        return RunFolder.open(str(self._latest))

    def await_step(self, step: int) -> None:
        """Until this step is on record."""
        self._until(lambda: self._latest.exists() and self._step() >= step, f"step {step}")

    def survive(self, kind: str) -> float:
        """Kill one; the seconds until a step is committed again. Returns some steps after."""
        before = self._returns(kind)
        victim = self._oldest(kind)
        os.kill(victim, signal.SIGKILL)
        killed = time.perf_counter()
        self._until(lambda: len(self._returns(kind)) > len(before), f"what follows the death of a {kind}")
        begin = int(self._returns(kind)[-1])
        self._until(lambda: self._step() > begin, f"a step after {begin}")
        seconds = time.perf_counter() - killed
        self.await_step(self._step() + self.options.steps_between)
        return seconds

    def _returns(self, kind: str) -> list[int]:
        """The steps that the run went back to, by a rewind or by a new attempt."""
        rows = self.run.read_rows(self.run.events)
        if kind == HOST:
            return [row["value"] for row in rows if row["kind"] == "decision" and row.get("what") == "rewind"]
        return [row["from_step"] for row in rows if row["kind"] == "attempt"]

    def _step(self) -> int:
        rows = self.run.read_rows(self.run.metrics)
        return int(rows[-1]["step"]) if rows else 0

    def _oldest(self, kind: str) -> int:
        """The process of this run that has lived longest: the one that stands by is the youngest host."""
        mark = f"{MARK}={os.environ[MARK]}".encode()
        found: list[tuple[int, int]] = []
        for entry in Path("/proc").iterdir():
            try:
                title, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
                if title.startswith(TITLES[kind]) and mark in environment.split(b"\0"):
                    began = int((entry / "stat").read_text().rpartition(")")[2].split()[19])
                    found.append((began, int(entry.name)))
            except OSError:  # it has ended meanwhile
                continue
        if not found:
            raise RunError(f"there is no {kind} to kill; {self._end_of_log()}")
        return min(found)[1]

    def _until(self, done: Callable[[], Any], what: str) -> None:
        ends = time.monotonic() + PATIENCE_S
        while not done():
            if self.process.poll() is not None or time.monotonic() > ends:
                raise RunError(f"the run ended or stood still before {what}; {self._end_of_log()}")
            time.sleep(POLL_S)

    def _end_of_log(self) -> str:
        return f"its log ends with:\n{self._log.read_text(errors='replace')[-2000:]}"

    def end(self) -> None:
        """Stop it as a user would; it saves and leaves."""
        self.process.send_signal(signal.SIGTERM)
        await_exit(self.process, within_s=60.0)
