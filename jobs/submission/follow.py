"""Follows a job at the terminal of a command: prints its log to the end, and acts at Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import termios
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from jobs.driver.signals import SignalQueue
from jobs.submission.server import JobServer, ServerSilent, SubmittedJob
from jobs.submission.stop import request_stop
from raytrain.errors import RunError, first_line
from raytrain.runs.commands import shell_command

INTERRUPTED = 130
QUESTION = "[d]etach and let it run (or Ctrl-C again), [s]top it, or [c]ontinue following [d]: "
ANSWERS = {"": "detach", "d": "detach", "s": "stop", "c": "continue"}


@dataclass(frozen=True)
class Pace:
    """How long the follower waits, in seconds.

    Attributes:
        status: without new text, until the status of the job is asked.
        silent: for a server that does not answer, as while a tunnel is opened again.
        again: until a stream that ended is opened again, at first; doubled for each that brought nothing new.
        most: limit of what is doubled.
        stalled: without new text, until the log is read beside the stream; doubled each time that it holds no more.
    """

    status: float = 1.0
    silent: float = 300.0
    again: float = 1.0
    most: float = 15.0
    stalled: float = 30.0


class LogFollower:
    """Passes the log of a job on as it grows, and the job once it has ended. It works in a daemon thread.

    Ray's stream of a log may end while the job runs (ray #57002, #60665), or stay silent after its connection was
    lost. What becomes of a stream therefore says nothing: the job's status is asked, and the stream is opened again.

    Args:
        put: takes, in order, each piece of the log as a string, and at the end the ended job or the exception that
            ended the following: `RunError` if the server was silent for too long (the job may still run), `InputError`
            if it does not know the job any more.

    Attributes:
        printed: characters of the log so far. Each stream begins at the start of the log.
        streams: how many streams were opened.
    """

    def __init__(
        self, server: JobServer, job_id: str, *, put: Callable[[object], None], pace: Pace | None = None
    ) -> None:
        self._server, self._id, self._put, self._pace = server, job_id, put, pace or Pace()
        self.printed = self.streams = 0
        self._closed = False

    def start(self) -> None:
        """Start to follow, and return."""
        threading.Thread(target=self._run, daemon=True, name="follow-job").start()

    def close(self) -> None:
        """Pass nothing on from here on."""
        self._closed = True

    def _run(self) -> None:
        try:
            item: object = asyncio.run(self._follow())
        except BaseException as error:  # raised in the main thread
            item = error
        if not self._closed:
            self._put(item)

    async def _follow(self) -> SubmittedJob:
        pause = self._pace.again
        while not self._closed:
            before = self.printed
            self.streams += 1
            async with contextlib.aclosing(self._server.client.tail_job_logs(self._id)) as stream:
                job = await self._ended_in(stream)
            if job is not None:
                self._read_whole()
                return job
            pause = self._pace.again if self.printed > before else min(2 * pause, self._pace.most)
            await asyncio.sleep(pause)
        raise RunError("no longer followed")

    async def _ended_in(self, stream: AsyncIterator[str]) -> SubmittedJob | None:
        """The job once it has ended; None if the stream ends before, or stalls."""
        position, stalled_s, since = 0, self._pace.stalled, time.monotonic()
        following: asyncio.Task[str | None] | None = None
        try:
            while not self._closed:
                following = following or asyncio.create_task(_next_of(stream))
                await asyncio.wait({following}, timeout=self._pace.status)
                cut = following.done() and (following.exception() is not None or following.result() is None)
                if following.done() and not cut:
                    text, following = str(following.result()), None
                    self._deliver(position, text)
                    position, stalled_s, since = position + len(text), self._pace.stalled, time.monotonic()
                    continue
                job = self._job()
                if job.ended:
                    return job
                if cut:
                    return None
                if time.monotonic() - since >= stalled_s:
                    if self._read_whole():
                        return None
                    stalled_s, since = 2 * stalled_s, time.monotonic()
        finally:
            if following is not None and following.cancel():
                await asyncio.wait({following})
        return None

    def _read_whole(self) -> bool:
        """Pass on what the log holds beyond what the streams brought; returns whether there was any."""
        before = self.printed
        with contextlib.suppress(ServerSilent, RunError, RuntimeError):  # RuntimeError: an answer other than the log
            self._deliver(0, self._server.logs(self._id))
        return self.printed > before

    def _deliver(self, start: int, text: str) -> None:
        """Pass text on that begins at character `start` of the log, without what was passed on before."""
        if start + len(text) > self.printed and not self._closed:
            self._put(text[max(0, self.printed - start) :])
            self.printed = start + len(text)

    def _job(self) -> SubmittedJob:
        since = time.monotonic()
        while True:
            try:
                return self._server.job(self._id)
            except (ServerSilent, RunError) as error:  # RunError: it answers, but cannot say
                if time.monotonic() - since >= self._pace.silent or self._closed:
                    raise RunError(
                        f"{self._server.address} has not answered for {self._pace.silent:.0f} s, and {self._id} may "
                        f"still run. Follow it again with: {shell_command('submit', 'logs', self._id, '--follow')}"
                    ) from error
            time.sleep(self._pace.again)


async def _next_of(stream: AsyncIterator[str]) -> str | None:
    return await anext(stream, None)


def follow_job(server: JobServer, job_id: str, *, signals: SignalQueue, pace: Pace | None = None) -> int:
    """Print the log of a job to its end, and return the exit code of the job, or 130 when detached.

    Ctrl-C asks whether to detach, to stop the job or to continue; without a terminal, at a second Ctrl-C and at SIGTERM
    the command detaches: the job keeps running.

    Args:
        signals: of this command, in its main thread; they are taken here only.

    Raises:
        RunError: the server was silent for too long; the job may still run.
    """
    follower = LogFollower(server, job_id, put=signals.put, pace=pace)
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
