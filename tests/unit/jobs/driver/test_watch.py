"""What the driver notices of Ray: nodes that are lost, daemons that died, a head that does not answer."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.checks.ray_job import JOB_ENVIRONMENT
from jobs.driver import watch as module
from jobs.driver.signals import Interrupted
from jobs.driver.watch import HEAD_SILENT_S, LOOK_EVERY_S, ClusterWatch, LostNode, renewed_stop_check, with_rank
from raytrain.errors import ClusterLost, RunError
from raytrain.execution.controller import lost_nodes
from raytrain.runs.folder import RunFolder


def row(name: str, *, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "NodeManagerAddress": f"10.0.0.{name}", "Alive": alive}


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray, as the driver sees it: the nodes, whether the head answers, the dead daemons."""
    seen = SimpleNamespace(nodes=[row("1"), row("2")], answers=True, dead=[], now=0.0, controllers=[])
    context = SimpleNamespace(gcs_address="10.0.0.1:6379")
    monkeypatch.setattr("ray.nodes", lambda: seen.nodes)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "answers", lambda address: seen.answers and address == context.gcs_address)
    monkeypatch.setattr(module, "dead_daemons", lambda: seen.dead)

    def controller() -> int | None:
        assert seen.answers, "a call would wait"
        return seen.controllers.pop(0) if seen.controllers else None

    monkeypatch.setattr(module, "controller_pid", controller)
    return seen


def looked(watch: ClusterWatch, ray: SimpleNamespace, *, seconds: float) -> dict[str, str]:
    ray.now += seconds
    return watch.lost_nodes()


def test_a_lost_node_is_reported_once(ray: SimpleNamespace) -> None:
    watch = ClusterWatch(local=False, clock=lambda: ray.now)
    assert looked(watch, ray, seconds=LOOK_EVERY_S) == {}
    ray.nodes = [row("1"), row("2", alive=False)]
    assert looked(watch, ray, seconds=LOOK_EVERY_S / 2) == {}, "it looks only so often"
    assert looked(watch, ray, seconds=LOOK_EVERY_S) == {"2": "10.0.0.2"}
    assert looked(watch, ray, seconds=LOOK_EVERY_S) == {}
    ray.nodes = [row("1"), row("3")]
    assert looked(watch, ray, seconds=LOOK_EVERY_S) == {}
    ray.nodes = [row("1")]
    assert looked(watch, ray, seconds=LOOK_EVERY_S) == {"3": "10.0.0.3"}


def test_a_silent_head_ends_the_connection_only_after_a_while(ray: SimpleNamespace) -> None:
    watch = ClusterWatch(local=False, clock=lambda: ray.now)
    ray.answers = False
    assert looked(watch, ray, seconds=HEAD_SILENT_S - 1) == {}
    ray.answers = True
    assert looked(watch, ray, seconds=LOOK_EVERY_S) == {}
    ray.answers = False
    assert looked(watch, ray, seconds=HEAD_SILENT_S - 1) == {}
    with pytest.raises(ClusterLost, match=r"head of the cluster at 10\.0\.0\.1:6379 does not answer"):
        looked(watch, ray, seconds=LOOK_EVERY_S)


@pytest.mark.parametrize("local", [True, False])
def test_a_dead_daemon_is_noticed_at_once(ray: SimpleNamespace, local: bool) -> None:
    watch = ClusterWatch(local=local, clock=lambda: ray.now)
    assert looked(watch, ray, seconds=0) == {}
    ray.dead = ["gcs_server"]
    with pytest.raises(ClusterLost, match="gcs_server died"):
        looked(watch, ray, seconds=0)


@pytest.mark.parametrize("local", [True, False])
def test_the_controller_is_looked_up_until_it_is_there(ray: SimpleNamespace, local: bool) -> None:
    watch = ClusterWatch(local=local, clock=lambda: ray.now)
    ray.controllers = [None, 41, 42]
    found = [(looked(watch, ray, seconds=LOOK_EVERY_S), watch.controller)[1] for _ in range(4)]
    assert found == [None, 41, 41, 41]


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


def test_a_line_says_what_ran_on_a_node_and_what_happens_next() -> None:
    both = LostNode("10.0.0.2", [1, 3], [0]).describe(
        [
            {"Alive": True, "Resources": {"CPU": 2.0, "memory": 5.0}},
            {"Alive": True, "Resources": {"CPU": 1.0}},
            {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 1.0}},
        ]
    )
    assert both.startswith("node 10.0.0.2 was lost: rank 1, rank 3, expert host 0 ran there; all workers restart from")
    assert both.endswith("on the other nodes, which have 3 CPU in all")
    hosts = LostNode("10.0.0.2", [], [1]).describe([])
    assert "expert host 1 ran there" in hosts and "retry.host_wait_s" in hosts and "restart" not in hosts
    assert LostNode("10.0.0.2", [], []).describe([]).endswith("nothing of this run was there; the run continues")


def test_ranks_on_dead_nodes_only_are_lost_with_their_node() -> None:
    listed = [row("1"), row("2", alive=False)]
    assert lost_nodes(listed, {0: "1", 1: "2", 2: "2", 3: "9"}) == {1: "10.0.0.2", 2: "10.0.0.2"}


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
