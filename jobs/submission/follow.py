"""Follows a job: prints its log as it grows, and returns the job once the server says that it has ended.

Ray's stream of a log may end while the job runs (ray #57002, #60665). The end of the stream therefore says nothing: the
status is asked, and the stream is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from jobs.submission.server import JobServer, ServerSilent, SubmittedJob
from raytrain.errors import RunError

STATUS_EVERY_S = 1.0
#: After the end of a job, its stream is read to its end for this long.
DRAIN_S = 15.0
#: A server may be silent for this long, as while a tunnel is opened again.
SILENT_S = 300.0
AGAIN_S = 1.0


class LogFollower:
    """Prints the log of one job.

    Attributes:
        printed: characters of the log so far. Each stream begins at the start of the log.
        streams: how many streams were opened.
    """

    def __init__(self, server: JobServer, job_id: str, *, write: Callable[[str], None]) -> None:
        self._server, self._id, self._write = server, job_id, write
        self.printed = self.streams = 0

    def run(self) -> SubmittedJob:
        """Follow the job to its end.

        Raises:
            RunError: the server was silent for too long; the job may still run.
            KeyboardInterrupt: at a signal; it can be called again.
        """
        return asyncio.run(self._follow())

    async def _follow(self) -> SubmittedJob:
        while True:
            stream = asyncio.create_task(self._stream())
            try:
                ended = await self._ended_or_cut(stream)
            finally:
                stream.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await stream
            if ended is not None:
                return ended
            await asyncio.sleep(AGAIN_S)

    async def _ended_or_cut(self, stream: asyncio.Task[bool]) -> SubmittedJob | None:
        """The job once it has ended and its log is printed; None if the stream ends before."""
        while True:
            await asyncio.wait([stream], timeout=STATUS_EVERY_S)
            complete = stream.done() and stream.result()
            job = await self._job()
            if job.ended:
                if not stream.done():
                    await asyncio.wait([stream], timeout=DRAIN_S)
                elif not complete:
                    await asyncio.wait_for(asyncio.shield(self._rest()), DRAIN_S)
                return job
            if stream.done():
                return None

    async def _rest(self) -> None:
        """What the log holds beyond what is printed, where the last stream was cut."""
        with contextlib.suppress(ServerSilent):
            text = await asyncio.to_thread(self._server.logs, self._id)
            if len(text) > self.printed:
                self._write(text[self.printed :])
                self.printed = len(text)

    async def _stream(self) -> bool:
        """Print one stream, without what is printed already; False if it was cut."""
        import aiohttp

        self.streams += 1
        position = 0
        try:
            async for text in self._server.client.tail_job_logs(self._id):
                start, position = position, position + len(text)
                if position > self.printed:
                    self._write(text[max(0, self.printed - start) :])
                    self.printed = position
        except (aiohttp.ClientError, OSError, RuntimeError):  # RuntimeError: closed without a closing handshake
            return False
        return True

    async def _job(self) -> SubmittedJob:
        silent_s = 0.0
        while True:
            try:
                return await asyncio.to_thread(self._server.job, self._id)
            except ServerSilent as error:
                if silent_s >= SILENT_S:
                    raise RunError(
                        f"{self._server.address} has not answered for {SILENT_S:.0f} s, and {self._id} may still run. "
                        f"Follow it again with: raytrain submit logs {self._id} --follow"
                    ) from error
            await asyncio.sleep(AGAIN_S)
            silent_s += AGAIN_S
