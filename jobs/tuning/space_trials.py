"""The trials of `tune.space`: complete runs in Ray Tune, with its schedulers and searchers.

A trial is a `TorchTrainer` with its own run folder inside a Ray Tune trial. The trial itself reserves almost nothing,
since the trainer reserves the resources of its workers; a trial that reserved them too would wait forever.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from ray import PlacementGroupID, tune
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, TrialScheduler
from ray.tune.search import Searcher, create_searcher
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group
from rich.console import Console

from cluster.devices.gpus import VISIBLE
from jobs.driver.result import Result, result_of
from jobs.driver.run_folder import Resumed, check_checkpoints, open_resumed
from jobs.driver.signals import StopSignals
from jobs.job.spec import load_spec
from jobs.train import train_loaded
from jobs.tuning.driver import TuneCommand
from jobs.tuning.space_points import LOOKS, Point, Points, Values, run_cells, values_text
from jobs.tuning.trials import StatelessSearcher, TrialRecorder, outcome_of, why
from raytrain.config.user_code import import_from
from raytrain.errors import InputError, RunError
from raytrain.execution.driver_channel import on_stop_request
from raytrain.plan.room import Need
from raytrain.runs.folder import RunFolder, SweepFolder
from raytrain.runs.records import event

TRIAL_CPU = 0.001
"""The CPU of the trial itself; its run reserves its own."""
LOOK_EVERY_S = 0.25
STOP_S = 60.0
OLD_OWNER_S = 60.0
"""Seconds to wait for a killed command and the workers of its trial to exit."""
TRIES = 20
"""Points in succession that cannot run, after which a searcher is not asked again."""
PROPOSED = "proposed"
"""Kind of the event of a searcher's point."""

# -- which trials ---------------------------------------------------------------------------------


def config_of(point: Point) -> dict[str, Any]:
    """What the process of a trial receives."""
    return {"number": point.number, "values": point.values, "overrides": list(point.overrides)}


class PointSearcher(StatelessSearcher):
    """One of Ray Tune's searchers whose points are numbered, and checked on the driver like all others: one that cannot
    run is told to the searcher as a failure, and it is asked again.

    A resumed search first continues the points that had no result, then tells the searcher all results so far.
    """

    def __init__(self, command: TuneCommand, points: Points) -> None:
        sweep, name, metric = command.the_sweep, command.spec.tune.searcher, command.spec.tune.metric
        mode = "max" if metric == "samples_per_s" else "min"
        super().__init__(metric=metric, mode=mode)
        self._points, self._sweep = points, sweep
        self._inner: Any = create_searcher(name, seed=command.spec.seed)
        logging.getLogger(name).setLevel(logging.WARNING)  # it tells of each study and each point
        domains = {key: ray_domain(one) for key, one in points.space.keys.items()}
        self._inner.set_search_properties(metric, mode, domains)
        self._asked: dict[str, Any] = {}
        events = sweep.read_rows(sweep.events)
        proposed = {row["trial"]: row["values"] for row in events if row["kind"] == PROPOSED}
        self._number = max(proposed, default=0)
        for row in sweep.standing():
            proposed.pop(row["trial"], None)
            if math.isfinite(row.get(metric) or math.nan):
                self._inner.add_evaluated_point(row["values"], row[metric])
        self._unfinished = sorted(proposed.items())

    def suggest(self, trial_id: str) -> Any:
        """The next trial's config, None to be asked again, or `Searcher.FINISHED`."""
        if self._unfinished:
            number, values = self._unfinished.pop(0)
            return {"trial": config_of(self._points.check(number, values))}
        for attempt in range(TRIES if self._number < len(self._points.trials) else 0):
            asked = f"{trial_id} {attempt}"
            values = self._inner.suggest(asked)
            if not isinstance(values, dict):
                return values
            try:
                point = self._points.check(self._number + 1, values)
            except InputError:
                self._inner.on_trial_complete(asked, error=True)
                continue
            self._number += 1
            self._asked[trial_id] = asked
            self._sweep.append_event(event(PROPOSED, trial=self._number, values=values))
            return {"trial": config_of(point)}
        return Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Tell the searcher what its point was worth."""
        if (asked := self._asked.pop(trial_id, None)) is not None:
            self._inner.on_trial_complete(asked, result, error)


def ray_domain(tried: Values) -> Any:
    """The values of a key as Ray Tune's searchers take them."""
    if tried.kind == "choice":
        return tune.choice(list(tried.given))
    low, high = tried.given
    return getattr(tune, tried.kind)(low, high + 1 if tried.kind == "randint" else high)  # Ray leaves this end out


