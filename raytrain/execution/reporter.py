"""Where rows of a run go: rank 0's reporter writes them to the run folder and shows them to observers and driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raytrain.errors import RunError
from raytrain.execution.observers import Observers
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event

SAID = ("death",)
"""Kinds of events whose reason also reaches the terminal, as what rank 0 prints does."""


class Superseded(RunError):
    """A newer attempt owns the run folder; this worker must end without writing."""


class SilentReporter:
    """Every rank but 0."""

    def metrics(self, row: dict[str, Any]) -> None:
        """Nothing is written."""

    def event(self, kind: str, **fields: Any) -> None:
        """Nothing is written."""

    def window(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing to close."""


class RankZeroReporter:
    """Writes metrics.jsonl, experts.jsonl and events.jsonl, tells observers, pushes progress to the driver.

    Args:
        run: the run folder.
        attempt: number of this attempt; a newer one in the folder ends this worker before it writes.
        observers: objects for `Observers`.
        push: sends a status mapping to the driver, at most twice a second; None without a driver.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        attempt: int,
        observers: list[Any],
        push: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.run = run
        self.attempt = attempt
        self._observers = Observers(observers, on_failure=self._observer_failed)
        self._push = push
        self._pushed = 0.0
        self.last_row: dict[str, Any] = {}

    def fence(self) -> None:
        """Raise `Superseded` if a newer attempt has taken the run folder."""
        newest = self.run.current_attempt()
        if newest != self.attempt:
            raise Superseded(f"attempt {newest} has taken over {self.run.path}; attempt {self.attempt} ends")

    def metrics(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl; it reaches the file at once."""
        self.fence()
        self.run.writer(self.run.metrics).write(row)
        self._observers.metrics(row)
        self.last_row = row
        now = time.monotonic()
        if self._push is not None and now - self._pushed > 0.5:
            self._pushed = now
            self._push({"row": row})

    def event(self, kind: str, **fields: Any) -> None:
        """One row of events.jsonl."""
        self.fence()
        row = event(kind, attempt=self.attempt, **fields)
        self.run.append_event(row)
        if kind in SAID:
            print(row["reason"])
        self._observers.event(row)
        if kind == "out_of_memory":
            print(f"out of memory: {row['reason']}")

    def window(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        """One row of experts.jsonl, and routing traces by step."""
        self.fence()
        self.run.writer(self.run.experts).write(row)
        for step, data in traces.items():
            self.run.write_bytes(self.run.routing_trace(step), data)

    def _observer_failed(self, name: str, trace: str) -> None:
        self.run.append_event(event("observer_failed", attempt=self.attempt, observer=name, traceback=trace))

    def close(self) -> None:
        """Close observers and flush what an object store still waits for. Raises Superseded, having closed them."""
        self._observers.close()
        self.fence()
        self.run.flush()
