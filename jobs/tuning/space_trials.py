"""The search over the keys of `tune.space`: complete runs as trials of Ray Tune, and their result.

A trial is a `TorchTrainer` with its own run folder inside a Ray Tune trial. The trial itself reserves almost nothing,
since the trainer reserves the resources of its workers; a trial that reserved them too would wait forever.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ray import PlacementGroupID, tune
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from rich.console import Console

from cluster.devices.gpus import VISIBLE
from cluster.wording import counted
from jobs.driver.result import Result, result_of
from jobs.driver.run_folder import Resumed, check_checkpoints, open_resumed
from jobs.driver.runtime import Cluster
from jobs.driver.signals import StopSignals
from jobs.job.facts import path_from_here
from jobs.job.spec import load_spec
from jobs.train import train_loaded
from jobs.tuning.driver import TuneCommand
from jobs.tuning.space_points import LOOKS, Point, Points, values_text
from jobs.tuning.trials import DONE, TrialLines, close_channel, has_died, keep_row, run_trials, why
from raytrain.config.user_code import import_from
from raytrain.errors import InputError, RunError
from raytrain.execution.driver_channel import on_stop_request, open_channel
from raytrain.plan.choice import figure_text
from raytrain.runs.folder import RunFolder, SweepFolder

TRIAL_RESOURCES = {"CPU": 0.001}
"""The resources of the trial itself; its run reserves its own."""
LOOK_EVERY_S = 0.25
STOP_S = 60.0
OLD_OWNER_S = 60.0
"""Seconds to wait for a killed command and the workers of its trial to exit."""


def run_points(command: TuneCommand, points: Points, *, at_a_time: int, cluster: Cluster, private: bool) -> SpaceTrials:
    """Run a trial for each point; `private`: no other program uses the Ray cluster.

    Raises:
        RunError, Interrupted.
    """
    command.activity.begin("preparing the trials")
    spec, sweep = command.spec, command.the_sweep
    pace = f"{at_a_time} at a time" if min(at_a_time, len(points.trials)) > 1 else "one at a time"
    early = {"none": "", "asha": "; ASHA stops trials early", "median": "; trials below the median stop early"}
    text = f"{counted(len(points.trials), 'complete run')}, {pace}{early[spec.tune.scheduler]}"
    command.print_line(f"{text}; search folder {path_from_here(sweep.path)}")
    for values, reason in points.left_out:
        command.print_line(f"left out: {values_text(values)}: {reason}")
    lines = TrialLines(command.activity, command.print_line)
    trials = SpaceTrials(points.trials, sweep=sweep, lines=lines, metric=spec.tune.metric, private=private)
    channel = open_channel()
    visible = {name: os.environ[name] for name in VISIBLE if name in os.environ}
    settings = SpaceTrialSettings(command.job_mapping(), sweep.path, os.getcwd(), visible, channel)

    def stop() -> None:
        trials.stopping = True
        command.print_line("stopping: the trials save and exit (a second signal exits at once)")
        close_channel(channel)

    run_trials(
        tune.with_parameters(SpaceTrial, settings=settings), trials,
        storage=command.storage(cluster), resources={name.lower(): one for name, one in TRIAL_RESOURCES.items()},
        at_a_time=at_a_time, sweep=sweep, signals=command.signals, stop=stop, grace_s=spec.retry.stop_grace_s,
        scheduler=scheduler_of(spec.tune.scheduler, points, curves=curves_of(sweep.standing())),
    )  # fmt: skip
    return trials


# -- which trials ---------------------------------------------------------------------------------


class SpaceTrials:
    """`trials.Trials` of a list of points: proposes the remaining ones, and records results."""

    def __init__(
        self, points: Sequence[Point], *, sweep: SweepFolder, lines: TrialLines, metric: str, private: bool
    ) -> None:
        """`private`: no other program uses the Ray cluster."""
        self._sweep, self._lines, self.metric, self._private = sweep, lines, metric, private
        self._running: set[int] = set()
        self._has_stale_reservations = False
        self._points = {one.number: one for one in points}
        self.rows: dict[int, dict[str, Any]] = {row["trial"]: row for row in sweep.standing()}
        self._dead = {row["trial"] for row in sweep.again()}
        self._left = [one for one in points if one.number not in self.rows]
        self._began: dict[int, float] = {}
        self.stopping = False

    def propose(self) -> dict[str, Any] | str | None:
        """The next point's number and overrides."""
        if not self._left or self.stopping:
            return DONE
        if self._has_stale_reservations and self._running:
            return None  # reservations of a dead trial are distinguishable only after the running trials end
        if self._has_stale_reservations:
            remove_reservations()
            self._has_stale_reservations = False
        point = self._left.pop(0)
        done = f"{len(self.rows)} of {len(self._points)} done"
        self._lines.propose(point.number, f"{values_text(point.values)}; {done}")
        return {"number": point.number, "overrides": list(point.overrides)}

    def started(self, config: dict[str, Any]) -> None:
        """Called when the trial's process has started."""
        self._began[config["number"]] = time.time()
        self._running.add(config["number"])
        need = None if self._private else self._points[config["number"]].need
        self._lines.start(config["number"], need)

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """Record the result of a trial, except one that was asked to stop: a resumed search continues it."""
        point = self._points[config["number"]]
        self._running.discard(point.number)
        if self._private and has_died(error):
            self._has_stale_reservations = True
        if self.stopping or result.get("status") == "interrupted":
            return
        outcome, reason, deaths = "ok", "", 0
        if has_died(error):
            deaths = 1 + (point.number in self._dead)
            outcome, reason = "died", why(error) + (", and once before" if deaths > 1 else "")
        elif error is not None:
            outcome, reason = "error", why(error)
        elif not result.get("final"):
            outcome, reason = "stopped", f"behind the others at step {result.get('step')}"
        elif not math.isfinite(result.get(self.metric, math.nan)):
            outcome, reason = "nonfinite", f"its {self.metric} is not finite"
        now = time.time()
        row = {
            "trial": point.number,
            "values": point.values,
            "outcome": outcome,
            "reason": reason,
            **({"deaths": deaths} if deaths else {}),
            "eval_loss": result.get("eval_loss", math.nan),
            "samples_per_s": result.get("samples_per_s"),
            "steps": result.get("steps", result.get("step")),
            "peak_bytes": result.get("peak_bytes"),
            "run": result.get("run") or self._sweep.run_of(f"trial-{point.number:04d}"),
            "time": now,
            "wall_s": now - self._began.get(point.number, now),
        }
        keep_row(self._sweep, row, error)
        self.rows[point.number] = row
        *figures, note = run_cells(row, ())
        units = ("steps", "eval loss", "samples/s")
        parts = [f"{value} {unit}" for value, unit in zip(figures, units, strict=True) if value]
        self._lines.end(point.number, f"{values_text(point.values)}: {', '.join(filter(None, [*parts, note]))}")


