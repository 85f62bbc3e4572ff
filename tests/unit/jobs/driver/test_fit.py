"""How the driver ends `fit`, and what it says while it runs."""

from __future__ import annotations

import io
import signal
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from jobs.driver import watch as module
from jobs.driver.signals import Interrupted
from jobs.driver.watch import with_rank
from raytrain.config.sections import RetryConfig
from raytrain.errors import ClusterLost, RunError, WorkersChange
from raytrain.execution.driver_channel import AttemptResult


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


class Played:
    """The workers of a run, as the driver sees them: each look takes a second of a clock that the test owns.

    Args:
        signals, grows_at, ends_at: the looks at which signals arrive, an elastic run finds room, and all is done.
        saved_after: looks from a request to stop until the workers have saved; None: they never do.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, signals: tuple[int, ...] = (), grows_at: int | None = None,
        saved_after: int | None = 2, ends_at: int = 50,
    ) -> None:  # fmt: skip
        self._signals_at, self._grows_at, self._saved_after, self._ends_at = signals, grows_at, saved_after, ends_at
        self.looks, self.asked_at, self.requests = 0, None, 0
        self.phases = self.change = None
        self.progress = {"phase": "training", "step": 3, "max_steps": 9, "row": {}}
        self.signals: Any = SimpleNamespace(asked=threading.Event(), training=True, times=0)
        answers = {name: SimpleNamespace(remote=lambda *_, **__: None) for name in ("printed_lines", "last_signs")}
        self.channel = SimpleNamespace(
            **answers, progress=SimpleNamespace(remote=lambda: self.progress),
            warnings=SimpleNamespace(remote=lambda: []), stacks=SimpleNamespace(remote=lambda: None),
            request_stop=SimpleNamespace(remote=self._request_stop),
        )  # fmt: skip
        self.stuck = SimpleNamespace(lines=lambda *_: [])
        monkeypatch.setattr(module.ray, "get", lambda references, timeout: references)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 1000.0 + self.looks))

    def _request_stop(self) -> None:
        self.asked_at, self.requests = self.looks if self.asked_at is None else self.asked_at, self.requests + 1

    def running(self, *, wait_s: float) -> bool:
        self.looks += 1
        assert self.looks < 200, "the driver waits forever"
        if self.looks in self._signals_at:
            self.signals.times += 1
            self.signals.asked.set()
        saved = self.asked_at is not None and self._saved_after is not None
        return self.looks < self._ends_at and not (saved and self.looks >= self.asked_at + self._saved_after)

    def check_cluster(self, display: Any) -> None:
        if self.looks == self._grows_at:
            self.change = WorkersChange(5, "the cluster has room for more")

    def result(self, *, stopping: bool) -> AttemptResult:
        return AttemptResult("interrupted" if self.asked_at is not None else "done", "played", steps=4)

    def missing(self) -> str:
        return ""

    new_warnings = staticmethod(lambda *_: [])

    def watched(self, *, grace_s: float = 60.0) -> tuple[AttemptResult, str]:
        """How the driver ends, and what it prints."""
        spec: Any = SimpleNamespace(retry=RetryConfig(stop_grace_s=grace_s))
        opened: Any = SimpleNamespace(run=SimpleNamespace(heartbeat=lambda: None, saved_steps=lambda: [2]))
        printed, itself = io.StringIO(), cast("Any", self)
        console = Console(file=printed, width=200)
        return module._watched(itself, spec, opened, signals=self.signals, console=console), printed.getvalue()


def test_an_elastic_run_that_finds_room_saves_and_then_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, grows_at=4)
    with pytest.raises(WorkersChange) as caught:
        played.watched()
    assert caught.value.workers == 5 and (played.asked_at, played.requests, played.looks) == (4, 1, 6)
    ends = Played(monkeypatch, grows_at=4, saved_after=None, ends_at=5)
    ends.result = lambda *, stopping: AttemptResult("done", "9 steps", steps=9)  # type: ignore[method-assign]
    assert ends.watched()[0].status == "done", "its last step came before the request"


@pytest.mark.parametrize("signal_at", [4, 5])
def test_a_signal_while_an_elastic_run_saves_in_order_to_grow_ends_it(
    monkeypatch: pytest.MonkeyPatch, signal_at: int
) -> None:
    """Whoever presses Ctrl-C does not want the run to start again with more workers."""
    played = Played(monkeypatch, grows_at=4, signals=(signal_at,), saved_after=3)
    result, _ = played.watched()
    assert (result.status, result.workers_running) == ("interrupted", False)


@pytest.mark.parametrize(("grace_s", "looks"), [(0.0, 4), (5.0, 9), (60.0, 64)])
def test_workers_that_do_not_save_are_left_after_the_grace_that_was_set(
    monkeypatch: pytest.MonkeyPatch, grace_s: float, looks: int
) -> None:
    """0 leaves them at the next look."""
    played = Played(monkeypatch, signals=(3,), saved_after=None, ends_at=150)
    result, printed = played.watched(grace_s=grace_s)
    assert (result.status, result.workers_running, played.requests) == ("interrupted", True, 1)
    assert looks <= played.looks <= looks + 1 and f"did not save within {grace_s:g} s" in result.reason
    assert "(retry.stop_grace_s); the newest checkpoint is of step 2" in printed


def test_a_cluster_that_ends_with_the_same_signal_is_not_waited_for_but_one_late_answer_is_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(played: Played, *looks: int) -> None:
        def get(references: Any, timeout: float) -> Any:
            if played.looks in looks:
                raise module.ray.exceptions.RayError("no answer")
            return references

        monkeypatch.setattr(module.ray, "get", get)

    played = Played(monkeypatch, signals=(3,), saved_after=None)
    silent(played, *range(4, 99))
    result, printed = played.watched()
    assert result.workers_running and played.looks == 5 and "retry.stop_grace_s" not in printed
    slow = Played(monkeypatch, signals=(3,), saved_after=7)
    silent(slow, 4, 6, 8)
    assert not slow.watched()[0].workers_running and slow.looks == 10
    busy = Played(monkeypatch, ends_at=12)
    silent(busy, *range(3, 9))
    assert busy.watched()[0].status == "done", "without a signal, `fit` says when it is over"
    twice = Played(monkeypatch, signals=(3, 5), saved_after=None)
    assert twice.watched()[0].workers_running and twice.looks == 5, "a second signal leaves at once"


def test_a_warning_about_a_workers_process_names_its_rank() -> None:
    signs = {0: (1.0, "on 10.0.0.1 (pid 7)"), 1: (1.0, "on 10.0.0.2 (pid 9)"), 2: (1.0, "on 10.0.0.3 (pid 7)")}
    warning = {"key": "k", "reason": "the memory of worker (pid 9) on n grows", "pid": 9}
    assert with_rank(warning, signs) == {
        **warning, "reason": "the memory of worker (rank 1, pid 9) on n grows", "rank": 1,
    }  # fmt: skip
    for other in ({**warning, "pid": 8}, {**warning, "pid": 7}, {"key": "k", "reason": "full"}):
        assert with_rank(other, signs) == other, "no worker, or one of two nodes"
