"""Reports the rows of a run: rank 0 writes them to the run folder and passes them to the observers and the driver."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from raytrain.errors import RunError
from raytrain.execution.observers import Observers
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event, rate_of

REPORT_EVERY_S = 5.0
PRINTED = ("death",)
"""Kinds of events whose reason is also printed to the terminal."""


class Superseded(RunError):
    """A newer attempt owns the run folder; this worker ends without writing."""


class SilentReporter:
    """The reporter of every rank but 0; writes nothing."""

    last_row: Mapping[str, Any] = {}

    def fence(self) -> None:
        """Never raises: a reporter that does not write needs no fence."""

    def metrics(self, row: dict[str, Any]) -> None:
        """Nothing is written."""

    def event(self, kind: str, **fields: Any) -> None:
        """Nothing is written."""

    def interval(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing to close."""


class RankZeroReporter:
    """Writes metrics.jsonl, experts.jsonl and events.jsonl, calls observers, reports progress to the driver.

    Args:
        run: the run folder.
        attempt: number of this attempt; the worker stops writing once the folder has a newer one.
        observers: objects for `Observers`.
        report_progress: sends a progress mapping to the driver, at most twice a second; None without a driver.
        print_epochs: a line about each epoch stays on the driver's terminal.
        print_memory: and one about the memory of each other train row.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        attempt: int,
        observers: list[Any],
        report_progress: Callable[[dict[str, Any]], None] | None,
        print_epochs: bool = False,
        print_memory: bool = False,
        from_step: int = 0,
    ) -> None:
        self.run = run
        self.attempt = attempt
        self._observers = Observers(observers, on_failure=self._observer_failed)
        self._report_progress = report_progress
        self._print_epochs, self._print_memory = print_epochs, print_memory
        self._reported = 0.0
        rows = run.read_rows(run.metrics) if from_step else []
        kept = (float(row["loss"]) for row in rows if row["kind"] == "eval" and row["step"] <= from_step)
        self._best: float | None = min(filter(math.isfinite, kept), default=None)
        self.last_row: dict[str, Any] = {}

    def fence(self) -> None:
        """Raise `Superseded` if a newer attempt has taken over the run folder."""
        newest = self.run.current_attempt()
        if newest != self.attempt:
            raise Superseded(f"attempt {newest} has taken over {self.run.path}; attempt {self.attempt} ends")

    def metrics(self, row: dict[str, Any]) -> None:
        """Write one row of metrics.jsonl, immediately."""
        self.fence()
        self.run.writer(self.run.metrics).write(row)
        self._observers.metrics(row)
        self.last_row = row
        if row["kind"] == "eval":
            self._print_evaluation(row)
        elif self._print_epochs and row.get("ends_epoch"):
            print(epoch_line(row))
        elif self._print_memory:
            print(memory_line(row))
        now = time.monotonic()
        if self._report_progress is not None and now - self._reported > 0.5:
            self._reported = now
            self._report_progress({"row": row})

    def _print_evaluation(self, row: dict[str, Any]) -> None:
        """A line that stays on the driver's terminal."""
        loss, before = float(row["loss"]), self._best
        self._best = loss if before is None or loss < before else before
        compared = "" if before is None else ", the best so far" if loss < before else f", best {before:.4f}"
        print(f"step {row['step']}: eval loss {loss:.4f}{compared}")

    def event(self, kind: str, **fields: Any) -> None:
        """Write one row of events.jsonl."""
        self.fence()
        row = event(kind, attempt=self.attempt, **fields)
        self.run.append_event(row)
        if kind in PRINTED or fields.get("what") == "rollback":
            print(row["reason"])
        self._observers.event(row)
        if kind == "out_of_memory":
            print(f"out of memory: {row['reason']}")

    def interval(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        """Write one row of experts.jsonl, and routing traces by step."""
        self.fence()
        self.run.writer(self.run.experts).write(row)
        for step, data in traces.items():
            self.run.write_bytes(self.run.routing_trace(step), data)

    def _observer_failed(self, name: str, trace: str) -> None:
        self.run.append_event(event("observer_failed", attempt=self.attempt, observer=name, traceback=trace))

    def close(self) -> None:
        """Close the observers, then upload pending rows to an object store. Raises Superseded."""
        self._observers.close()
        self.fence()
        self.run.flush()


def epoch_line(row: Mapping[str, Any]) -> str:
    """The line about an epoch that ended with this train row; memory is that of rank 0 at its end."""
    return f"epoch {row['epoch']} ended at step {row['step']}: loss {row['loss']:.4f}, {rate_of(row)}, {_memory(row)}"


def memory_line(row: Mapping[str, Any]) -> str:
    """The line about the memory of rank 0 at a train row: in use now, and the peak since the row before."""
    return f"step {row['step']}: {_memory(row)}, {float(row['peak_memory_bytes']) / 2**30:.2f} GiB peak"


def _memory(row: Mapping[str, Any]) -> str:
    used, held = (float(row[f"memory_{name}_bytes"]) / 2**30 for name in ("allocated", "reserved"))
    return f"memory {used:.2f} GiB allocated, {held:.2f} GiB reserved"


class StepReports:
    """Tells the driver of rank 0's newest step and activity from a thread: the loop itself reports only logged rows.

    Args:
        current: returns the progress; called in the thread.
        report: sends a progress mapping to the driver; called where the progress has changed.
    """

    def __init__(self, current: Callable[[], dict[str, Any]], report: Callable[[dict[str, Any]], None]) -> None:
        self._current, self._report = current, report
        self._reported: dict[str, Any] = {}
        self._over = threading.Event()

    def start(self) -> None:
        """Report every `REPORT_EVERY_S` seconds."""
        threading.Thread(target=self._run, daemon=True, name="step-reports").start()

    def close(self) -> None:
        """Report no more."""
        self._over.set()

    def report(self) -> None:
        """Send the progress, if it has changed."""
        progress = self._current()
        if progress != self._reported:
            self._reported = progress
            self._report(progress)

    def _run(self) -> None:
        while not self._over.wait(REPORT_EVERY_S):
            self.report()


RankReporter = RankZeroReporter | SilentReporter
