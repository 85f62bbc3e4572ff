"""Each rank's own log file, size-bounded; what rank 0 prints also reaches the driver's terminal, once."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from raytrain.run_folder import RunFolder

#: A rank's log is turned over at this size; the one before it is kept.
LOG_BYTES = 8 * 2**20


class _Tee:
    """A text stream that also writes to the rank's log file, and says rank 0's lines to the driver."""

    def __init__(self, stream: TextIO, path: str, say: Callable[[str], Any] | None) -> None:
        self._stream = stream
        self._path = path
        self._say = say
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - lives as long as the rank
        self._size = self._file.tell()

    def write(self, text: str) -> int:
        if self._size > LOG_BYTES:
            self._file.close()
            os.replace(self._path, f"{self._path}.1")
            self._file = open(self._path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
            self._size = 0
        self._size += self._file.write(text)
        if self._say is not None and text:
            self._say(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def rank_log(run: RunFolder, rank: int, *, say: Callable[[str], Any] | None) -> Iterator[None]:
    """Inside: prints and log records of this process go to `logs/rank_00000.log` of a local run folder as well."""
    if not run.is_local:
        yield
        return
    os.makedirs(run.logs_dir, exist_ok=True)
    path = os.path.join(run.logs_dir, f"rank_{rank:05d}.log")
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Tee(streams[0], path, say), _Tee(streams[1], path, say)  # type: ignore[assignment]
    logs = logging.StreamHandler(sys.stderr)
    logs.setLevel(logging.WARNING)
    logging.getLogger().addHandler(logs)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(logs)
        sys.stdout, sys.stderr = streams
