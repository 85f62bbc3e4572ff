"""Each rank's own log file, bounded in size; the lines that rank 0 prints also reach the driver's terminal, once."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from raytrain.runs.folder import RunFolder
from raytrain.runs.mirror import MirroredFolder

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
        self._number = 0

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
        number = self._number
        self._number += 1
        self._calls.append(self._print_lines(self._attempt_id, number, text))


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
        self._size += self._file.write(self._for_file(text))
        if self._driver_lines is None:
            return self._stream.write(text)
        self._driver_lines.write(id(self), text)  # not to the stream too: Ray may send that to the driver as well
        return len(text)

    def _for_file(self, text: str) -> str:
        """The part of `text` to write to the file now; a line that is being overwritten is written when it ends."""
        overwrites = "\r" in text.replace("\r\n", "\n").partition("\n")[0]
        before = "\n" if self._mid_line and overwrites else ""
        complete, pending = split_lines(self._pending, text)
        held_back = "\r" in pending
        self._pending = pending if held_back else ""
        wanted = before + complete + ("" if held_back else pending)
        self._mid_line = not wanted.endswith("\n") if wanted else self._mid_line
        return wanted

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

    Args:
        print_lines: also receives the complete lines; set on rank 0.
        wait: `ray.wait`, called at the end with the results of the latest calls of `print_lines`.
    """
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
