"""The line between the driver and rank 0: a flag one way, progress the other. An asyncio object, made a Ray actor
by `trainer.py` (no CPU reserved); nothing here imports Ray."""

from __future__ import annotations

import asyncio
from typing import Any


class DriverChannel:
    """Runs in an actor of its own. Every method is async, so that a long poll blocks nobody."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._status: dict[str, Any] = {}
        self._said: dict[str, dict[int, str]] = {}
        self._next: dict[str, int] = {}

    async def stop(self) -> None:
        """Driver: ask the workers to save at the next step boundary and return."""
        self._stop.set()

    async def wait_for_stop(self) -> bool:
        """Rank 0: returns when a stop is asked for (a thread waits in this call)."""
        await self._stop.wait()
        return True

    async def push(self, status: dict[str, Any]) -> None:
        """Rank 0: the newest progress: {"phase", "step", "row", ...}."""
        self._status.update(status)

    async def status(self) -> dict[str, Any]:
        """Driver: what was pushed last."""
        return self._status

    async def say(self, life: str, number: int, text: str) -> None:
        """Rank 0: lines its code printed, for the driver's terminal; numbered, since calls may overtake each other.
        Each attempt is another `life`, and begins at 0 again."""
        self._said.setdefault(life, {})[number] = text

    async def printed(self, *, last: bool = False) -> str:
        """Driver: what was printed since the last call, in order; what an overtaken call holds comes with it. Of an
        attempt that another has followed, and of all in a `last` call, nothing is waited for."""
        heard = []
        newest = next(reversed(self._said), None)
        for life, said in self._said.items():
            at = self._next.get(life, 0)
            while at in said:
                heard.append(said.pop(at))
                at += 1
            self._next[life] = at
            if last or life != newest:
                heard += [said.pop(number) for number in sorted(said)]
        return "".join(heard)