class SpaceTrials(TrialRecorder):
    """Records complete runs.

    Args:
        points: what their processes need of a cluster; a searcher's trials need what its examples do.
        private: no other program uses the Ray cluster, so that what trainers of dead trials reserved can be released.
    """

    def __init__(self, command: TuneCommand, points: Sequence[Point] = (), *, private: bool) -> None:
        super().__init__(command)
        self._metric, self._private = command.spec.tune.metric, private
        self._needs = {one.number: one.need for one in points}
        self._reserved: set[str] = set()
        self._beside: set[int] = set()

    def text_of(self, config: dict[str, Any]) -> str:
        return values_text(config["values"])

    def need_of(self, config: dict[str, Any], *, started: bool) -> Need | None:
        """The workers of its run, which the process of the trial starts."""
        return self._needs.get(config["number"]) if started and not self._private else None

    def row_of(
        self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None
    ) -> tuple[dict[str, Any] | None, str]:
        """See `TrialRecorder`; a run that was interrupted has no row."""
        if result.get("status") == "interrupted":
            return None, ""
        outcome, reason = "ok", ""
        if error is not None:
            outcome, reason = outcome_of(error), why(error)
        elif not result.get("final"):
            outcome, reason = "stopped", f"behind the others at step {result.get('step')}"
        elif not math.isfinite(result.get(self._metric, math.nan)):
            outcome, reason = "nonfinite", f"its {self._metric} is not finite"
        row = {
            "values": config["values"],
            "outcome": outcome,
            "reason": reason,
            "eval_loss": result.get("eval_loss", math.nan),
            "samples_per_s": result.get("samples_per_s"),
            "steps": result.get("steps", result.get("step")),
            "peak_bytes": result.get("peak_bytes"),
            "run": result.get("run") or self.sweep.run_of(run_name(config["number"])),
        }
        *figures, note = run_cells(row, ())
        units = ("steps", "eval loss", "samples/s")
        parts = [f"{value} {unit}" for value, unit in zip(figures, units, strict=True) if value]
        return row, ", ".join(filter(None, [*parts, note]))

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """Record it, and remove what a trial that died had reserved, or the next one would wait for it forever. Nothing
        tells whose a reservation is: what there is when a trial dies belongs to it or to the trials beside it, and what
        is left of that when those have ended was its own."""
        super().ended(config, result, error)
        if self._private and error is not None and outcome_of(error) == "died":
            self._reserved |= reservations()
            self._beside |= self.running.keys()
        self._beside.discard(config["number"])
        if self._reserved and not self._beside:
            for key in self._reserved & reservations():
                remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(key))))
            self._reserved.clear()


def reservations() -> set[str]:
    """Placement groups of trainers, as hexadecimal ids."""
    groups = {key: group for key, group in placement_group_table().items() if group["state"] != "REMOVED"}
    own = {"CPU": TRIAL_CPU}
    return {key for key, group in groups.items() if any(bundle != own for bundle in group["bundles"].values())}


def run_name(number: int) -> str:
    return f"trial-{number:04d}"


EndedTrial = namedtuple("EndedTrial", "trial_id")  # the attributes of a trial that a scheduler reads


class PatientMedian(MedianStoppingRule):
    """Ray's rule without its pauses: a paused run would start its processes again."""

    def _on_insufficient_samples(self, tune_controller: Any, trial: Any, time: float) -> str:
        return TrialScheduler.CONTINUE


def scheduler_of(name: str, points: Points, *, curves: Mapping[int, Sequence[tuple[int, float]]]) -> Any:
    """Ray Tune's scheduler of this name (`tune.scheduler`), which stops trials early whose evaluations are worse than
    others' at equal steps; None for "none". It is first told the `curves`, (step, loss) of the trials that have ended,
    so that a resumed search decides as if it had not been interrupted."""
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


# -- the process of a trial -----------------------------------------------------------------------


def use_environment(folder: str, visible: Mapping[str, str]) -> None:
    """Set the working directory, import path and visible GPUs of this process to those of the command."""
    if os.path.isdir(folder):
        os.chdir(folder)
    import_from(folder)
    for name in VISIBLE:  # by which Ray hides all GPUs from a process that reserves none
        os.environ.pop(name, None)
    os.environ.update(visible)


class SpaceTrial(tune.Trainable):
    """Ray Tune's trainable: each `step` waits for the next evaluation of the run, the last one returns its result.

    A scheduler that stops a class (not a function) early waits for `cleanup`, in which the run, in a thread of its own,
    shuts down: a trainer whose process is killed leaves its placement group behind, and the next trial would wait
    forever.
    """

    def setup(
        self, config: dict[str, Any], mapping: Any = None, sweep: str = "", folder: str = "", visible: Any = None,
        channel: Any = None,
    ) -> None:  # fmt: skip
        """Start training: the job `mapping`, which has absolute data paths, with the config's overrides, in the search
        folder `sweep`; `channel`: the `DriverChannel` actor through which the driver asks trials to stop."""
        use_environment(folder, visible)
        trial = config["trial"]
        self._sweep, self._name = SweepFolder(sweep), run_name(trial["number"])
        own = [f"save.dir={self._sweep.runs}", f"name={self._name}", "telemetry.tensorboard=false"]
        self._mapping, self._overrides = mapping, [*trial["overrides"], *own]
        self._signals = StopSignals()
        self._last: dict[str, Any] = {"step": 0, "eval_loss": float("nan")}
        self._outcome: Result | BaseException | None = None
        self._thread: threading.Thread | None = None
        self._rows = self._evaluations()
        on_stop_request(channel, self._signals.asked.set)

    def step(self) -> dict[str, Any]:
        """{"step", "eval_loss"} of the next evaluation; at the end, the complete result. Raises RunError: the run
        failed; only this trial ends."""
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
        """Does nothing: Ray asks for a checkpoint when a trial ends, but the run writes its own ones."""

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
            job = before.loaded if before else load_spec(mapping=self._mapping, overrides=self._overrides)
            quiet: Any = {"signals": self._signals, "verbose": False, "console": Console(quiet=True)}
            self._outcome = train_loaded(job, resumed=before, began=time.time(), **quiet)
        except BaseException as error:  # handed to Ray's thread, which owns the trial
            self._outcome = error

    def _before(self) -> Resumed | None:
        """The run of this trial that an earlier command started, to resume; waits until its processes have exited."""
        path, ends = self._sweep.run_of(self._name), time.monotonic() + OLD_OWNER_S
        if path is None or not (run := RunFolder(path)).exists(run.job_mapping):  # it was killed before it started
            return None
        while run.alive() and time.monotonic() < ends:
            time.sleep(LOOK_EVERY_S)
        try:
            resumed = open_resumed(path, None, [])
            return resumed if resumed.finished else check_checkpoints(resumed)
        except InputError:
            if run.alive():
                raise
            return None  # its checkpoints are damaged: measured again from its first step, in a folder of its own


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
