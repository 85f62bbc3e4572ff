"""A submitted job from the terminal: its log as it grows, Ctrl-C, stopping it, and the table of `submit status`.

`jobs.submit` uses it after a submission and for `logs`, `stop` and `status`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

from cluster.preflight import submission_id
from jobs.driver.signals import SignalQueue
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


def stop_job(server: JobServer, job_id: str, *, say: Callable[[str], None]) -> SubmittedJob:
    """Stop a job, and return it once it has ended.

    A job in which no command of raytrain looks for the request to save is stopped by Ray at once.

    Args:
        say: prints a line about what is awaited.

    Raises:
        InputError: there is no such job, or it has ended already.
        RunError: it did not end, even killed by Ray.
        Interrupted: the command is cancelled.
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
        server.wait_until(lambda: server.job(job_id).ended, limit_s=grace_s + CLOSE_S)
    else:
        say(f"{job_id} is no command of raytrain, or has not begun: there is nothing to save")
    if not server.job(job_id).ended:
        say("asking Ray to stop it")
        server.kill(job_id)
        if not server.wait_until(lambda: server.job(job_id).ended, limit_s=KILLED_S):
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


class LogFollower:
    """Passes the log of a job on as it grows, and the job once it has ended. It works in a daemon thread.

    The whole log is asked for again and again: Ray's stream of a log may end while the job runs (ray #57002, #60665),
    or stay silent after its connection was lost.

    Args:
        put: takes, in order, each piece of the log as a string, and at the end the ended job or the exception that
            ended the following: `RunError` if the server was silent for too long (the job may still run), `InputError`
            if it does not know the job any more.
        every_s: seconds between two questions; more for a log that takes long.
        silent_s: seconds for which the server may not answer, as while a tunnel is opened again.
    """

    def __init__(
        self, server: JobServer, job_id: str, *, put: Callable[[object], None], every_s: float, silent_s: float
    ) -> None:
        self._server, self._id, self._put = server, job_id, put
        self._every_s, self._silent_s = every_s, silent_s
        self._printed = 0
        self._closed = threading.Event()

    def start(self) -> None:
        """Start to follow, and return."""
        threading.Thread(target=self._run, daemon=True, name="follow-job").start()

    def close(self) -> None:
        """Pass nothing on from here on."""
        self._closed.set()

    def _run(self) -> None:
        try:
            item: object = self._follow()
        except BaseException as error:  # raised in the main thread
            item = error
        if not self._closed.is_set():
            self._put(item)

    def _follow(self) -> SubmittedJob:
        answered, job = time.monotonic(), None
        while True:
            asked, pause = time.monotonic(), self._every_s
            try:
                job = self._server.job(self._id)  # before the log, which then holds all that an ended job has printed
                self._pass_on(self._server.logs(self._id))
                if job.ended:
                    return job
                answered = time.monotonic()
                pause = max(pause, ASKED_LESS * (answered - asked))
            except (ServerSilent, RunError, RuntimeError) as error:  # the last two: it answers, but cannot say
                late = time.monotonic() - answered >= self._silent_s
                if job is not None and job.ended and (late or not isinstance(error, ServerSilent)):
                    return job  # one that never began has no log
                if late:
                    raise RunError(
                        f"{self._server.address} has not answered for {self._silent_s:.0f} s, and {self._id} may "
                        f"still run. Follow it again with: {shell_command('submit', 'logs', self._id, '--follow')}"
                    ) from error
            if self._closed.wait(pause):
                raise RunError("no longer followed")

    def _pass_on(self, log: str) -> None:
        if len(log) > self._printed and not self._closed.is_set():
            self._put(log[self._printed :])
            self._printed = len(log)


def follow_job(
    server: JobServer, job_id: str, *, signals: SignalQueue, every_s: float = EVERY_S, silent_s: float = SILENT_S
) -> int:
    """Print the log of a job to its end, and return the exit code of the job, or 130 when detached.

    Ctrl-C asks whether to detach, to stop the job or to continue; without a terminal, at a second Ctrl-C and at SIGTERM
    the command detaches: the job keeps running.

    Args:
        signals: of this command, in its main thread; they are taken here only.
        every_s, silent_s: as for `LogFollower`.

    Raises:
        RunError: the server was silent for too long; the job may still run.
    """
    follower = LogFollower(server, job_id, put=signals.put, every_s=every_s, silent_s=silent_s)
    follower.start()
    ended: list[SubmittedJob] = []

    def show(item: object) -> None:
        if isinstance(item, str):
            print_log(item)
        elif isinstance(item, BaseException):
            raise item
        elif isinstance(item, SubmittedJob):
            ended.append(item)

    try:
        while not ended:
            number = signals.take()
            if number is None:
                show(signals.get())
                continue
            while not ended and (item := signals.get(wait_s=0.0)) is not None:
                show(item)
            answer = "continue" if ended else "detach" if number == signal.SIGTERM else ask(signals)
            if answer == "detach":
                say(f"{job_id} keeps running. {follow_again(server, job_id)}")
                return INTERRUPTED
            if answer == "stop":
                try:
                    request_stop(server, job_id)
                    say("asked the run to save and stop; Ctrl-C again to detach")
                except Exception as error:
                    say(f"{job_id} cannot be asked to stop: {first_line(error)}. It keeps running")
            elif not ended:
                say(f"following {job_id} again")
    finally:
        follower.close()
    (job,) = ended
    say(f"{job_id}: {job.outcome}, exit code {job.verdict}{_explained(job)}")
    return job.verdict or 0


def ask(signals: SignalQueue) -> str:
    """What to do with the job after Ctrl-C: "detach", "stop" or "continue".

    Without a terminal nobody can answer, so that the command detaches, as it does at a second Ctrl-C and at the end of
    the input.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "detach"
    terminal = sys.stdin.fileno()
    with contextlib.suppress(termios.error):
        termios.tcflush(terminal, termios.TCIFLUSH)  # what was typed before is no answer
    sys.stderr.write("\n")
    while True:
        sys.stderr.write(QUESTION)
        sys.stderr.flush()
        line = signals.read_line(terminal)
        if line is None:
            sys.stderr.write("\n")
            return "detach"
        answer = ANSWERS.get(line.strip().lower()[:1])
        if answer is not None:
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
