"""Follows a job at the terminal of a command: prints its log to the end, and acts at Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable

from jobs.driver.signals import SignalQueue
from jobs.submission.server import JobServer, ServerSilent, SubmittedJob
from jobs.submission.stop import request_stop
from raytrain.errors import RunError, first_line
from raytrain.runs.commands import shell_command

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
