"""A submitted job from the terminal: its log as it grows, Ctrl-C, and stopping it.

`jobs.submit` uses it after a submission and for `logs` and `stop`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import threading
import time
from typing import Any

from cluster.preflight import submission_id
from jobs.driver.signals import SAME_SIGNAL_S, Interrupted
from jobs.submission.server import JobServer, ServerSilent, SubmittedJob
from raytrain.errors import InputError, RunError, first_line
from raytrain.runs.folder import shell_command

# ---------------------------------------------------------------- stop
# Stops a job so that it saves: a request over HTTP, which the command in the job looks for.


LOOK_EVERY_S = 0.5
CLOSE_S = 15.0
"""Seconds beyond `retry.stop_grace_s`, in which a driver whose workers did not save in time closes its run."""
KILLED_S = 30.0
"""Ray sends SIGTERM and, after its own limit, SIGKILL."""
STOP, LISTENS = "raytrain_stop_{}.zip", "raytrain_listens_{}.zip"
"""The names of both entries, with the ID of the job."""


def stop_job(server: JobServer, job_id: str) -> SubmittedJob:
    """Stop a job, and return it once it has ended.

    A job in which no command of raytrain looks for the request to save is stopped by Ray at once.

    Raises:
        InputError: there is no such job, or it has ended already.
        RunError: it did not end, even killed by Ray.
    """
    from raytrain.config.sections import RetryConfig

    job = server.job(job_id)
    if job.ended:
        raise InputError(
            "ID", got=f"{job_id}, which has ended: {job.outcome}, exit code {job.verdict}", expected="a job that runs"
        )
    if server.request("GET", f"/api/packages/gcs/{LISTENS.format(job_id)}").status_code == 200:
        grace_s = job.record.get("stop_grace_s")
        grace_s = RetryConfig().stop_grace_s if grace_s is None else float(grace_s)
        request_stop(server, job_id)
        say(f"asked {job_id} to save and stop; waiting for up to {grace_s:g} s (retry.stop_grace_s)")
        server.ended(job_id, within_s=grace_s + CLOSE_S)
    else:
        say(f"{job_id} is no command of raytrain, or has not begun: there is nothing to save")
    if not server.job(job_id).ended:
        say("asking Ray to stop it")
        server.kill(job_id)
        if not server.ended(job_id, within_s=KILLED_S):
            raise RunError(
                f"{job_id} still runs {KILLED_S:.0f} s after Ray was asked to stop it: Ray kills a job that does not "
                "end within RAY_JOB_STOP_WAIT_TIME_S of its head node"
            )
    return server.job(job_id)


def request_stop(server: JobServer, job_id: str) -> None:
    """Ask a running job to save and to return. Errors: RunError if the cluster does not take it."""
    answer = server.request("PUT", f"/api/packages/gcs/{STOP.format(job_id)}", data=b"stop")
    if answer.status_code != 200:
        raise RunError(f"{server.address} refused the request to stop {job_id}: {answer.status_code} {answer.reason}")


# -- in the job ------------------------------------------------------------------------------------------


def watch_stop_request() -> None:
    """In a submitted job, send this process SIGTERM once it is asked to stop: every verb handles that by saving."""
    job_id, address = submission_id(), os.environ.get("RAY_ADDRESS")
    if job_id and address:
        threading.Thread(target=_watch, args=(job_id, address), daemon=True, name="stop-request").start()


def _watch(job_id: str, address: str) -> None:
    while not _ray_runs():
        time.sleep(LOOK_EVERY_S)
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  (compiled)

    client, listening = GcsClient(address=address), False
    while True:
        with contextlib.suppress(Exception):  # the cluster does not answer: whether it is lost is for the verb to judge
            if not listening:
                client.internal_kv_put(f"gcs://{LISTENS.format(job_id)}".encode(), b"yes", True, None, timeout=5)
                listening = True
            if client.internal_kv_exists(f"gcs://{STOP.format(job_id)}".encode(), None, timeout=5):
                break
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _ray_runs() -> bool:
    """Whether the main thread has started Ray."""
    is_initialized: Any = getattr(sys.modules.get("ray"), "is_initialized", None)  # None while it is imported
    return is_initialized is not None and is_initialized()


# ---------------------------------------------------------------- follow
# Follows a job at the terminal of a command: prints its log to the end, and acts at Ctrl-C.


INTERRUPTED = 130
EVERY_S, SILENT_S = 1.0, 300.0
ASKED_LESS = 20
"""A log that takes a second to arrive is asked for again after so many."""
QUESTION = "[d]etach and let it run (or Ctrl-C again), [s]top it, or [c]ontinue following [d]: "
ANSWERS = {"": "detach", "d": "detach", "s": "stop", "c": "continue"}


class HeldSignals:
    """Within it, Ctrl-C (SIGINT) and SIGTERM wait until the main thread takes them, so that no request is cut whose
    answer is needed; a second one that comes before that raises `Interrupted`.

    Outside the main thread signals are not handled, and one that is ignored stays ignored.
    """

    WAKE_EVERY_S = 0.2

    def __init__(self) -> None:
        self._arrived: int | None = None
        self._last = float("-inf")
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> HeldSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._hold)
        return self

    def __exit__(self, *error: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _hold(self, number: int, frame: object) -> None:
        now = time.monotonic()
        again, self._last = now - self._last <= SAME_SIGNAL_S, now
        if again:  # `timeout` and shells signal both the process and its group
            return
        if self._arrived is not None:
            raise Interrupted(signal.Signals(number).name)
        self._arrived = number

    def take(self, *, wait_s: float) -> int | None:
        """The signal that has arrived, or arrives within so many seconds."""
        ends = time.monotonic() + wait_s
        while self._arrived is None and (left := ends - time.monotonic()) > 0:
            time.sleep(min(left, self.WAKE_EVERY_S))
        number, self._arrived = self._arrived, None
        return number

    def answer(self) -> str | None:
        """A line that somebody types; None at a signal, which is taken, or at the end of the input."""
        self._last = float("-inf")  # a signal after the question is another one, however soon
        self._arrived = 0  # so that the next one raises
        try:
            return sys.stdin.readline() or None
        except Interrupted:
            return None
        finally:
            self._arrived = None
            self._last = float("-inf")


class JobLog:
    """The log of a job, printed as it grows.

    The whole log is asked for again and again: Ray's stream of a log may end while the job runs (ray #57002, #60665),
    or stay silent after its connection was lost.

    Args:
        every_s: seconds between two questions; more for a log that takes long.
        silent_s: seconds for which the server may not answer, as while a tunnel is opened again.

    Attributes:
        pause_s: seconds until it should be asked for again.
    """

    def __init__(self, server: JobServer, job_id: str, *, every_s: float = EVERY_S, silent_s: float = SILENT_S) -> None:
        self._server, self._id, self._every_s, self._silent_s = server, job_id, every_s, silent_s
        self._job: SubmittedJob | None = None
        self._printed, self._answered = 0, time.monotonic()
        self.pause_s = every_s

    def follow(self) -> SubmittedJob | None:
        """Print what is new; returns the job once it has ended.

        Raises:
            RunError: the server was silent for too long; the job may still run.
            InputError: the server does not know the job any more.
        """
        asked, self.pause_s = time.monotonic(), self._every_s
        try:
            self._job = job = self._server.job(self._id)  # before the log, which then holds all that it has printed
            log = self._server.logs(self._id)
        except (ServerSilent, RunError, RuntimeError) as error:  # the last two: it answers, but cannot say
            late = time.monotonic() - self._answered >= self._silent_s
            if self._job is not None and self._job.ended and (late or not isinstance(error, ServerSilent)):
                return self._job  # one that never began has no log
            if late:
                raise RunError(
                    f"{self._server.address} has not answered for {self._silent_s:.0f} s, and {self._id} may still "
                    f"run. Follow it again with: {shell_command('submit', 'logs', self._id, '--follow')}"
                ) from error
            return None
        if len(log) > self._printed:
            print_log(log[self._printed :])
            self._printed = len(log)
        self._answered = time.monotonic()
        self.pause_s = max(self._every_s, ASKED_LESS * (self._answered - asked))
        return job if job.ended else None


def follow_job(log: JobLog, server: JobServer, job_id: str, *, signals: HeldSignals) -> int:
    """Print the log of a job to its end, and return the exit code of the job, or 130 when detached.

    Ctrl-C asks whether to detach, to stop the job or to continue; without a terminal, at a second Ctrl-C and at SIGTERM
    the command detaches: the job keeps running.

    Raises:
        RunError: the server was silent for too long; the job may still run.
    """
    try:
        while (job := log.follow()) is None:
            number = signals.take(wait_s=log.pause_s)
            if number is None:
                continue
            answer = "detach" if number == signal.SIGTERM else ask(signals)
            if answer == "detach":
                raise Interrupted("detached")
            if answer == "continue":
                say(f"following {job_id} again")
                continue
            try:
                request_stop(server, job_id)
                say("asked the run to save and stop; Ctrl-C again to detach")
            except Exception as error:
                say(f"{job_id} cannot be asked to stop: {first_line(error)}. It keeps running")
    except Interrupted:
        say(f"{job_id} keeps running. {follow_again(server, job_id)}")
        return INTERRUPTED
    say(f"{job_id}: {job.outcome}, exit code {job.verdict}{_explained(job)}")
    return job.verdict or 0


def ask(signals: HeldSignals) -> str:
    """What to do with the job after Ctrl-C: "detach", "stop" or "continue".

    Without a terminal nobody can answer, so that the command detaches, as it does at a second Ctrl-C and at the end of
    the input.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "detach"
    with contextlib.suppress(termios.error):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)  # what was typed before is no answer
    sys.stderr.write("\n")
    while True:
        sys.stderr.write(QUESTION)
        sys.stderr.flush()
        line = signals.answer()
        if line is None:
            sys.stderr.write("\n")
            return "detach"
        if (answer := ANSWERS.get(line.strip().lower()[:1])) is not None:
            return answer


def follow_again(server: JobServer, job_id: str) -> str:
    """How to follow a job that keeps running."""
    return f"Follow it with: {shell_command('submit', 'logs', job_id, '--follow', '--address', server.address)}"


def print_log(text: str) -> None:
    """Print a piece of a log as it is."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(text: str) -> None:
    """Print a line about the job, not of it."""
    print(text, file=sys.stderr, flush=True)


def _explained(job: SubmittedJob) -> str:
    """Ray's own message, where no command of ours could say anything; of pip's many lines the one with the error."""
    if job.exit_code is not None or not job.message.strip():
        return ""
    lines = [line.strip() for line in job.message.splitlines() if line.strip()]
    return f" ({next((line for line in reversed(lines) if line.startswith('ERROR:')), lines[0])})"
