"""What a worker reports: rows to the run folder, observers and the driver (rank 0), and each rank's own log file.

`raytrain.train.loop` reports each row; a user's observer (`telemetry.observers`) receives every row and cannot change
the run.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import math
import os
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

from raytrain.errors import InputError, RunError
from raytrain.runs.folder import MirroredFolder, RunFolder
from raytrain.runs.records import event, rate_of


class Observers:
    """Passes rows to the observers of rank 0: instances or callables. `on_failure` is called with (name, traceback)
    when one is disabled."""

    def __init__(self, observers: list[Any], *, on_failure: Callable[[str, str], None]) -> None:
        self._active = list(observers)
        self._on_failure = on_failure

    def call(self, name: str, *rows: dict[str, Any]) -> None:
        """Call the method "metrics", "event" or "close" of each observer that has it."""
        for observer in list(self._active):
            takes_all = not (hasattr(observer, "metrics") or hasattr(observer, "event")) and callable(observer)
            method = getattr(observer, name, observer if takes_all and rows else None)
            try:
                if method is not None:
                    method(*copy.deepcopy(rows))
            except Exception:  # a failing observer must not end the run: it is disabled, and an event records why
                self._active.remove(observer)
                self._on_failure(type(observer).__name__, traceback.format_exc())


def load_observers(names: list[str], resolve: Callable[..., Any]) -> list[Any]:
    """Import the observers that the user names; a class is instantiated without arguments. Raises InputError: a name
    cannot be imported, or its class needs arguments."""
    built = []
    for name in names:
        observer = resolve(name, key="telemetry.observers")
        try:
            built.append(observer() if isinstance(observer, type) else observer)
        except TypeError as error:
            expected = "a class that takes no arguments, or a callable that takes a row"
            raise InputError("telemetry.observers", got=f"{name} ({error})", expected=expected) from error
    return built


class TensorBoard:
    """Writes the numbers of every row as TensorBoard scalars (tensorboardX)."""

    def __init__(self, folder: MirroredFolder) -> None:
        from tensorboardX import SummaryWriter

        self._folder = folder
        self._writer = SummaryWriter(folder.path, flush_secs=5)
        self._error: OSError | None = None
        # An error of the disk ends the thread of tensorboardX (2.6) that writes, and `add_scalar` would then wait for
        # room in its queue forever: here the thread goes on, and `metrics` raises the error. The names are private; a
        # version without them is left as it is.
        file: Any = self._writer.file_writer
        events = getattr(getattr(file, "event_writer", None), "_ev_writer", None)
        if events is not None:
            events.write_event, events.flush = self._kept(events.write_event), self._kept(events.flush)

    def _kept(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def writing(*given: Any) -> Any:
            try:
                return None if self._error is not None else write(*given)
            except OSError as error:
                self._error = error

        return writing

    def metrics(self, row: dict[str, Any]) -> None:
        """Write each finite number of the row as a scalar; tensorboardX warns of non-finite ones. Raises OSError: its
        file could not be written, by now or earlier."""
        if self._error is not None:
            raise self._error
        for name, value in row.items():
            if name not in ("kind", "step") and isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])

    def close(self) -> None:
        """Flush the file, and upload it where the run folder is on an object store."""
        self._writer.close()
        self._folder.close()


REPORT_EVERY_S = 5.0
PRINTED = ("death",)
"""Kinds of events whose reason is also printed to the terminal."""


class Superseded(RunError):
    """A newer attempt owns the run folder; this worker ends without writing."""


class SilentReporter:
    """The reporter of every rank but 0; writes nothing, and needs no fence."""

    last_row: Mapping[str, Any] = {}

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    fence = metrics = event = interval = close = _nothing


class RankZeroReporter:
    """Writes metrics.jsonl, experts.jsonl and events.jsonl, calls observers, reports progress to the driver.

    The worker stops writing once the folder has a newer attempt. `report_progress` sends a progress mapping to the
    driver, at most twice a second; None without a driver. Printed are a line about each epoch (`print_epochs`) and one
    about the memory of each other train row (`print_memory`).
    """

    def __init__(
        self, run: RunFolder, *, attempt: int, observers: list[Any],
        report_progress: Callable[[dict[str, Any]], None] | None, print_epochs: bool = False,
        print_memory: bool = False, from_step: int = 0,
    ) -> None:  # fmt: skip
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
        self.fence()
        self.run.writer(self.run.metrics).write(row)
        self._observers.call("metrics", row)
        self.last_row = row
        if row["kind"] == "eval":
            loss, before = float(row["loss"]), self._best
            self._best = loss if before is None or loss < before else before
            compared = "" if before is None else ", the best so far" if loss < before else f", best {before:.4f}"
            print(f"step {row['step']}: eval loss {loss:.4f}{compared}")
        elif self._print_epochs and row.get("ends_epoch"):
            loss = f"loss {row['loss']:.4f}"
            print(f"epoch {row['epoch']} ended at step {row['step']}: {loss}, {rate_of(row)}, {_memory(row)}")
        elif self._print_memory:
            print(f"step {row['step']}: {_memory(row)}, {float(row['peak_memory_bytes']) / 2**30:.2f} GiB peak")
        now = time.monotonic()
        if self._report_progress is not None and now - self._reported > 0.5:
            self._reported = now
            self._report_progress({"row": row})

    def event(self, kind: str, **fields: Any) -> None:
        self.fence()
        row = event(kind, attempt=self.attempt, **fields)
        self.run.append_event(row)
        if kind in PRINTED or fields.get("what") == "rollback":
            print(row["reason"])
        self._observers.call("event", row)
        if kind == "out_of_memory":
            print(f"out of memory: {row['reason']}")

    def interval(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        self.fence()
        self.run.writer(self.run.experts).write(row)
        for step, data in traces.items():
            self.run.write_bytes(self.run.routing_trace(step), data)

    def _observer_failed(self, name: str, trace: str) -> None:
        reason = f"the observer {name} failed and receives nothing more: {trace.strip().splitlines()[-1]}"
        told = event("observer_failed", attempt=self.attempt, observer=name, traceback=trace, reason=reason)
        self.run.append_event(told)
        print(f"warning: {reason}")

    def close(self) -> None:
        """Close the observers, then upload pending rows to an object store. Raises Superseded."""
        self._observers.call("close")
        self.fence()
        self.run.flush()


def _memory(row: Mapping[str, Any]) -> str:
    used, held = (float(row[f"memory_{name}_bytes"]) / 2**30 for name in ("allocated", "reserved"))
    return f"memory {used:.2f} GiB allocated, {held:.2f} GiB reserved"


class StepReports:
    """Tells the driver of rank 0's newest step and activity from a thread, where it has changed: the loop itself
    reports only logged rows. `current` returns the progress, and is called in the thread."""

    def __init__(self, current: Callable[[], dict[str, Any]], report: Callable[[dict[str, Any]], None]) -> None:
        self._current, self._report = current, report
        self._reported: dict[str, Any] = {}
        self._over = threading.Event()

    def start(self) -> None:
        def run() -> None:
            while not self._over.wait(REPORT_EVERY_S):
                self.report()

        threading.Thread(target=run, daemon=True, name="step-reports").start()

    def close(self) -> None:
        self._over.set()

    def report(self) -> None:
        progress = self._current()
        if progress != self._reported:
            self._reported = progress
            self._report(progress)


RankReporter = RankZeroReporter | SilentReporter


# ---------------------------------------------------------------- rank log
# Each rank's own log file, bounded in size; the lines that rank 0 prints also reach the driver's terminal, once.


#: A log file is rotated at this size; one older file is kept.
LOG_BYTES = 8 * 2**20
#: At the end `rank_log` waits for this many of the latest calls of `print_lines`, for at most this many seconds.
UNCONFIRMED_CALLS, CONFIRM_TIMEOUT_S = 64, 5.0

PrintLines = Callable[[str, int, str], Any]
"""(attempt_id, number, text): sends lines to the driver, as `DriverChannel.print_lines` takes them."""


def last_state(line: str) -> str:
    """The text that a terminal shows after carriage returns overwrote a line, as progress bars do."""
    return next((part for part in reversed(line.split("\r")) if part), "").rstrip(" ") if "\r" in line else line


def split_lines(pending: str, text: str) -> tuple[str, str]:
    """Split text into (complete lines with their line ends, incomplete last line).

    Only the last state of an overwritten line is kept. An incomplete line that is being overwritten keeps a carriage
    return at its start.
    """
    *complete, pending = (pending + text).replace("\r\n", "\n").split("\n")
    if "\r" in pending:
        pending = f"\r{last_state(pending)}" + ("\r" if pending.endswith("\r") else "")
    return "".join(f"{last_state(line)}\n" for line in complete), pending


class _DriverLines:
    """Sends complete lines to the driver, numbered from 0 in the order in which they were printed.

    The numbers restore the order of actor calls, which may run out of order. Only complete lines are sent, since a line
    is often written in two pieces, and several threads write at once.
    """

    def __init__(self, print_lines: PrintLines, wait: Callable[..., Any] | None) -> None:
        self._print_lines, self._wait, self._attempt_id = print_lines, wait, uuid.uuid4().hex
        self._calls: deque[Any] = deque(maxlen=UNCONFIRMED_CALLS)
        self._lock = threading.RLock()  # `print_lines` itself may print; a signal handler may print mid-line
        self._pending: dict[tuple[int, int], str] = {}
        self._numbers = itertools.count()

    def write(self, stream: int, text: str) -> None:
        with self._lock:
            line = (stream, threading.get_ident())
            complete, pending = split_lines(self._pending.pop(line, ""), text)
            if pending:
                self._pending[line] = pending
            if complete:
                self._send(complete)

    def close(self) -> None:
        """Send the incomplete lines as well, and wait until the driver has received everything."""
        with self._lock:
            for pending in self._pending.values():
                self._send(last_state(pending) + "\n")
            self._pending = {}
            if self._wait is not None and self._calls:  # with a timeout: the driver may have exited
                self._wait(list(self._calls), num_returns=len(self._calls), timeout=CONFIRM_TIMEOUT_S)

    def _send(self, text: str) -> None:
        self._calls.append(self._print_lines(self._attempt_id, next(self._numbers), text))


class _Tee:
    """A text stream that also writes to the rank's log file; lines of rank 0 go to the driver instead of the stream."""

    def __init__(self, stream: TextIO, path: str, driver_lines: _DriverLines | None) -> None:
        self._stream = stream
        self._path = path
        self._driver_lines = driver_lines
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the rank runs
        self._size = self._file.tell()
        self._pending, self._mid_line = "", False

    def write(self, text: str) -> int:
        if self._file.closed:
            return self._stream.write(text)
        if self._size > LOG_BYTES:
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = open(self._path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
            self._size = 0
        overwrites = "\r" in text.replace("\r\n", "\n").partition("\n")[0]
        before = "\n" if self._mid_line and overwrites else ""
        complete, pending = split_lines(self._pending, text)
        held_back = "\r" in pending
        self._pending = pending if held_back else ""
        wanted = before + complete + ("" if held_back else pending)
        self._mid_line = not wanted.endswith("\n") if wanted else self._mid_line
        self._size += self._file.write(wanted)
        if self._driver_lines is None:
            return self._stream.write(text)
        self._driver_lines.write(id(self), text)  # not to the stream too: Ray may send that to the driver as well
        return len(text)

    def end(self) -> None:
        """Close the log file; later writes go only to the original stream."""
        if self._pending and not self._file.closed:
            self._file.write(last_state(self._pending) + "\n")
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def rank_log(
    run: RunFolder, rank: int, *, print_lines: PrintLines | None, wait: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Context manager that copies this process's prints and log records to `logs/rank_00000.log` of the run folder.
    `print_lines`: also receives the complete lines; set on rank 0; `wait`: `ray.wait`, called at the end with the
    results of the latest calls of `print_lines`."""
    name = f"rank_{rank:05d}.log"
    folder = MirroredFolder(run, "logs", resumed=(name,))
    path = os.path.join(folder.path, name)
    streams = sys.stdout, sys.stderr
    driver_lines = None if print_lines is None else _DriverLines(print_lines, wait)
    tees = _Tee(streams[0], path, driver_lines), _Tee(streams[1], path, driver_lines)
    sys.stdout, sys.stderr = tees  # type: ignore[assignment]
    logs = logging.StreamHandler(sys.stderr)
    logs.setLevel(logging.WARNING)
    logging.getLogger().addHandler(logs)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(logs)
        sys.stdout, sys.stderr = streams
        for tee in tees:
            tee.end()
        if driver_lines is not None:
            driver_lines.close()
        folder.close()
