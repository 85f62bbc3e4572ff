"""A trial that is a complete run: a `TorchTrainer` with its own run folder, inside a Ray Tune trial.

The trial itself reserves almost nothing, since the trainer reserves the resources of its workers; a trial that reserved
them too would wait forever.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ray import tune
from rich.console import Console

from cluster.devices.amd import VISIBLE
from jobs.driver.result import Result, result_of
from jobs.driver.resume import Resumed, check_checkpoints, open_resumed
from jobs.driver.signals import StopSignals
from jobs.job.spec import load_spec
from jobs.train import train_loaded
from raytrain.config.user_code import import_from
from raytrain.errors import InputError, RunError
from raytrain.execution.driver_channel import on_stop_request
from raytrain.runs.folder import RunFolder
from raytrain.runs.sweep import SweepFolder

LOOK_EVERY_S = 0.25
STOP_S = 60.0
OLD_OWNER_S = 60.0
"""Seconds to wait for a killed command and the workers of its trial to exit."""


@dataclass(frozen=True)
class WholeTrialSettings:
    """The settings that every trial of a sweep receives.

    Attributes:
        mapping: the job, with absolute data paths.
        sweep: path of the search folder.
        folder: working directory of the command, from which users' code is imported.
        visible: those of `VISIBLE` that the command's environment sets. Ray hides the GPUs from a trial by them.
        channel: the `DriverChannel` actor through which the driver asks trials to stop.
    """

    mapping: dict[str, Any]
    sweep: str
    folder: str
    visible: Mapping[str, str]
    channel: Any


class WholeTrial(tune.Trainable):
    """Ray Tune's trainable: each `step` waits for the next evaluation of the run, the last one returns its result.

    It is a class, not a function, so that a scheduler that stops it early waits for `cleanup`, in which the run shuts
    down: a trainer whose process is killed leaves its placement group behind, and the next trial would wait forever.
    """

    def setup(self, config: dict[str, Any], settings: WholeTrialSettings | None = None) -> None:
        """Start training."""
        assert settings is not None, "it comes with tune.with_parameters"
        _as_on_the_driver(settings)
        self._settings = settings
        self._trial = _Trial(settings, int(config["number"]), list(config["overrides"]))
        self._rows = self._trial.evaluations()
        on_stop_request(settings.channel, self._trial.signals.asked.set)

    def step(self) -> dict[str, Any]:
        """{"step", "eval_loss"} of the next evaluation; at the end, the complete result.

        Raises:
            RunError: the run failed; only this trial ends.
        """
        row = next(self._rows, None)
        if row is not None:
            return row
        result = self._trial.result
        if result.status == "failed":
            raise RunError(result.reason)
        last = {**self._trial.last, "final": True, "run": result.run, "status": result.status}
        return {**last, **summary(result), "done": True}

    def cleanup(self) -> None:
        """Let the run save and return."""
        self._trial.stop()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Does nothing: the run writes its own checkpoints."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Does nothing: see `save_checkpoint`."""


def summary(result: Result) -> dict[str, Any]:
    """The figures that trials are compared by: lowest evaluation loss, and median samples/s without the first row."""
    paces = [row["samples_per_s"] for row in result.history if row["kind"] == "train" and row.get("samples_per_s")]
    losses = [row["loss"] for row in result.history if row["kind"] == "eval" and row["loss"] == row["loss"]]
    return {
        "eval_loss": min(losses, default=float("nan")),
        "samples_per_s": median(paces[1:] or paces) if paces else float("nan"),
        "steps": result.steps,
        "peak_bytes": max((row.get("peak_memory_bytes") or 0 for row in result.history), default=0) or None,
    }


class _Trial:
    """A run in its own thread, observed from Ray's thread."""

    def __init__(self, settings: WholeTrialSettings, number: int, overrides: Sequence[str]) -> None:
        self.sweep = SweepFolder(settings.sweep)
        self.name = f"trial-{number:04d}"
        self.mapping, self.overrides = settings.mapping, overrides
        self.signals = StopSignals()
        self.last: dict[str, Any] = {"step": 0, "eval_loss": float("nan")}
        self._outcome: dict[str, Any] = {}
        self._thread: threading.Thread | None = None

    @property
    def result(self) -> Result:
        """How it ended; raises what it raised."""
        if "error" in self._outcome:
            raise self._outcome["error"]
        return self._outcome["result"]

    def stop(self) -> None:
        """Ask the run to save and return, and wait for it up to `STOP_S` seconds."""
        self.signals.asked.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def evaluations(self) -> Iterator[dict[str, Any]]:
        """{"step", "eval_loss"} of each evaluation as the run writes it, until it ends."""
        seen = 0
        before = self._before()
        self._thread = thread = threading.Thread(target=self._train, args=(before,), daemon=True, name="trial")
        thread.start()
        while True:
            thread.join(LOOK_EVERY_S)
            ended = not thread.is_alive()
            path = self.sweep.run_of(self.name)
            rows = RunFolder(path).read_rows("metrics.jsonl") if path is not None else []
            evaluated = [row for row in rows if row["kind"] == "eval"]
            for row in evaluated[seen:]:
                self.last = {"step": row["step"], "eval_loss": row["loss"]}
                yield self.last
            seen = max(seen, len(evaluated))
            if ended:
                return

    def _train(self, before: Resumed | None) -> None:
        try:
            if before is not None and before.finished:
                self._outcome["result"] = result_of(before.run, before.run.read_json(before.run.result))
                return
            own = [*self.overrides, f"save.dir={self.sweep.runs}", f"name={self.name}", "telemetry.tensorboard=false"]
            loaded = before.loaded if before is not None else load_spec(mapping=self.mapping, overrides=own)
            self._outcome["result"] = train_loaded(
                loaded, resumed=before, signals=self.signals, verbose=False, console=Console(quiet=True),
                began=time.time(),
            )  # fmt: skip
        except BaseException as error:  # handed to Ray's thread, which owns the trial
            self._outcome["error"] = error

    def _before(self) -> Resumed | None:
        """The run of this trial that an earlier command started, to resume; waits until its processes have exited."""
        path, ends = self.sweep.run_of(self.name), time.monotonic() + OLD_OWNER_S
        while path is not None:
            try:
                resumed = open_resumed(path, None, [])
            except InputError:
                run = RunFolder(path)
                if not run.exists(run.job_mapping):  # it was killed before it started
                    return None
                if not run.alive() or time.monotonic() > ends:
                    raise
                time.sleep(LOOK_EVERY_S)
                continue
            try:
                if resumed is not None and not resumed.finished:
                    check_checkpoints(resumed)
            except InputError:  # all are damaged: measured again from its first step, in a folder of its own
                return None
            return resumed
        return None


def _as_on_the_driver(settings: WholeTrialSettings) -> None:
    """Set the working directory, import path and visible GPUs of this process to those of the command."""
    if os.path.isdir(settings.folder):
        os.chdir(settings.folder)
    import_from(settings.folder)
    for name in VISIBLE:
        os.environ.pop(name, None)
    os.environ.update(settings.visible)
