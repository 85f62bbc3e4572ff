"""Follows a job: passes its log on as it grows, and the job once the server says that it has ended.

Ray's stream of a log may end while the job runs (ray #57002, #60665), or stay silent after its connection was lost.
What becomes of a stream therefore says nothing: the job's status is asked, and the stream is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from jobs.submission.server import JobServer, ServerSilent, SubmittedJob
from raytrain.errors import RunError
from raytrain.runs.commands import shell_command


@dataclass(frozen=True)
class Pace:
    """How long the follower waits, in seconds.

    Attributes:
        status: between two questions for the status of the job.
        drain: for the end of the stream, after the end of the job.
        silent: for a server that does not answer, as while a tunnel is opened again.
        again: until a stream that ended is opened again, at first; doubled for each that brought nothing new.
        stalled: without new text, until the log is read beside the stream; doubled each time that it holds no more.
        most: limit of what is doubled.
    """

    status: float = 1.0
    drain: float = 15.0
    silent: float = 300.0
    again: float = 1.0
    stalled: float = 30.0
    most: float = 300.0


class LogFollower:
    """Follows the log of one job in daemon threads: what it waits for does not keep the main thread from acting.

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
        self._lock = threading.Lock()
        self._stream: _Stream | None = None
        self._ends = threading.Event()

    def start(self) -> None:
        """Start to follow, and return."""
        threading.Thread(target=self._run, daemon=True, name="follow-job").start()

    def close(self) -> None:
        """Stop; nothing is passed on afterwards."""
        self._ends.set()
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _run(self) -> None:
        try:
            item: object = self._follow()
        except BaseException as error:  # raised in the main thread
            item = error
        if not self._ends.is_set():
            self._put(item)
        self.close()

    def _follow(self) -> SubmittedJob:
        pause = self._pace.again
        while True:
            before = self.printed
            stream = _Stream(self._server, self._id, self._deliver)
            self.streams += 1
            with self._lock:
                self._stream = None if self._ends.is_set() else stream
            stream.start()
            ended = self._ended_or_cut(stream)
            stream.close()
            if ended is not None:
                return ended
            pause = self._pace.again if self.printed > before else min(2 * pause, self._pace.most)
            ended = self._ended_within(pause, stream)
            if ended is not None:
                return ended
            if self._ends.is_set():
                raise RunError("no longer followed")

    def _ended_within(self, pause_s: float, stream: _Stream) -> SubmittedJob | None:
        """The job if it ends within so many seconds without a stream."""
        until = time.monotonic() + pause_s
        while (left := until - time.monotonic()) > 0 and not self._ends.wait(min(left, self._pace.status)):
            job = self._job()
            if job.ended:
                self._read_rest(stream)
                return job
        return None

    def _ended_or_cut(self, stream: _Stream) -> SubmittedJob | None:
        """The job once it has ended and its log is complete; None if the stream ends before."""
        stalled_s, printed, since = self._pace.stalled, self.printed, time.monotonic()
        while not self._ends.is_set():
            cut = stream.ended.wait(self._pace.status)
            job = self._job()
            if job.ended:
                stream.ended.wait(self._pace.drain)
                if not stream.complete:
                    self._read_rest(stream)
                return job
            if cut:
                return None
            if self.printed > printed:
                stalled_s, printed, since = self._pace.stalled, self.printed, time.monotonic()
            elif time.monotonic() - since >= stalled_s:
                if self._read_rest(stream):
                    return None
                stalled_s, since = min(2 * stalled_s, self._pace.most), time.monotonic()
        return None

    def _read_rest(self, stream: _Stream) -> bool:
        """Pass on what the log holds beyond what the stream brought; returns whether there was any."""
        before = self.printed
        with contextlib.suppress(ServerSilent, RunError, RuntimeError):  # RuntimeError: an answer other than the log
            self._deliver(stream, 0, self._server.logs(self._id))
        return self.printed > before

    def _deliver(self, stream: _Stream, start: int, text: str) -> None:
        """Pass text on that begins at character `start` of the log, without what was passed on before."""
        with self._lock:
            if stream is self._stream and start + len(text) > self.printed:
                self._put(text[max(0, self.printed - start) :])
                self.printed = start + len(text)

    def _job(self) -> SubmittedJob:
        since = time.monotonic()
        while True:
            try:
                return self._server.job(self._id)
            except (ServerSilent, RunError) as error:  # RunError: it answers, but cannot say
                if time.monotonic() - since >= self._pace.silent or self._ends.is_set():
                    raise RunError(
                        f"{self._server.address} has not answered for {self._pace.silent:.0f} s, and {self._id} may "
                        f"still run. Follow it again with: {shell_command('submit', 'logs', self._id, '--follow')}"
                    ) from error
            self._ends.wait(self._pace.again)


class _Stream:
    """One stream of the log, read in a daemon thread.

    Attributes:
        ended: set at its end, whatever the reason.
        complete: it ended as a stream does at the end of its job; False also while it is read.
    """

    def __init__(self, server: JobServer, job_id: str, deliver: Callable[[_Stream, int, str], None]) -> None:
        self._server, self._id, self._deliver = server, job_id, deliver
        self.ended, self.complete = threading.Event(), False
        self._closing: Callable[[], object] | None = None
        self._closed = False

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="follow-log").start()

    def close(self) -> None:
        """End the stream."""
        self._closed = True
        if self._closing is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed: the stream has ended
                self._closing()

    def _run(self) -> None:
        try:
            self.complete = asyncio.run(self._read())
        except (Exception, asyncio.CancelledError):  # however it was cut, the job's status and its log decide
            self.complete = False
        finally:
            self.ended.set()

    async def _read(self) -> bool:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._closing = lambda: loop.call_soon_threadsafe(task.cancel)
        position = 0
        if not self._closed:
            async for text in self._server.client.tail_job_logs(self._id):
                self._deliver(self, position, text)
                position += len(text)
        return not self._closed
