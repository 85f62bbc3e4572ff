"""One Ray Tune run on the driver: which trial is next, how each one ended, signals, and lines about the trials.

A sweep does not resume from Ray's own experiment state, which is written at most once a second, unpickled when it is
read, and without what a scheduler has seen. `trials.jsonl` is plain text, has the row of each trial before the next one
is chosen, and holds everything a search needs: `--resume` starts a new Ray Tune run that knows every trial that ended.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import ray
import ray.exceptions
from ray import cloudpickle, tune
from ray.tune import Callback
from ray.tune.search import Searcher

from jobs.driver.progress import Activity
from jobs.driver.signals import Interrupted, StopSignals
from jobs.driver.watch import missing_room
from raytrain.errors import RunError
from raytrain.plan.room import Need
from raytrain.runs.folder import SweepFolder

DONE = "done"
LOOK_EVERY_S = 0.1


class Trials(Protocol):
    """The source of trials and the receiver of their results; used on the driver, by one thread."""

    def propose(self) -> dict[str, Any] | str | None:
        """The config of the next trial; None: wait for running trials; `DONE`: no trials are left."""
        ...

    def started(self, config: dict[str, Any]) -> None:
        """Called when the process of a trial has started."""
        ...

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """Called when a trial has ended, with its last report and the error that ended it, if any."""
        ...


class ProposingSearcher(Searcher):
    """Ray Tune's searcher over `Trials`. Its state is in `trials.jsonl`, not in Ray's experiment state."""

    def __init__(self, trials: Trials) -> None:
        super().__init__(metric=None, mode=None)
        self._trials: Any = trials

    def suggest(self, trial_id: str) -> Any:
        """The next trial's config, None to be asked again, or `Searcher.FINISHED`."""
        found = self._trials.propose()
        return Searcher.FINISHED if found == DONE else found

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Does nothing: `EndedTrials` reports the end, because it also has the error."""

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: see the class."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing: see the class."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trials": None}


class EndedTrials(Callback):
    """Forwards the start and the end of each trial from Ray to `Trials`."""

    def __init__(self, trials: Trials) -> None:
        self._trials: Any = trials

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Ray calls this once a trial's process has started."""
        self._trials.started(trial.config)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """It returned, or a scheduler ended it early."""
        self._trials.ended(trial.config, dict(trial.last_result or {}), None)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """It raised, or its process died."""
        # Ray writes the error to a local file first; `trial.get_error` reads a copy made later
        pickled, text = trial.pickled_error_file, trial.error_file
        error: BaseException = RuntimeError("it failed without an error message")
        if pickled is not None and os.path.exists(pickled):
            error = cloudpickle.loads(Path(pickled).read_bytes())
        elif text is not None and os.path.exists(text):
            error = RuntimeError(Path(text).read_text())
        self._trials.ended(trial.config, dict(trial.last_result or {}), error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trials": None}


def has_died(error: BaseException | None) -> TypeGuard[ray.exceptions.RayActorError]:
    """Whether a trial's process died or never started, which says little about what it measured."""
    return isinstance(error, ray.exceptions.RayActorError)


def ran_out(error: BaseException | None) -> bool:
    """Whether Ray killed a process because the machine was almost out of memory."""
    return isinstance(error, ray.exceptions.OutOfMemoryError)


def why(error: BaseException) -> str:
    """An error of a trial in one line, including the death of its process."""
    if has_died(error):
        began = "in its creation task" not in str(error)
        return "its process died" if began else f"it could not start: {str(error).strip().splitlines()[-1].strip()}"
    if ran_out(error):
        return "Ray killed its process because the machine was almost out of memory"
    cause = getattr(error, "cause", None) or error
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(cause)).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    short = lines[-1] if "Traceback" in text and lines else (lines[0] if lines else type(cause).__name__)
    return short if type(cause).__name__ in short or not lines else f"{type(cause).__name__}: {short}"