def run_cells(row: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """A trial in the table: values, figures, and a note about how it ended."""

    def number(value: Any) -> str:
        usable = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        return figure_text(value) if usable else ""

    values = [number(row["values"].get(key)) or str(row["values"].get(key)) for key in keys]
    figures = [number(row.get(name)) for name in ("steps", "eval_loss", "samples_per_s")]
    notes = {"ok": "", "stopped": "ended early", "died": row.get("reason", "")}
    return [*values, *figures, notes.get(row["outcome"], f"{row['outcome']}: {row.get('reason', '')}")]


def remove_reservations() -> None:
    """Remove the reservations of trainers that died; nothing but Ray Tune may run on the cluster."""
    for key, group in placement_group_table().items():
        own = all(bundle == TRIAL_RESOURCES for bundle in group["bundles"].values())
        if group["state"] != "REMOVED" and not own:
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(key))))


@dataclass(frozen=True)
class EndedTrial:
    """The attributes of a trial that a scheduler reads."""

    trial_id: str


class PatientMedian(MedianStoppingRule):
    """Ray's rule without its pauses: a paused run would start its processes again."""

    def _on_insufficient_samples(self, tune_controller: Any, trial: Any, time: float) -> str:
        return TrialScheduler.CONTINUE


def scheduler_of(name: str, points: Points, *, curves: Mapping[int, Sequence[tuple[int, float]]]) -> Any:
    """Ray Tune's scheduler of this name (`tune.scheduler`), which stops trials early whose evaluations are worse than
    others' at equal steps; None for "none".

    Args:
        curves: (step, loss) of the evaluations of trials that have ended, by trial; passed to the scheduler first, so
            that a resumed search decides as if it had not been interrupted.
    """
    most = max((one.max_steps or 0 for one in points.trials), default=0) or 10**9
    first = max(1, most // LOOKS)
    compare: dict[str, Any] = {"time_attr": "step", "metric": "eval_loss", "mode": "min"}
    if name == "asha":  # at max_t it would stop a trial before the trial reports its result
        scheduler: Any = ASHAScheduler(max_t=most + 1, grace_period=first, reduction_factor=2, **compare)
    elif name == "median":
        scheduler = PatientMedian(grace_period=first, min_samples_required=2, **compare)
    else:
        return None
    for trial, losses in curves.items():
        ended = EndedTrial(f"ended {trial}")
        scheduler.on_trial_add(None, ended)
        for step, loss in losses:
            scheduler.on_trial_result(None, ended, {"step": step, "eval_loss": loss})
    return scheduler


def curves_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[tuple[int, float]]]:
    """(step, loss) of the evaluations of each trial, up to the step at which a scheduler stopped it."""
    runs = {row["trial"]: RunFolder(row["run"]).read_rows("metrics.jsonl") for row in rows if row.get("run")}
    ends = {row["trial"]: row["steps"] for row in rows if row["outcome"] == "stopped"}
    return {
        trial: [
            (row["step"], row["loss"])
            for row in metrics
            if row["kind"] == "eval" and row["step"] <= ends.get(trial, row["step"])
        ]
        for trial, metrics in runs.items()
    }


