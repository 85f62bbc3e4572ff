"""The observer that makes a run take turns: rank 0 waits between blocks, and the other workers for its vote.

It sits where a user's own observer sits (`telemetry.observers`), so the run it paces is the product's, unchanged: the
time of a block holds the steps, the logged rows, the votes, and everything else that a run does beside training.
"""

from __future__ import annotations

import time
from typing import Any

from jobs.bench.harness.lines import Line, dial


class PaceObserver:
    """One per run, in the worker of rank 0; silent until the attempt begins."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._until = 0
        self._began = self._cpu = 0.0
        self._losses: list[float] = []

    def event(self, row: dict[str, Any]) -> None:
        """The attempt's own event comes right before the first step: the start-up ends here."""
        if row["kind"] == "attempt" and self._line is None:
            self._line = dial(arm="ours", rank=0)
            self._wait()

    def metrics(self, row: dict[str, Any]) -> None:
        """A logged row; where it ends a block, tell the seconds and wait for the next."""
        if self._line is None:
            return
        ended, cpu = time.perf_counter(), time.process_time()
        self._losses.append(row["loss"])
        if row["step"] >= self._until:
            self._line.send({"seconds": ended - self._began, "cpu_s": cpu - self._cpu, "losses": self._losses})
            self._losses = []
            self._wait()

    def _wait(self) -> None:
        assert self._line is not None
        steps = self._line.receive()["steps"]
        if steps == 0:
            self.close()
        self._until += steps
        self._began, self._cpu = time.perf_counter(), time.process_time()

    def close(self) -> None:
        """The last block is over: the run goes on to its end alone."""
        if self._line is not None:
            self._line.close()
        self._line = None
