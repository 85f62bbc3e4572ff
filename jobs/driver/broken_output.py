"""Standard output and error that can no longer be written: a pipe whose reader has left (`| head`), or a full disk.

A command that only prints ends, as other Unix tools do: by SIGPIPE for a closed pipe, otherwise with one line and exit
code 1. A command whose result is not what it prints, such as training, goes on without the output (`outlive_output`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import signal
import sys
import threading
from typing import Any, NoReturn, TextIO


class OutputLost(SystemExit):
    """Standard output can no longer be written; a SystemExit, so that nothing on the way takes it for a failure of what
    the command does."""

    def __init__(self, error: OSError) -> None:
        super().__init__(1)
        self.error = error

    @property
    def closed(self) -> bool:
        """Whether the reader of a pipe has left: no error, as nobody wants to read more."""
        return self.error.errno == errno.EPIPE

    @property
    def reason(self) -> str:
        return "its reader has closed the pipe" if self.closed else (self.error.strerror or str(self.error))


class GuardedFile(io.FileIO):
    """The file of a stream: what cannot be written is dropped, or ends the command with `OutputLost`."""

    outlived = False  # whether the command goes on without the output
    lost: OutputLost | None = None  # why nothing is written any more

    def write(self, data: Any, /) -> int:
        if self.lost is None:
            try:
                return super().write(data)
            except BlockingIOError:
                raise
            except OSError as error:
                self.lost = OutputLost(error)
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self.fileno())  # also for processes that are started later
                os.close(nothing)
                if self.outlived and self.fileno() == STDOUT:
                    lost = f"standard output can no longer be written ({self.lost.reason})"
                    _say(f"{lost}: the command goes on without it")
        if self.lost is not None and not self.outlived:
            raise self.lost
        return len(data)


STDOUT, STDERR = 1, 2
_files: dict[int, GuardedFile] = {}


def guard_output() -> None:
    """Replace `sys.stdout` and `sys.stderr` where they are this process's own. What standard error cannot take is
    always dropped: the exit code tells the rest."""
    for name, own, number in (("stdout", sys.__stdout__, STDOUT), ("stderr", sys.__stderr__, STDERR)):
        stream = getattr(sys, name)
        if stream is None or stream is not own:  # a test or a notebook has its own
            continue
        with contextlib.suppress(OSError, ValueError):  # it has no descriptor
            if stream.fileno() == number:
                setattr(sys, name, _guarded(stream, number))
    if STDERR in _files:
        _files[STDERR].outlived = True


def _guarded(stream: TextIO, number: int) -> TextIO:
    with contextlib.suppress(OSError):
        stream.flush()
    file = _files[number] = GuardedFile(number, "w", closefd=False)
    lines = bool(getattr(stream, "line_buffering", False))
    buffer = io.BufferedWriter(file)
    return io.TextIOWrapper(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=lines)


def outlive_output() -> None:
    """Go on when standard output can no longer be written, and say so once on standard error: a run is not lost with
    its output."""
    if STDOUT in _files:
        _files[STDOUT].outlived = True


def flush_output() -> None:
    """Write what is buffered. Raises OutputLost if it cannot be written and the command does not outlive it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    file = _files.get(STDOUT)
    if file is not None and file.lost is not None and not file.outlived:  # something on the way ended with it
        raise file.lost


def end_without_output(lost: OutputLost) -> NoReturn:
    """End this process as the system ends one that writes to a closed pipe; for any other error say so, exit code 1."""
    if lost.closed:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)
    _say(f"error: standard output cannot be written: {lost.reason}")
    os._exit(1)


def end_process(code: str | int | None, *, own: bool) -> None:
    """If it is this command's own, end this process with the code of a `SystemExit`, without the destructors of C++
    libraries: a daemon thread that is inside such a library may abort the process in them. What is registered with
    `atexit` runs."""
    if own:
        threading._shutdown()  # type: ignore[attr-defined]  (waits for threads that are no daemons, as Python does)
        atexit._run_exitfuncs()
        if isinstance(code, str):
            _say(code)
        end_at_once(1 if isinstance(code, str) else code or 0)


def end_at_once(code: int) -> NoReturn:
    """End this process; a thread of an interrupted command may still wait inside Ray or gloo, and is not awaited."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def _say(text: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError, RuntimeError):  # a thread may be writing to it
            print(text, file=sys.stderr, flush=True)
