"""The driver while workers train: `fit` in a thread; progress, printed lines and signals in the main thread."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import ray
import ray.exceptions
from rich.console import Console

from experts.hosts.reserve import connect
from jobs.driver.checks import train_job
from jobs.driver.progress import TrainingDisplay
from jobs.driver.run_folder import OpenRun
from jobs.driver.runtime import Cluster
from jobs.driver.signals import Interrupted, StopSignals
from jobs.job.spec import JobSpec
from raytrain.execution import driver_channel, trainer
from raytrain.execution.driver_channel import AttemptResult
from raytrain.runs.storage import join

POLL_EVERY_S = 0.25
ANSWER_TIMEOUT_S = 5


def fit_watched(
    spec: JobSpec, opened: OpenRun, cluster: Cluster, *, data: Any, signals: StopSignals, console: Console
) -> AttemptResult:
    """Start the expert hosts and the workers, and return how the run ended.

    A first signal asks the workers to save and return; a second one, or the end of `retry.stop_grace_s`, returns
    without waiting for them.

    Args:
        data: the data that the driver read for all workers; None if each worker opens the source itself.

    Raises:
        Interrupted: a signal arrived before the first step.
        RunError: Ray gave up.
    """
    fitting = _Fit(spec, opened, cluster, data=data, console=console)
    channel = fitting.channel
    stop_at: float | None = None
    unanswered = 0
    with TrainingDisplay(console) as display:
        while fitting.running(wait_s=POLL_EVERY_S):
            opened.run.heartbeat()
            unanswered = 0 if _show_progress(channel, display, signals) else unanswered + 1
            if signals.asked.is_set() and not signals.training:
                raise Interrupted("before the first step")  # Ray swallowed the exception that the signal raised
            if signals.asked.is_set() and stop_at is None:
                stop_at = time.monotonic() + spec.retry.stop_grace_s
                channel.request_stop.remote()
                display.print_lines("stopping: the workers save and return (a second signal exits immediately)")
            late = stop_at is not None and time.monotonic() > stop_at
            cluster_ended = stop_at is not None and unanswered > 1  # the same signal may have ended it
            if signals.times > 1 or late or cluster_ended:
                return AttemptResult("interrupted", "exited without waiting for the workers", workers_running=True)
        _show_progress(channel, display, signals, last=True)
    return fitting.result(stopping=signals.asked.is_set())


class _Fit:
    """Runs `fit` in its own thread, since only the main thread receives signals."""

    def __init__(self, spec: JobSpec, opened: OpenRun, cluster: Cluster, *, data: Any, console: Console) -> None:
        run, plan = opened.run, opened.plan
        self._connection = connect(
            plan,
            run,
            local=cluster.local,
            interface="lo" if cluster.local else spec.cluster.interface,
            host_wait_s=spec.retry.host_wait_s,
            report=console.print,
        )
        self._job = train_job(spec, plan, run, attempt=opened.attempt, connection=self._connection)
        self.channel = driver_channel.open_channel()
        self._cluster = cluster
        self._options = {
            "data": data,
            "channel": self.channel,
            "local": cluster.local,
            "interface": spec.cluster.interface,
            "storage": os.path.join(cluster.folder, "t") if cluster.local else join(run.path, "logs/ray"),
        }
        self._result: AttemptResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="fit")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = trainer.fit(self._job, **self._options)
        except BaseException as error:  # raised in the main thread by `result`
            self._error = error
        if self._connection is not None and not self._cluster.ended.is_set():
            self._connection.close()

    def running(self, *, wait_s: float) -> bool:
        """Wait at most `wait_s` seconds for `fit`; return whether it was running before the wait."""
        alive = self._thread.is_alive()
        if alive:
            self._thread.join(wait_s)
        return alive

    def result(self, *, stopping: bool) -> AttemptResult:
        """Return the result of rank 0, or raise the exception of `fit` unless a stop was requested."""
        if self._error is not None:
            if stopping:
                return AttemptResult("interrupted", "a stop was requested")
            raise self._error
        assert self._result is not None
        return self._result


def _show_progress(channel: Any, display: TrainingDisplay, signals: StopSignals, *, last: bool = False) -> bool:
    """Show what the workers reported and printed; return False if the channel does not answer."""
    try:
        answers = ray.get(
            [channel.progress.remote(), channel.printed_lines.remote(last=last)], timeout=ANSWER_TIMEOUT_S
        )
    except ray.exceptions.RayError:  # too slow, or it died: `fit` reports the outcome
        return False
    progress, lines = answers
    if lines:
        display.print_lines(lines)
    display.show(progress)
    if progress.get("phase") == "training":
        signals.training = True
    return True