# -- the process of a trial -----------------------------------------------------------------------


@dataclass(frozen=True)
class SpaceTrialSettings:
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

    def apply(self) -> None:
        """Set the working directory, import path and visible GPUs of this process to those of the command."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        import_from(self.folder)
        for name in VISIBLE:
            os.environ.pop(name, None)
        os.environ.update(self.visible)


class SpaceTrial(tune.Trainable):
    """Ray Tune's trainable: each `step` waits for the next evaluation of the run, the last one returns its result.

    It is a class, not a function, so that a scheduler that stops it early waits for `cleanup`, in which the run shuts
    down: a trainer whose process is killed leaves its placement group behind, and the next trial would wait forever.
    The run is in a thread of its own, observed from Ray's.
    """

    def setup(self, config: dict[str, Any], settings: SpaceTrialSettings | None = None) -> None:
        """Start training."""
        assert settings is not None, "it comes with tune.with_parameters"
        settings.apply()
        self._settings, self._overrides = settings, list(config["overrides"])
        self._sweep, self._name = SweepFolder(settings.sweep), f"trial-{int(config['number']):04d}"
        self._signals = StopSignals()
        self._last: dict[str, Any] = {"step": 0, "eval_loss": float("nan")}
        self._outcome: Result | BaseException | None = None
        self._thread: threading.Thread | None = None
        self._rows = self._evaluations()
        on_stop_request(settings.channel, self._signals.asked.set)

    def step(self) -> dict[str, Any]:
        """{"step", "eval_loss"} of the next evaluation; at the end, the complete result.

        Raises:
            RunError: the run failed; only this trial ends.
        """
        row = next(self._rows, None)
        if row is not None:
            self._last = row
            return row
        result = self._outcome
        if isinstance(result, BaseException):
            raise result
        assert result is not None, "the thread has ended"
        if result.status == "failed":
            raise RunError(result.reason)
        last = {**self._last, "final": True, "run": result.run, "status": result.status}
        return {**last, **summary(result), "done": True}

    def cleanup(self) -> None:
        """Ask the run to save and return, and wait for it up to `STOP_S` seconds."""
        self._signals.asked.set()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Does nothing: the run writes its own checkpoints."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Does nothing: see `save_checkpoint`."""

    def _evaluations(self) -> Iterator[dict[str, Any]]:
        """{"step", "eval_loss"} of each evaluation as the run writes it, until it ends."""
        seen, before = 0, self._before()
        self._thread = thread = threading.Thread(target=self._train, args=(before,), daemon=True, name="trial")
        thread.start()
        while True:
            thread.join(LOOK_EVERY_S)
            ended = not thread.is_alive()
            path = self._sweep.run_of(self._name)
            rows = RunFolder(path).read_rows("metrics.jsonl") if path is not None else []
            evaluated = [row for row in rows if row["kind"] == "eval"]
            for row in evaluated[seen:]:
                yield {"step": row["step"], "eval_loss": row["loss"]}
            seen = max(seen, len(evaluated))
            if ended:
                return

    def _train(self, before: Resumed | None) -> None:
        try:
            if before is not None and before.finished:
                self._outcome = result_of(before.run, before.run.read_json(before.run.result))
                return
            folder = [f"save.dir={self._sweep.runs}", f"name={self._name}", "telemetry.tensorboard=false"]
            job = before and before.loaded
            self._outcome = train_loaded(
                job or load_spec(mapping=self._settings.mapping, overrides=[*self._overrides, *folder]),
                resumed=before, signals=self._signals, verbose=False, console=Console(quiet=True), began=time.time(),
            )  # fmt: skip
        except BaseException as error:  # handed to Ray's thread, which owns the trial
            self._outcome = error

    def _before(self) -> Resumed | None:
        """The run of this trial that an earlier command started, to resume; waits until its processes have exited."""
        path, ends = self._sweep.run_of(self._name), time.monotonic() + OLD_OWNER_S
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
