"""What the driver notices of Ray: nodes that are lost, daemons that died, a head that does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jobs.driver import watch as module
from jobs.driver.watch import HEAD_SILENT_S, LOOK_EVERY_S, ClusterWatch, describe_loss
from raytrain.errors import ClusterLost
from raytrain.execution.controller import lost_nodes


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


def test_a_line_says_what_ran_on_a_node_and_what_happens_next() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 2.0, "memory": 5.0}},
        {"Alive": True, "Resources": {"CPU": 1.0}},
        {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 1.0}},
    ]
    both = describe_loss("10.0.0.2", [1, 3], [0], nodes)
    assert both.startswith("node 10.0.0.2 was lost: rank 1, rank 3, expert host 0 ran there; all workers restart from")
    assert both.endswith("on the other nodes, which have 3 CPU in all")
    hosts = describe_loss("10.0.0.2", [], [1], [])
    assert "expert host 1 ran there" in hosts and "retry.host_wait_s" in hosts and "restart" not in hosts
    assert describe_loss("10.0.0.2", [], [], []).endswith("nothing of this run was there; the run continues")


def test_ranks_on_dead_nodes_only_are_lost_with_their_node() -> None:
    listed = [row("1"), row("2", alive=False)]
    assert lost_nodes(listed, {0: "1", 1: "2", 2: "2", 3: "9"}) == {1: "10.0.0.2", 2: "10.0.0.2"}
