"""One Ray Tune run on the driver: how each trial ended, signals, and lines about the trials.

A search does not resume from Ray's own experiment state (`Tuner.restore`), which is written at most once a second,
unpickled when it is read, and without what a scheduler has seen. `trials.jsonl` is plain text and has the row of each
trial before the next one starts: `--resume` starts a new Ray Tune run of the trials that it lacks.
"""

from __future__ import annotations

import os
import re
import threading
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any, Literal

import ray
import ray.exceptions
from ray import cloudpickle, tune
from ray.tune import Callback
from ray.tune.search import Searcher

from jobs.driver.runtime import Cluster
from jobs.driver.signals import Interrupted
from jobs.driver.watch import missing_room
from jobs.tuning.driver import TuneCommand
from raytrain.errors import RunError
from raytrain.plan.room import Need

LOOK_EVERY_S = 0.1


class TrialRecorder(Callback):
    """Writes the row of each trial that ends to trials.jsonl, and says which trials run.

    A subclass knows what a trial is: `text_of` names it, `row_of` makes its row. Ray Tune's config of each trial is
    {"trial": its own config}, which has its `number`.

    Attributes:
        running: of the trials whose process was asked for or runs: what it does, its text, what it still needs.
    """

    def __init__(self, command: TuneCommand) -> None:
        self.command, self.sweep = command, command.the_sweep
        self.running: dict[int, tuple[str, str, Need | None]] = {}
        self.stopping = False  # trials were asked to stop, and what they report from now on is not a result
        self._began: dict[int, float] = {}

    @abstractmethod
    def text_of(self, config: dict[str, Any]) -> str:
        """What a trial tries, in a few words."""

    @abstractmethod
    def row_of(
        self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None
    ) -> tuple[dict[str, Any] | None, str]:
        """The row of a trial and what its line says; None if it did not end as a result. `result`: the last report.
        `error`: what ended it, if anything did."""

    def need_of(self, config: dict[str, Any], *, started: bool) -> Need | None:
        """What a trial may still wait for on a shared cluster, before or after its process has started; None for
        nothing."""
        return None

    def runs(self, config: dict[str, Any], *, started: bool) -> None:
        """The process of a trial is being started, or has started."""
        if started:
            self._began[config["number"]] = time.time()
        need = self.need_of(config, started=started)
        self.running[config["number"]] = "measuring" if started else "starting", self.text_of(config), need
        self._say()

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """Record how a trial ended; one that was asked to stop is not recorded, since a resumed search goes on with
        it."""
        number, now = config["number"], time.time()
        self.running.pop(number, None)
        row, text = (None, "") if self.stopping else self.row_of(config, result, error)
        if row is None:
            return
        row = {"trial": number, **row, "time": now, "wall_s": now - self._began.get(number, now)}
        if error is not None:
            self.sweep.write_text(f"logs/trial-{number:04d}.txt", f"{type(error).__name__}: {_plain(error)}\n")
        self.sweep.record(row)
        self.command.print_line(f"trial {number}  {self.text_of(config)}: {text}")
        self._say()

    def _say(self) -> None:
        parts = [f"{word} trial {number} ({what})" for number, (word, what, _) in sorted(self.running.items())]
        needs = [need for *_, need in self.running.values() if need is not None]
        self.command.activity.begin(" and ".join(parts), missing=lambda: missing_room(needs))

    # -- called by Ray ----------------------------------------------------------------------------

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray calls this once a trial's process has started."""
        self.runs(trial.config["trial"], started=True)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """It returned, or a scheduler ended it early."""
        self.ended(trial.config["trial"], dict(trial.last_result or {}), None)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """It raised, or its process died."""
        # Ray writes the error to a local file first; `trial.get_error` reads a copy made later
        pickled, text = trial.pickled_error_file, trial.error_file
        error: BaseException = RuntimeError("it failed without an error message")
        if pickled is not None and os.path.exists(pickled):
            error = cloudpickle.loads(Path(pickled).read_bytes())
        elif text is not None and os.path.exists(text):
            error = RuntimeError(Path(text).read_text())
        self.ended(trial.config["trial"], dict(trial.last_result or {}), error)

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Ray pickles callbacks for `Tuner.restore`, which is not used


