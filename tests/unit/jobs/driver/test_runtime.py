"""Which Ray a command talks to, the token of a local one, and what a signal does at which moment."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.driver.runtime import (
    JOB_ENVIRONMENT,
    SAME_SIGNAL_S,
    Interrupted,
    StopSignals,
    _write_token,
    cluster_address,
    connected,
)


@pytest.mark.parametrize(
    ("configured", "environment", "connected", "address"),
    [
        (None, {}, False, "local"),
        ("10.0.0.4:6379", {}, False, "10.0.0.4:6379"),
        (None, {"RAY_ADDRESS": "10.0.0.9:6379"}, False, "local"),  # a shell's leftover is no wish of this job
        (None, {JOB_ENVIRONMENT: "{}"}, False, "auto"),
        (None, {JOB_ENVIRONMENT: "{}", "RAY_ADDRESS": "10.0.0.9:6379"}, False, "10.0.0.9:6379"),
        ("here:1", {JOB_ENVIRONMENT: "{}"}, False, "here:1"),
        (None, {}, True, "connected"),
        ("10.0.0.4:6379", {}, True, "connected"),
    ],
)
def test_the_address_of_the_cluster(
    configured: str | None,
    environment: dict[str, str],
    connected: bool,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (JOB_ENVIRONMENT, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: connected))
    assert cluster_address(configured) == address


@pytest.mark.parametrize("ours", [True, False])
def test_threads_can_tell_that_ray_has_ended(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """A thread that calls Ray while it shuts down starts another cluster, or ends the process."""
    ended_flags: list[Any] = []
    ray = SimpleNamespace(
        is_initialized=lambda: not ours,
        shutdown=lambda: ended_flags.append(cluster.ended.is_set()),
        get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.1:1"),
        nodes=list,
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("jobs.driver.runtime._start", lambda *given, **more: None)
    monkeypatch.setitem(sys.modules, "raytrain.execution.trainer", SimpleNamespace(quiet_ray=lambda: None))
    address = "10.0.0.4:6379" if ours else "connected"
    with connected(address, num_cpus=1, num_gpus=0, verbose=False) as cluster:
        assert not cluster.ended.is_set()
    assert ended_flags == ([True] if ours else []) and cluster.ended.is_set() is ours


def test_a_token_is_nobody_elses(tmp_path: Path) -> None:
    before = os.umask(0)  # independent of the user's mask
    try:
        path = Path(_write_token(str(tmp_path)))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == 64 and int(path.read_text(), 16) > 0
    with pytest.raises(FileExistsError):
        _write_token(str(tmp_path))  # never over somebody's file


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
    monkeypatch.setattr("jobs.driver.runtime.time.monotonic", Clock(each=1.0))
    made = StopSignals()
    made.install()
    yield made
    made.restore()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_training_a_signal_ends_the_command_at_once(signals: StopSignals, number: int) -> None:
    with pytest.raises(Interrupted, match=signal.Signals(number).name):
        signal.raise_signal(number)
    assert becomes(lambda: signals.times == 1) and signals.asked.is_set()
    assert not issubclass(Interrupted, Exception), "a library that catches everything must not swallow it"


def test_while_training_the_first_asks_and_the_second_is_counted(signals: StopSignals) -> None:
    signals.training = True
    signal.raise_signal(signal.SIGTERM)
    assert becomes(lambda: signals.times == 1) and signals.asked.is_set()
    signal.raise_signal(signal.SIGINT)
    assert becomes(lambda: signals.times == 2)


def test_one_stop_that_arrives_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` signals the process and its group."""
    monkeypatch.setattr("jobs.driver.runtime.time.monotonic", clock := Clock(each=SAME_SIGNAL_S / 10))
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


def test_a_signal_that_nobody_heard_is_heard_at_the_next_install(signals: StopSignals) -> None:
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


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    mine = signal.getsignal(signal.SIGTERM)
    made = StopSignals()
    thread = threading.Thread(target=made.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is mine
    made.restore()
    assert signal.getsignal(signal.SIGTERM) is mine


def test_what_fails_beside_a_fork_once_a_signal_came_is_not_printed_and_everything_else_is() -> None:
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
