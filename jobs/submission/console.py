"""The terminal of a command that follows a job: prints its log, and acts at Ctrl-C. It runs in the main thread."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
import threading
from dataclasses import dataclass

from jobs.driver.signals import SignalQueue
from jobs.submission.follow import LogFollower, Pace
from jobs.submission.server import JobServer, SubmittedJob
from jobs.submission.stop_request import request_stop
from raytrain.errors import first_line
from raytrain.runs.commands import shell_command

INTERRUPTED = 130
QUESTION = "[d]etach and let it run (or Ctrl-C again), [s]top it, or [c]ontinue following [d]: "
ANSWERS = {"": "detach", "d": "detach", "s": "stop", "c": "continue"}


@dataclass(frozen=True)
class StopAsked:
    """The job was asked to stop; `error` says why it could not be asked."""

    error: str | None


class JobConsole:
    """Follows one job at the terminal of a command.

    Ctrl-C asks whether to detach, to stop the job or to continue; without a terminal, at a second Ctrl-C and at SIGTERM
    the command detaches: the job keeps running.

    Args:
        signals: of this command; they are taken here only.
    """

    def __init__(self, server: JobServer, job_id: str, *, signals: SignalQueue, pace: Pace | None = None) -> None:
        self._server, self._id, self._signals = server, job_id, signals
        self._follower = LogFollower(server, job_id, put=signals.put, pace=pace)
        self._stopping = False
        self._job: SubmittedJob | None = None

    def follow(self) -> int:
        """Print the log to its end, and return the exit code of the job, or 130 when detached.

        Raises:
            RunError: the server was silent for too long; the job may still run.
        """
        self._follower.start()
        try:
            while self._job is None:
                number = self._signals.take()
                if number is None:
                    self._show(self._signals.get())
                elif self._detaches(number):
                    say(f"{self._id} keeps running. {follow_again(self._server, self._id)}")
                    return INTERRUPTED
        finally:
            self._follower.close()
        verdict = self._job.verdict
        assert verdict is not None
        say(f"{self._id}: {self._job.outcome}, exit code {verdict}{_explained(self._job)}")
        return verdict

    def _show(self, item: object) -> None:
        if isinstance(item, str):
            print_log(item)
        elif isinstance(item, StopAsked):
            self._stopping = item.error is None
            say(
                "asked the run to save and stop; Ctrl-C again to detach"
                if item.error is None
                else f"{self._id} cannot be asked to stop: {item.error}. It keeps running"
            )
        elif isinstance(item, BaseException):
            raise item
        elif isinstance(item, SubmittedJob):
            self._job = item

    def _detaches(self, number: int) -> bool:
        """Act on a signal; returns whether the command detaches from the job."""
        while self._job is None and (item := self._signals.get(wait_s=0.0)) is not None:
            self._show(item)
        if self._job is not None:
            return False
        answer = "detach" if number == signal.SIGTERM else ask(self._signals)
        if answer == "stop" and not self._stopping:
            self._stopping = True
            threading.Thread(target=self._request_stop, daemon=True, name="ask-to-stop").start()
        elif answer == "stop":
            say(f"{self._id} was asked to stop already")
        elif answer == "continue":
            say(f"following {self._id} again")
        return answer == "detach"

    def _request_stop(self) -> None:
        try:
            request_stop(self._server, self._id)
            error = None
        except Exception as failure:  # shown in the main thread
            error = first_line(failure)
        self._signals.put(StopAsked(error))


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
