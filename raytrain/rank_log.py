"""Each rank's own log file, size-bounded; what rank 0 prints also reaches the driver's terminal, once."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from raytrain.run_folder import RunFolder

#: A rank's log is turned over at this size; the one before it is kept.
LOG_BYTES = 8 * 2**20


class _Said:
    """Whole lines for the driver, numbered from 0 in the order they were printed: calls to an actor may overtake each
    other, and a line is often written in two pieces, by several threads."""

    def __init__(self, say: Callable[[int, str], Any]) -> None:
        self._say = say
        self._lock = threading.RLock()  # `say` may print itself, a signal's handler may in the middle of a line
        self._begun: dict[tuple[int, int], str] = {}
        self._number = 0

    def write(self, stream: int, text: str) -> None:
        with self._lock:
            line = (stream, threading.get_ident())
            whole, end, begun = (self._begun.pop(line, "") + text).rpartition("\n")
            if begun:
                self._begun[line] = begun
            if end:
                self._send(whole + end)

    def close(self) -> None:
        """What never got its line's end is told too."""
        with self._lock:
            for begun in self._begun.values():
                self._send(begun + "\n")
            self._begun = {}

    def _send(self, text: str) -> None:
        number = self._number
        self._number += 1
        self._say(number, text)


class _Tee:
    """A text stream that also writes to the rank's log file, and says rank 0's lines to the driver."""

    def __init__(self, stream: TextIO, path: str, said: _Said | None) -> None:
        self._stream = stream
        self._path = path
        self._said = said
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the rank
        self._size = self._file.tell()

    def write(self, text: str) -> int:
        if self._file.closed:
            return self._stream.write(text)
        if self._size > LOG_BYTES:
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = open(self._path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
            self._size = 0
        self._size += self._file.write(text)
        if self._said is not None:
            self._said.write(id(self), text)
        return self._stream.write(text)

    def end(self) -> None:
        """Close the log file; whoever still holds this stream writes to the one below."""
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def rank_log(run: RunFolder, rank: int, *, say: Callable[[int, str], Any] | None) -> Iterator[None]:
    """Inside: prints and log records of this process go to `logs/rank_00000.log` of a local run folder as well, and
    where `say` is given its whole lines to `say(number, text)`."""
    if not run.is_local:
        yield
        return
    os.makedirs(run.logs_dir, exist_ok=True)
    path = os.path.join(run.logs_dir, f"rank_{rank:05d}.log")
    streams = sys.stdout, sys.stderr
    said = None if say is None else _Said(say)
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
