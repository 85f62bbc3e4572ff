"""Connects Ray Tune to a source of trials: which trial is next, and how each one ended."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import ray.exceptions
from ray import cloudpickle
from ray.tune import Callback
from ray.tune.search import Searcher

from raytrain.runs.sweep import SweepFolder

DONE = "done"


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
        self._trials.ended(trial.config, dict(trial.last_result or {}), _error_of(trial))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_trials": None}


def _error_of(trial: Any) -> BaseException:
    """The error that ended a trial: Ray writes it to a local file first; `trial.get_error` reads a copy made later."""
    pickled, text = trial.pickled_error_file, trial.error_file
    if pickled is not None and os.path.exists(pickled):
        return cloudpickle.loads(Path(pickled).read_bytes())
    if text is not None and os.path.exists(text):
        return RuntimeError(Path(text).read_text())
    return RuntimeError("it failed without an error message")


def has_died(error: BaseException | None) -> TypeGuard[ray.exceptions.RayActorError]:
    """Whether a trial's process died or never started, which says little about what it measured."""
    return isinstance(error, ray.exceptions.RayActorError)


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


def keep_traceback(sweep: SweepFolder, number: int, error: BaseException | None) -> None:
    """Write the full error of a trial to `logs` of the search folder; its row has only the last line."""
    if error is not None:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
        sweep.write_text(f"logs/trial-{number:04d}.txt", f"{type(error).__name__}: {text}\n")


def ran_out(error: BaseException) -> bool:
    """Whether Ray killed a process because the machine was almost out of memory."""
    return isinstance(error, ray.exceptions.OutOfMemoryError)
