"""One Ray Tune run on the driver: trials in processes of their own, signal handling, and updates of the table.

A sweep does not resume from Ray's own experiment state, which is written at most once a second and unpickled when it is
read. `trials.jsonl` is plain text, has the row of each trial before the next one is chosen, and holds everything a
search needs. `--resume` starts a new Ray Tune run whose searcher knows every trial that ended.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.exceptions
from ray import tune

from jobs.driver.signals import Interrupted, StopSignals
from jobs.tuning.searcher import EndedTrials, ProposingSearcher, Trials
from raytrain.errors import RunError
from raytrain.runs.sweep import SweepFolder

LOOK_EVERY_S = 0.1


def make_tuner(
    trainable: Any, trials: Trials, *, storage: str, resources: Any, at_a_time: int, scheduler: Any = None
) -> tune.Tuner:
    """Make Ray's tuner for these trials.

    Args:
        trainable: Ray Tune's trainable, whose config is what `trials` proposes.
        storage: a directory for Ray's own bookkeeping.
        resources: what each trial reserves, as `tune.with_resources` takes it.
        at_a_time: the number of concurrent trials.
    """
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # the new output prints a box even with verbose=0
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # its TensorBoard prints a line for every NaN
    return tune.Tuner(
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


def run_trials(
    tuner: tune.Tuner,
    *,
    sweep: SweepFolder,
    signals: StopSignals,
    show: Callable[[], None],
    stop: Callable[[], None],
    grace_s: float,
) -> None:
    """Run trials until none is left.

    Args:
        show: draws the table; called often.
        stop: asks the running trials to end, for which they get `grace_s` seconds.

    Raises:
        Interrupted: a signal arrived; trials.jsonl has the trials that ended.
        RunError: Ray Tune itself gave up.
    """
    outcome: dict[str, BaseException] = {}

    def work() -> None:
        try:
            tuner.fit()
        except BaseException as error:  # re-raised in the main thread
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True, name="tune")
    thread.start()
    signals.training = True  # from here on a signal only sets `asked`, which is handled below
    ends: float | None = None
    while thread.is_alive():
        thread.join(LOOK_EVERY_S)
        sweep.heartbeat()
        show()
        if signals.asked.is_set() and ends is None:
            ends = time.monotonic() + grace_s
            stop()
        if ends is not None and (signals.times > 1 or time.monotonic() > ends):
            break
    show()
    signals.training = False
    if signals.asked.is_set():
        raise Interrupted("during the search")
    if "error" in outcome:
        error = outcome["error"]
        raise RunError(f"Ray Tune gave up: {type(error).__name__}: {error}") from error


def close_channel(channel: Any) -> None:
    """Ask every trial to stop through the `DriverChannel`.

    Raises:
        Interrupted: the cluster is no longer reachable.
    """
    try:
        channel.request_stop.remote()
    except ray.exceptions.RayError as error:
        raise Interrupted("the cluster is gone") from error
