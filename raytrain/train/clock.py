"""Where the seconds of an attempt go, by purpose; and what fetching batches takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

Got = TypeVar("Got")


class Clock:
    """Seconds by purpose, on this worker, since its attempt began (DESIGN section 3, `time` in result.json).

    Args:
        step: that the attempt begins with.
    """

    def __init__(self, step: int = 0) -> None:
        purposes = ("data", "compute", "communication", "compile", "eval", "save", "restart", "lost")
        self.seconds: dict[str, float] = dict.fromkeys(purposes, 0.0)
        self._kept: dict[int, tuple[float, dict[str, float]]] = {}
        self.keep(step)

    def add(self, purpose: str, seconds: float) -> None:
        """Charge seconds to a purpose."""
        self.seconds[purpose] += seconds

    def keep(self, step: int) -> None:
        """A checkpoint of `step`: with it nothing of what was spent so far can be lost."""
        self._kept[step] = time.perf_counter(), dict(self.seconds)

    def rewind(self, step: int, *, restart_s: float) -> None:
        """The checkpoint of `step` is in force again: whatever came after it was lost, but for the way back."""
        before = max((known for known in self._kept if known <= step), default=min(self._kept))
        kept_at, seconds = self._kept[before]
        self.seconds = dict(seconds)
        self.add("restart", restart_s)
        self.add("lost", time.perf_counter() - kept_at - restart_s)
        self._kept = {known: then for known, then in self._kept.items() if known < step}
        self.keep(step)


class Fetching:
    """What getting batches takes from the process that trains.

    Attributes:
        seconds: in which it waited for them, or made them.
        cpu_s: of these, in which it computed itself.
    """

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0

    def timed(self, batches: Iterator[Got]) -> Iterator[Got]:
        """The same batches, what each takes added up."""
        came: Got | None = None
        while True:
            begin, cpu = time.perf_counter(), time.thread_time()
            came = next(batches, None)
            self.seconds += time.perf_counter() - begin
            self.cpu_s += time.thread_time() - cpu
            if came is None:
                return
            yield came
