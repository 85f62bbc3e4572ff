"""The thread that samples a node: how many samples it takes, and that nothing waits for it at the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.telemetry.warnings import MemoryWatch
from raytrain.execution.telemetry import TelemetryThread
from raytrain.runs.folder import RunFolder


class Time:
    """A clock, an event that nobody sets until the end, and a sampler that takes its seconds of this clock."""

    node = "n"

    def __init__(self, *, sample_s: list[float], end: float) -> None:
        self.now, self.sample_s, self.end, self.taken = 1000.0, sample_s, 1000.0 + end, list[float]()

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        """As of an event, which is set at `end`."""
        assert seconds >= 0
        self.now = min(self.now + seconds, self.end)
        return self.now >= self.end

    def set(self) -> None:
        """As of an event."""

    def sample(self) -> dict[str, Any]:
        self.taken.append(self.now)
        self.now += self.sample_s[len(self.taken) % len(self.sample_s)]
        return {"node": self.node, "time": self.now, "devices": [], "processes": []}


def thread_of(time: Any, folder: Path, *, every: float) -> Any:
    return TelemetryThread(
        RunFolder(str(folder)), time, every=every, gauges=None, watch=MemoryWatch(), warn=lambda _: None,
        tags=lambda: {"attempt": 1, "step": 0}, clock=time.clock,
    )  # fmt: skip


@pytest.mark.covers("MON-05")
@pytest.mark.parametrize("every", [5.0, 10.0, 0.5])
@pytest.mark.parametrize("sample_s", [[0.0], [0.4, 0.1, 0.3]])
def test_there_are_as_many_samples_as_intervals_one_more_or_less(
    tmp_path: Path, every: float, sample_s: list[float]
) -> None:
    """However long a sample takes, up to nearly an interval."""
    for seconds in (100.0, 333.0):
        time = Time(sample_s=sample_s, end=seconds)
        thread = thread_of(time, tmp_path / f"{seconds}", every=every)
        thread._over = time
        thread._loop()
        assert abs(len(time.taken) - seconds / every) <= 1, (len(time.taken), seconds / every)


def test_a_sample_longer_than_the_interval_leaves_out_others_and_is_not_followed_by_several_at_once(
    tmp_path: Path,
) -> None:
    time = Time(sample_s=[0.0, 0.0, 13.0], end=60.0)
    thread = thread_of(time, tmp_path, every=5.0)
    thread._over = time
    thread._loop()
    assert [taken - 1000.0 for taken in time.taken][:6] == [1.0, 6.0, 21.0, 26.0, 31.0, 46.0]


STUCK = """
import sys, threading
from pathlib import Path
from tests_thread import thread_of

started = threading.Event()

class Stuck:
    node = "n"
    def clock(self):
        return 0.0
    def sample(self):
        started.set()
        threading.Event().wait()

thread = thread_of(Stuck(), Path(sys.argv[1]), every=0.01)
thread.start()
started.wait()
thread.close()
print("closed", thread._thread.is_alive())
"""


@pytest.mark.covers("MON-05")
def test_a_sample_that_never_ends_holds_up_neither_the_end_of_a_run_nor_of_the_process(tmp_path: Path) -> None:
    """As a driver of a device may."""
    (tmp_path / "tests_thread.py").write_text(Path(__file__).read_text())
    (tmp_path / "stuck.py").write_text(STUCK)
    command = [sys.executable, str(tmp_path / "stuck.py"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "closed True\n"), done.stderr


def test_after_close_the_thread_has_ended_and_takes_no_more_samples(tmp_path: Path) -> None:
    time = Time(sample_s=[0.0], end=1e9)
    thread = thread_of(time, tmp_path, every=1e6)
    thread.start()
    thread.close()
    assert not thread._thread.is_alive() and time.taken == []
