"""Each rank's own log file, size-bounded; what rank 0 prints also reaches the driver's terminal, once."""

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

#: A rank's log is turned over at this size; the one before it is kept.
LOG_BYTES = 8 * 2**20


#: Calls whose arrival is asked for at the end, and for how long; those before them have arrived long since.
UNCONFIRMED, ARRIVING_S = 64, 5.0

Say = Callable[[str, int, str], Any]
"""(life, number, text): takes lines for the driver; `life` is another one for each attempt."""


def last_state(line: str) -> str:
    """What is to be seen of a line that was written over, as progress bars are, by carriage returns."""
    return next((part for part in reversed(line.split("\r")) if part), "").rstrip(" ") if "\r" in line else line


def split_lines(begun: str, text: str) -> tuple[str, str]:
    """(whole lines, with their ends; what is begun of the next). Of what was written over only the last state is kept;
    where that is a line's beginning, it begins with a carriage return still."""
    *whole, begun = (begun + text).replace("\r\n", "\n").split("\n")
    if "\r" in begun:
        begun = f"\r{last_state(begun)}" + ("\r" if begun.endswith("\r") else "")
    return "".join(f"{last_state(line)}\n" for line in whole), begun


class _Said:
    """Whole lines for the driver, numbered from 0 in the order they were printed: calls to an actor may overtake each
    other, and a line is often written in two pieces, by several threads."""

    def __init__(self, say: Say, wait: Callable[..., Any] | None) -> None:
        self._say, self._wait, self._life = say, wait, uuid.uuid4().hex
        self._sent: deque[Any] = deque(maxlen=UNCONFIRMED)
        self._lock = threading.RLock()  # `say` may print itself, a signal's handler may in the middle of a line
        self._begun: dict[tuple[int, int], str] = {}
        self._number = 0

    def write(self, stream: int, text: str) -> None:
        with self._lock:
            line = (stream, threading.get_ident())
            whole, begun = split_lines(self._begun.pop(line, ""), text)
            if begun:
                self._begun[line] = begun
            if whole:
                self._send(whole)

    def close(self) -> None:
        """What never got its line's end is told too; returns when all of it has arrived."""
        with self._lock:
            for begun in self._begun.values():
                self._send(last_state(begun) + "\n")
            self._begun = {}
            if self._wait is not None and self._sent:  # not for ever: the driver may be gone
                self._wait(list(self._sent), num_returns=len(self._sent), timeout=ARRIVING_S)

    def _send(self, text: str) -> None:
        number = self._number
        self._number += 1
        self._sent.append(self._say(self._life, number, text))


class _Tee:
    """A text stream that also writes to the rank's log file, and says rank 0's lines to the driver."""

    def __init__(self, stream: TextIO, path: str, said: _Said | None) -> None:
        self._stream = stream
        self._path = path
        self._said = said
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the rank
        self._size = self._file.tell()
        self._begun, self._open = "", False

    def write(self, text: str) -> int:
        if self._file.closed:
            return self._stream.write(text)
        if self._size > LOG_BYTES:
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = open(self._path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
            self._size = 0
        self._size += self._file.write(self._for_file(text))
        if self._said is not None:
            self._said.write(id(self), text)
        return self._stream.write(text)

    def _for_file(self, text: str) -> str:
        """What the file gets of it now: of a line that is written over nothing until it ends."""
        over = "\r" in text.replace("\r\n", "\n").partition("\n")[0]
        before = "\n" if self._open and over else ""
        whole, begun = split_lines(self._begun, text)
        held = "\r" in begun
        self._begun = begun if held else ""
        wanted = before + whole + ("" if held else begun)
        self._open = not wanted.endswith("\n") if wanted else self._open
        return wanted

    def end(self) -> None:
        """Close the log file; whoever still holds this stream writes to the one below."""
        if self._begun and not self._file.closed:
            self._file.write(last_state(self._begun) + "\n")
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def rank_log(run: RunFolder, rank: int, *, say: Say | None, wait: Callable[..., Any] | None = None) -> Iterator[None]:
    """Inside: prints and log records of this process go to `logs/rank_00000.log` of a local run folder as well, and
    where `say` is given its whole lines to it. What the latest calls of `say` returned is waited for in the end by
    `wait(calls, num_returns=, timeout=)`, as Ray's does."""
    if not run.is_local:
        yield
        return
    os.makedirs(run.logs_dir, exist_ok=True)
    path = os.path.join(run.logs_dir, f"rank_{rank:05d}.log")
    streams = sys.stdout, sys.stderr
    said = None if say is None else _Said(say, wait)
    tees = _Tee(streams[0], path, said), _Tee(streams[1], path, said)
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
        if said is not None:
            said.close()
