"""Counts the seconds of an attempt by purpose, and those of fetching batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Clock:
    """Seconds by purpose, on this worker, since its attempt began (DESIGN section 3, `time` in result.json).

    Args:
        step: the step that the attempt begins at.
    """

    def __init__(self, step: int = 0) -> None:
        purposes = ("data", "compute", "communication", "compile", "eval", "save", "restart", "lost")
        self.seconds: dict[str, float] = dict.fromkeys(purposes, 0.0)
        self._kept: dict[int, tuple[float, dict[str, float]]] = {}
        self.keep(step)

    def add(self, purpose: str, seconds: float) -> None:
        """Charge seconds to a purpose."""
        self.seconds[purpose] += seconds

    def share(self, purpose: str) -> float:
        """The fraction of all charged seconds that a purpose has; 0 before anything was charged."""
        total = sum(self.seconds.values())
        return self.seconds[purpose] / total if total else 0.0

    def keep(self, step: int) -> None:
        """Note the checkpoint of `step`: time spent until now is not lost where the run goes back to it."""
        self._kept[step] = time.perf_counter(), dict(self.seconds)

    def rewind(self, step: int, *, restart_s: float) -> None:
        """Go back to the checkpoint of `step`: time spent since then counts as lost, except that of the restart."""
        before = max((known for known in self._kept if known <= step), default=min(self._kept))
        kept_at, seconds = self._kept[before]
        self.seconds = dict(seconds)
        self.add("restart", restart_s)
        self.add("lost", time.perf_counter() - kept_at - restart_s)
        self._kept = {known: then for known, then in self._kept.items() if known < step}
        self.keep(step)


class Fetching:
    """Time that fetching batches takes from the training process.

    Attributes:
        seconds: waiting for batches, or making them.
        cpu_s: of these, CPU time of the training thread.
    """

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0

    def timed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the same batches; adds up the time of each."""
        while True:
            begin, cpu = time.perf_counter(), time.thread_time()
            item = next(batches, None)
            self.seconds += time.perf_counter() - begin
            self.cpu_s += time.thread_time() - cpu
            if item is None:
                return
            yield item