class StatelessSearcher(Searcher):
    """A searcher of Ray Tune whose state is in the search folder, so that Ray has nothing of it to save."""

    def save(self, checkpoint_path: str) -> None:
        """Does nothing."""

    restore = save

    def __getstate__(self) -> dict[str, Any]:
        return {}


def outcome_of(error: BaseException) -> Literal["died", "out_of_memory", "error"]:
    """How an error ended a trial: its process died or never started, which says little about what it measured; or Ray
    killed it because the machine was almost out of memory."""
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "out_of_memory"
    return "died" if isinstance(error, ray.exceptions.RayActorError) else "error"


def why(error: BaseException) -> str:
    if outcome_of(error) == "out_of_memory":
        return "Ray killed its process because the machine was almost out of memory"
    if outcome_of(error) == "died":
        began = "in its creation task" not in str(error)
        return "its process died" if began else f"it could not start: {str(error).strip().splitlines()[-1].strip()}"
    cause = getattr(error, "cause", None) or error
    name, lines = type(cause).__name__, [line for line in _plain(cause).splitlines() if line.strip()]
    if not lines:
        return name
    short = lines[-1] if any("Traceback" in line for line in lines) else lines[0]
    return short if name in short else f"{name}: {short}"


def _plain(error: BaseException) -> str:
    """An error's text without the colours that Ray gives it."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()


def fit(
    trainable: Any, recorder: TrialRecorder, *, cluster: Cluster, resources: Any, at_a_time: int, channel: Any,
    grace_s: float, stopping: str = "", param_space: dict[str, Any] | None = None,
    searcher: Any = None, scheduler: Any = None,
) -> None:  # fmt: skip
    """Run Ray Tune until no trial is left, each in a process of its own.

    Args:
        resources: what each trial reserves, as `tune.with_resources` takes it.
        channel: the `DriverChannel` through which the trials are asked to end after a signal, for which they get
            `grace_s` seconds; `stopping` is the line that says so.
        param_space, searcher: where the configs of the trials come from: one of the two.

    Raises:
        Interrupted: a signal arrived; trials.jsonl has the trials that ended.
        RunError: Ray Tune itself gave up.
    """
    command = recorder.command
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output prints a box even with verbose=0
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # its TensorBoard prints a line for every NaN
    tuner = tune.Tuner(
        tune.with_resources(trainable, resources),
        param_space=param_space,
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=1 if searcher is None else -1,  # a searcher ends the search itself
            max_concurrent_trials=at_a_time,
            reuse_actors=False,  # a new process for each: only its exit is certain to release GPU memory
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=os.path.join(cluster.folder, "t"),
            callbacks=[recorder],
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=0),
        ),
    )
    errors: list[BaseException] = []

    def work() -> None:
        try:
            tuner.fit()
        except BaseException as error:  # re-raised in the main thread
            errors.append(error)

    # in a thread, since Ray's own handling of a signal kills the trials before they have saved
    thread = threading.Thread(target=work, daemon=True, name="tune")
    thread.start()
    signals, ends = command.signals, None
    signals.training = True  # from here on a signal only sets `asked`, which is handled below
    while thread.is_alive():
        thread.join(LOOK_EVERY_S)
        recorder.sweep.heartbeat()
        if signals.asked.is_set() and ends is None:
            ends, recorder.stopping = time.monotonic() + grace_s, True
            if stopping:
                command.print_line(stopping)
            try:
                channel.request_stop.remote()
            except ray.exceptions.RayError as error:
                raise Interrupted("the cluster is gone") from error
        if ends is not None and (signals.times > 1 or time.monotonic() > ends):
            break
    signals.training = False
    if signals.asked.is_set():
        raise Interrupted("during the search")
    if errors:
        raise RunError(f"Ray Tune gave up: {type(errors[0]).__name__}: {errors[0]}") from errors[0]
