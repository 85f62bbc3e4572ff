"""What a signal does at which moment of a command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from jobs.driver.signals import SAME_SIGNAL_S, Interrupted, StopSignals, restored_handlers


class Clock:
    """Goes on by `each` seconds with every look at it."""

    def __init__(self, each: float) -> None:
        self.now, self.each, self.looks = 100.0, each, 0

    def __call__(self) -> float:
        self.looks += 1
        self.now += self.each
        return self.now


def becomes(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within five seconds: signals are counted by a thread."""
    never = threading.Event()
    return any(condition() or never.wait(0.01) for _ in range(500)) or condition()


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopSignals]:
    """Installed; no two signals are so close together that they are one."""
    monkeypatch.setattr("jobs.driver.signals.time.monotonic", Clock(each=1.0))
    made = StopSignals()
    made.install()
    yield made
    made.restore()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_before_training_a_signal_ends_the_command_at_once(signals: StopSignals, number: int) -> None:
    with pytest.raises(Interrupted, match=signal.Signals(number).name):
        signal.raise_signal(number)
    assert becomes(lambda: signals.times == 1) and signals.asked.is_set()
    assert not issubclass(Interrupted, Exception), "a library that catches everything must not swallow it"


def test_during_training_the_first_signal_requests_a_stop_and_the_second_is_counted(signals: StopSignals) -> None:
    signals.training = True
    signal.raise_signal(signal.SIGTERM)
    assert becomes(lambda: signals.times == 1) and signals.asked.is_set()
    signal.raise_signal(signal.SIGINT)
    assert becomes(lambda: signals.times == 2)


def test_one_stop_that_arrives_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` signals the process and its group."""
    monkeypatch.setattr("jobs.driver.signals.time.monotonic", clock := Clock(each=SAME_SIGNAL_S / 10))
    made = StopSignals()
    made.install()
    made.training = True
    try:
        signal.raise_signal(signal.SIGTERM)
        assert becomes(lambda: made.times == 1)
        seen = clock.looks
        signal.raise_signal(signal.SIGTERM)
        assert becomes(lambda: clock.looks >= seen + 2) and made.times == 1
        clock.each = 1.0
        signal.raise_signal(signal.SIGTERM)
        assert becomes(lambda: made.times == 2)
    finally:
        made.restore()


def test_an_unhandled_signal_is_handled_at_the_next_install(signals: StopSignals) -> None:
    """`ray.init` takes SIGTERM over while it runs; what arrives then must not be lost."""
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.raise_signal(signal.SIGTERM)
    assert becomes(signals.asked.is_set)
    with pytest.raises(Interrupted):
        signals.install()


def test_handlers_are_given_back_also_after_a_second_install() -> None:
    """`ray.init` puts its own in between."""
    mine = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    made = StopSignals()
    made.install()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    made.install()
    assert signal.getsignal(signal.SIGTERM) == made._arrived
    made.restore()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == mine


def test_the_wake_up_pipe_of_an_event_loop_is_given_back() -> None:
    """That of asyncio, as in a notebook; also where the loop was closed in the meantime."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    try:
        made = StopSignals()
        made.install()
        made.restore()
        assert signal.set_wakeup_fd(writer) == writer
        made.install()
        os.close(writer)
        made.restore()
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)


def test_handlers_that_ray_replaces_are_given_back() -> None:
    mine = signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(LookupError), restored_handlers():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise LookupError
    assert signal.getsignal(signal.SIGTERM) is mine


def test_outside_the_main_thread_signals_are_not_touched() -> None:
    mine = signal.getsignal(signal.SIGTERM)
    made = StopSignals()
    thread = threading.Thread(target=made.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is mine
    made.restore()
    assert signal.getsignal(signal.SIGTERM) is mine


def test_errors_during_a_fork_after_a_signal_are_not_printed_and_all_others_are() -> None:
    signals, printed = StopSignals(), []
    signals._unraisable = printed.append
    failed = SimpleNamespace(exc_type=IndexError)
    signals._on_unraisable(failed)
    with pytest.raises(Interrupted):
        signals._arrived(signal.SIGTERM, None)
    signals._on_unraisable(failed)
    signals._on_unraisable(SimpleNamespace(exc_type=Interrupted))
    assert printed == [failed], "the first, before any signal"
    signals.training = True
    signals._on_unraisable(failed)
    assert printed == [failed, failed], "during training, signals raise nothing, so a failure is a real error"


TERMINAL = """
import signal, sys
from jobs.driver.signals import StopSignals

signals = StopSignals()
signals.training = True
signals.install()
print("ready", flush=True)
signals.asked.wait()
print("saving", flush=True)
print("saving", file=sys.stderr, flush=True)
sys.exit(7)
"""


def test_a_lost_terminal_asks_for_a_stop_and_what_is_printed_then_fails_nothing() -> None:
    """A real terminal whose other end closes, as when an SSH session is lost."""
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", TERMINAL],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    ) as child:
        os.close(terminal)
        text = b""
        while b"ready" not in text:
            text += os.read(ours, 100)
        os.close(ours)
        assert child.wait(60) == 7


def test_nohup_keeps_its_meaning() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = StopSignals()
    signals.training = True
    try:
        signals.install()
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert becomes(lambda: signals.times == 1)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signals.restore()
        signal.signal(signal.SIGHUP, previous)
