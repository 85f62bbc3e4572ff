"""Turns signals into stop requests. Driver side."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

#: Signals less than this many seconds apart count as one.
SAME_SIGNAL_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def restored_handlers() -> Iterator[None]:
    """Restores the signals' handlers on exit; `ray.init` replaces SIGTERM's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # None: installed by a library in C, which Python cannot do
            signal.signal(number, handler)


class Interrupted(KeyboardInterrupt):
    """A signal arrived before anything has to be saved. Ray's calls only let a KeyboardInterrupt propagate."""


class StopSignals:
    """Handles SIGTERM, SIGINT and SIGHUP while a command runs.

    SIGHUP means that the terminal is gone, as when an SSH session ends: what is printed afterwards is discarded. A
    command started with `nohup` ignores it.

    Before `training` is set, a signal ends the command at once by raising `Interrupted`. Afterwards the first signal
    sets `asked` (the workers save and return), and the second ends the command at once. Outside the main thread (a
    notebook's executor), signals are not handled.

    The interpreter discards an exception raised by a signal handler inside a finalizer or a fork hook, and `ray.init`
    replaces the handler of SIGTERM. A thread therefore counts the signals on the interpreter's wake-up pipe, which
    misses none. Discarded exceptions are not printed, nor are the errors that follow from them, such as those of a
    library's fork hooks of which the exception skipped the first.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.training = False
        self.times = 0
        self._last = self._raised = float("-inf")
        self._previous: dict[int, Any] = {}
        self._terminals: list[int] = []
        self._writer: int | None = None
        self._wakeup = -1
        self._unraisable: Any = None

    def install(self) -> None:
        """Install the handlers; called again after `ray.init`, which replaces the handler of SIGTERM."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._writer is None:
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._count, args=(reader,), daemon=True, name="stop-signals").start()
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
            self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        for number in _SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # `nohup`
            previous = signal.signal(number, self._arrived)
            self._previous.setdefault(number, previous)
        if self.asked.is_set() and not self.training:
            raise Interrupted("before the first step")

    def restore(self) -> None:
        """Restore the previous handlers, and the previous wake-up pipe, such as that of a notebook's event loop."""
        _restore(self._previous)
        self._previous = {}
        if self._writer is not None:
            try:
                signal.set_wakeup_fd(self._wakeup)
            except (ValueError, OSError):  # the loop was closed in the meantime
                signal.set_wakeup_fd(-1)
            os.close(self._writer)
            self._writer = None
            sys.unraisablehook = self._unraisable

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again, self._raised = now - self._raised <= SAME_SIGNAL_S, now
        if number == signal.SIGHUP and self._terminals:  # each write to a terminal that is gone is an error
            nothing = os.open(os.devnull, os.O_WRONLY)
            for descriptor in self._terminals:
                os.dup2(nothing, descriptor)
            os.close(nothing)
            self._terminals = []
        if not self.training and not again:
            raise Interrupted(signal.Signals(number).name)

    def _on_unraisable(self, unraisable: Any) -> None:
        leaving = self._raised > float("-inf") and not self.training
        if not leaving and not issubclass(unraisable.exc_type, KeyboardInterrupt | SystemExit):
            self._unraisable(unraisable)

    def _count(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                now = time.monotonic()
                if not any(number in _SIGNALS for number in numbers):
                    continue
                if now - self._last > SAME_SIGNAL_S:  # `timeout` and shells signal both the process and its group
                    self.times += 1
                self._last = now
                self.asked.set()
