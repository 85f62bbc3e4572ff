"""How the driver ends `fit`, and what it says while it runs."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.checks.ray_job import JOB_ENVIRONMENT
from jobs.driver.signals import Interrupted
from jobs.driver.watch import fit as module
from jobs.driver.watch.fit import renewed_stop_check, with_rank
from raytrain.errors import ClusterLost, RunError
from raytrain.runs.folder import RunFolder


class Waiting:
    """A `_Fit` that waits until its controller's process has ended, or forever.

    Args:
        pids: what `find_controller` returns, one after the other, the last one from then on.
        known: the controller that was seen before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *pids: int | None, known: int | None = None) -> None:
        self.killed: list[tuple[int, int]] = []
        monkeypatch.setattr("os.kill", self._kill)
        monkeypatch.setattr(module, "END_EVERY_S", 0.001)
        self._pids = list(pids)
        self.fitting: Any = module._Fit.__new__(module._Fit)
        self.fitting._watch = SimpleNamespace(controller=known, find_controller=self._find)
        self.fitting._ended = threading.Event()

    def _find(self) -> int | None:
        return self._pids.pop(0) if len(self._pids) > 1 else self._pids[0]

    def _kill(self, pid: int, number: int) -> None:
        self.killed.append((pid, number))
        self.fitting._ended.set()


def test_fit_ends_with_its_controller_also_if_that_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch, None, None, 41)
    assert waiting.fitting.end(20.0) and waiting.killed == [(41, signal.SIGKILL)]
    assert waiting.fitting.end(0.0) and len(waiting.killed) == 1, "it has ended"
    never = Waiting(monkeypatch, None)
    assert not never.fitting.end(0.01) and never.killed == []


def test_a_cluster_that_is_lost_is_not_asked_for_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    known = Waiting(monkeypatch, known=41)
    assert known.fitting.end(20.0, lost=True) and known.killed == [(41, signal.SIGKILL)]
    assert not Waiting(monkeypatch).fitting.end(0.01, lost=True)


def test_an_exception_of_a_signal_while_fit_runs_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 marks a thread as ended if a signal's handler raises in `Thread.join`."""

    def interrupted(number: int, frame: object) -> None:
        raise Interrupted("now")

    fitting = Waiting(monkeypatch, None).fitting
    before = signal.signal(signal.SIGUSR1, interrupted)
    own = threading.get_ident()
    threading.Timer(0.05, signal.pthread_kill, (own, signal.SIGUSR1)).start()
    try:
        with pytest.raises(Interrupted):
            fitting.running(wait_s=20.0)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert fitting.running(wait_s=0.0)


@pytest.mark.parametrize(
    ("raised", "ends", "expected", "words"),
    [
        (ClusterLost("gone"), True, ClusterLost, "^gone$"),
        (ClusterLost("gone"), False, RunError, "gone, and Ray Train did not end within 30 s: resume the run"),
        (Interrupted("early"), False, Interrupted, "early"),
    ],
)
def test_ray_is_left_only_once_fit_has_ended(
    raised: Exception, ends: bool, expected: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def end(limit: float, *, lost: bool = False) -> bool:
        limits.append(limit)
        assert lost == isinstance(raised, ClusterLost)
        return ends

    def watched(*_: Any, **__: Any) -> Any:
        raise raised

    monkeypatch.setattr(module, "_Fit", lambda *_, **__: SimpleNamespace(end=end))
    monkeypatch.setattr(module, "_watched", watched)
    given: dict[str, Any] = dict.fromkeys(("data", "signals", "console"))
    activity = SimpleNamespace(begin=lambda what: None)
    with pytest.raises(expected, match=words) as caught:
        module.fit_watched(None, None, None, activity=activity, **given)  # type: ignore[arg-type]
    assert type(caught.value) is expected and len(limits) == 1


@pytest.mark.parametrize(
    ("before", "stop_s", "says"),
    [("ok", 2.0, None), ("ok", 9.0, "warning: "), ("warn", 2.0, "job_stop: "), ("na", 9.0, "warning: ")],
)
def test_the_warning_of_a_stop_is_renewed_by_what_the_run_measures(
    before: str, stop_s: float, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(str(tmp_path), "a")
    run.write_json(run.preflight, [{"name": "job_stop", "status": before}])
    assert renewed_stop_check(run, stop_s, grace_s=30.0) == [], "no submitted job"
    monkeypatch.setenv(JOB_ENVIRONMENT, "{}")
    lines = renewed_stop_check(run, stop_s, grace_s=30.0)
    assert len(lines) == (says is not None)
    if says is not None:
        assert lines[0].startswith(says) and f"about {stop_s:g} s are measured" in lines[0]


def test_a_warning_about_a_workers_process_names_its_rank() -> None:
    signs = {0: (1.0, "on 10.0.0.1 (pid 7)"), 1: (1.0, "on 10.0.0.2 (pid 9)"), 2: (1.0, "on 10.0.0.3 (pid 7)")}
    warning = {"key": "k", "reason": "the memory of worker (pid 9) on n grows", "pid": 9}
    assert with_rank(warning, signs) == {
        **warning, "reason": "the memory of worker (rank 1, pid 9) on n grows", "rank": 1,
    }  # fmt: skip
    for other in ({**warning, "pid": 8}, {**warning, "pid": 7}, {"key": "k", "reason": "full"}):
        assert with_rank(other, signs) == other, "no worker, or one of two nodes"
