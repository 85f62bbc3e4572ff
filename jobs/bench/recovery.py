"""Bench `recovery`: the downtime of a run after the death of an expert host, and of a worker.

One real `raytrain train`. A host and a worker are killed with SIGKILL in turn, some steps apart. A value is the time
from the kill to the next committed and logged step, including the reload. A dead host is replaced while Ray's workers
stay alive; a dead worker restarts Ray's worker group.
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
from typing import Any

from cluster.config import Count
from jobs.bench.harness.measuring import BenchMeasurement, Check, Goal, alternate, median_interval
from jobs.bench.harness.options import BenchOptions, key
from jobs.bench.harness.processes import await_exit, log_tail
from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder

#: Restart of the worker group over replacement of a host, and seconds for the default recipe on a CPU.
GOAL, SECONDS_GOAL = Goal(at_least=1.0), Goal(at_most=5.0)
#: Environment variable that all processes of the run inherit, including Ray's workers and actors.
MARK = "RAYTRAIN_BENCH_RUN"
POLL_S = 0.01
TIMEOUT_S = 180.0
HOST, WORKER = "expert host", "worker"
TITLES = {HOST: b"ray::ExpertHost", WORKER: b"ray::RayTrainWorker"}


class RecoveryOptions(BenchOptions):
    blocks: Count = key(5, "deaths of each kind", quick=1)
    hosts: Count = key(2, "expert hosts")
    layers: Count = key(4, "of the GPT", quick=1)
    width: Count = key(128, "of the GPT", quick=32)
    save_every: Count = key(10, "steps between checkpoints", quick=5)
    steps_between: Count = key(40, "steps from one recovery to the next death", quick=12)


def run(options: RecoveryOptions, found: BenchMeasurement) -> None:
    found.block = "seconds from the kill to the next committed step"
    with tempfile.TemporaryDirectory(prefix="rtb-") as folder:
        command = RecoveryCommand(options, Path(folder))
        try:
            found.say("starting a run")
            command.await_step(options.steps_between)
            found.say(f"{options.blocks} deaths of an expert host and of a worker, in turn")
            deaths = {kind: partial(command.survive, kind) for kind in (HOST, WORKER)}
            times = alternate(deaths, blocks=options.blocks, dropped=0)
            events = command.run.read_rows(command.run.events)
        finally:
            command.end()
    rewinds = [row["seconds"] for row in events if row["kind"] == "decision" and row.get("what") == "rewind"]
    attempts = sum(row["kind"] == "attempt" for row in events)
    detail = f"{len(rewinds)} rewinds and {attempts} attempts for {options.blocks} deaths of each kind"
    passed = len(rewinds) == options.blocks and attempts == options.blocks + 1
    if not found.gate(Check("a host's death causes no restart, a worker's death one", passed, detail)):
        return
    found.arms |= times
    found.values["rewind_s"] = rewinds
    found.compare(times, of=WORKER, to=HOST, goal=GOAL)
    host = median_interval(times[HOST])
    effect = f"a run goes on {SECONDS_GOAL.at_most:g} s after the death of an expert host at the latest"
    found.claim(effect, SECONDS_GOAL.met(host.median), f"{host:.2f} s; worst {max(times[HOST]):.2f} s")


class RecoveryCommand:
    """A run of the default recipe that logs every step."""

    def __init__(self, options: RecoveryOptions, folder: Path) -> None:
        self.options = options
        overrides = [
            f"save.dir={folder / 'runs'}", "loop.log_every=1", "loop.max_steps=1000000", "loop.eval_every=1000000",
            f"save.every={options.save_every}", f"experts.hosts={options.hosts}", "precision.dtype=fp32",
            f"model.layers={options.layers}", f"model.width={options.width}", "telemetry.tensorboard=false",
        ]  # fmt: skip
        self._log, self._mark = folder / "log", uuid.uuid4().hex
        command, environment = [sys.executable, "-m", "jobs", "train", *overrides], {**os.environ, MARK: self._mark}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
        self._latest = folder / "runs" / "latest"

    @property
    def run(self) -> RunFolder:
        return RunFolder.open(str(self._latest))

    def await_step(self, step: int) -> None:
        self._until(lambda: self._latest.exists() and self._step() >= step, f"step {step}")

    def survive(self, kind: str) -> float:
        """Kill a process; returns the seconds until the next committed step. Waits for `steps_between` more steps."""
        before = self._restart_steps(kind)
        victim = self._oldest(kind)
        os.kill(victim, signal.SIGKILL)
        killed = time.perf_counter()
        self._until(lambda: len(self._restart_steps(kind)) > len(before), f"the recovery from the death of a {kind}")
        begin = int(self._restart_steps(kind)[-1])
        self._until(lambda: self._step() > begin, f"a step after {begin}")
        seconds = time.perf_counter() - killed
        self.await_step(self._step() + self.options.steps_between)
        return seconds

    def _restart_steps(self, kind: str) -> list[int]:
        """The steps from which the run continued after a rewind or with a new attempt."""
        rows = self.run.read_rows(self.run.events)
        if kind == HOST:
            return [row["value"] for row in rows if row["kind"] == "decision" and row.get("what") == "rewind"]
        return [row["from_step"] for row in rows if row["kind"] == "attempt"]

    def _step(self) -> int:
        rows = self.run.read_rows(self.run.metrics)
        return int(rows[-1]["step"]) if rows else 0

    def _oldest(self, kind: str) -> int:
        """The oldest process of this kind in this run; the stand-by host is the youngest."""
        mark = f"{MARK}={self._mark}".encode()
        found: list[tuple[int, int]] = []
        for entry in Path("/proc").iterdir():
            try:
                title, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
                if title.startswith(TITLES[kind]) and mark in environment.split(b"\0"):
                    began = int((entry / "stat").read_text().rpartition(")")[2].split()[19])
                    found.append((began, int(entry.name)))
            except OSError:  # the process has ended
                continue
        if not found:
            raise RunError(f"there is no {kind} to kill; {log_tail(self._log)}")
        return min(found)[1]

    def _until(self, done: Callable[[], Any], what: str) -> None:
        ends = time.monotonic() + TIMEOUT_S
        while not done():
            if self.process.poll() is not None or time.monotonic() > ends:
                raise RunError(f"the run ended or hung before {what}; {log_tail(self._log)}")
            time.sleep(POLL_S)

    def end(self) -> None:
        """Stop the run with SIGTERM; it saves and exits."""
        self.process.send_signal(signal.SIGTERM)
        await_exit(self.process, within_s=60.0)