class TrialLines:
    """Says which trials start and run, and prints a line for each that has ended."""

    def __init__(self, activity: Activity, print_line: Callable[[str], None]) -> None:
        self._activity, self.print_line = activity, print_line
        self._now: dict[int, tuple[str, str, Need | None]] = {}

    def propose(self, number: int, what: str, need: Need | None = None) -> None:
        """The process of a trial is being started; `need` is what it needs of the cluster."""
        self._now[number] = "starting", what, need
        self._say()

    def start(self, number: int, need: Need | None = None) -> None:
        """The process of a trial has started; `need` is what it needs of the cluster beside its own place."""
        self._now[number] = "measuring", self._now[number][1], need
        self._say()

    def end(self, number: int, text: str) -> None:
        """A trial has ended."""
        self._now.pop(number, None)
        self.print_line(f"trial {number}  {text}")
        self._say()

    def _say(self) -> None:
        parts = [f"{word} trial {number} ({what})" for number, (word, what, _) in sorted(self._now.items())]
        needs = [need for _, _, need in self._now.values() if need is not None]
        self._activity.begin(" and ".join(parts), missing=lambda: missing_room(needs))


def keep_row(sweep: SweepFolder, row: dict[str, Any], error: BaseException | None) -> None:
    """Append the row of a trial that has ended to trials.jsonl; its full error goes to `logs` of the search folder."""
    if error is not None:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        sweep.write_text(f"logs/trial-{row['trial']:04d}.txt", f"{type(error).__name__}: {text}\n")
    sweep.record(row)


def run_trials(
    trainable: Any, trials: Trials, *, storage: str, resources: Any, at_a_time: int, sweep: SweepFolder,
    signals: StopSignals, stop: Callable[[], None], grace_s: float, scheduler: Any = None,
) -> None:  # fmt: skip
    """Run trials in processes of their own, until none is left.

    Args:
        trainable: Ray Tune's trainable, whose config is what `trials` proposes.
        storage: a directory for Ray's own bookkeeping.
        resources: what each trial reserves, as `tune.with_resources` takes it.
        at_a_time: the number of concurrent trials.
        stop: asks the running trials to end, for which they get `grace_s` seconds.

    Raises:
        Interrupted: a signal arrived; trials.jsonl has the trials that ended.
        RunError: Ray Tune itself gave up.
    """
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output prints a box even with verbose=0
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # its TensorBoard prints a line for every NaN
    tuner = tune.Tuner(
        tune.with_resources(trainable, resources),
        tune_config=tune.TuneConfig(
            search_alg=ProposingSearcher(trials),
            scheduler=scheduler,
            num_samples=-1,  # the searcher ends the search
            max_concurrent_trials=at_a_time,
            reuse_actors=False,  # a new process for each: only its exit is certain to release GPU memory
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=os.path.abspath(storage),
            callbacks=[EndedTrials(trials)],
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

    thread = threading.Thread(target=work, daemon=True, name="tune")
    thread.start()
    signals.training = True  # from here on a signal only sets `asked`, which is handled below
    ends: float | None = None
    while thread.is_alive():
        thread.join(LOOK_EVERY_S)
        sweep.heartbeat()
        if signals.asked.is_set() and ends is None:
            ends = time.monotonic() + grace_s
            stop()
        if ends is not None and (signals.times > 1 or time.monotonic() > ends):
            break
    signals.training = False
    if signals.asked.is_set():
        raise Interrupted("during the search")
    if errors:
        raise RunError(f"Ray Tune gave up: {type(errors[0]).__name__}: {errors[0]}") from errors[0]


def close_channel(channel: Any) -> None:
    """Ask every trial to stop through the `DriverChannel`.

    Raises:
        Interrupted: the cluster is no longer reachable.
    """
    try:
        channel.request_stop.remote()
    except ray.exceptions.RayError as error:
        raise Interrupted("the cluster is gone") from error
