"""What a run with hosts reserves: impossible requests are refused before it waits, and a wait says what is missing."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from experts.hosts import reserve as reservation
from experts.hosts.reserve import HostsOfRun, Request, Reservation
from jobs.driver import watch as watched
from raytrain.errors import InputError
from raytrain.plan.room import missing

NODES = [{"CPU": 4.0, "memory": 1e9}, {"CPU": 4.0, "GPU": 2.0, "accelerator_type:T4": 1.0}]


def request(hosts: int, workers: int, *, threads: float = 1, gpus: int = 0, kind: str | None = None) -> Request:
    one = {"GPU": float(gpus)} if gpus else {"CPU": float(threads)}
    host = one if kind is None else {**one, f"accelerator_type:{kind}": 0.001}
    return Request([dict(host) for _ in range(hosts)], [dict(one) for _ in range(workers)], "PACK", "the run a")


def test_what_fits_an_empty_cluster_is_not_refused() -> None:
    assert missing(request(6, 2).needs, NODES) == ""
    assert missing(request(1, 1, gpus=1, kind="T4").needs, NODES) == ""


@pytest.mark.parametrize(
    ("asked", "key", "words"),
    [
        pytest.param(request(6, 3), "experts.hosts", r"9 processes need 1 CPU each \(6 expert hosts and 3 workers\)",
                     id="more than the cluster has"),
        pytest.param(request(2, 1, threads=5), "scale.threads", "2 expert hosts need 5 CPU each; of 2 nodes, there are "
                     "4 CPU on 2 of them: room for 0", id="more than one node has"),
        pytest.param(request(2, 2, threads=3), "experts.hosts", "room for 2", id="as much as all have, but not of one"),
        pytest.param(request(1, 1, gpus=1, kind="H100"), "experts.hosts", "1 expert host needs 1 GPU of type H100",
                     id="a kind that is not there"),
        pytest.param(request(2, 1, gpus=1), "experts.hosts", "3 processes need 1 GPU each", id="hosts and workers"),
        pytest.param(request(0, 3, threads=4), "scale.workers", "3 workers need 4 CPU each", id="no hosts"),
    ],
)  # fmt: skip
def test_what_no_node_can_ever_hold_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch, asked: Request, key: str, words: str
) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Resources": node, "Alive": True} for node in NODES])
    monkeypatch.setattr(watched, "autoscales", lambda: False)
    with pytest.raises(InputError, match=words) as raised:
        watched.check_room(asked.needs)
    assert raised.value.key == key
    monkeypatch.setattr(watched, "autoscales", lambda: True)  # nodes may come
    assert re.search(f"waiting for nodes that the autoscaler may add: .*{words}", watched.check_room(asked.needs))


def test_a_wait_says_what_is_needed_and_what_is_free_by_node() -> None:
    line = missing(request(2, 1, threads=2).needs, [{"CPU": 3.0}, {"memory": 5.0}, {"CPU": 3.0}, {"CPU": 1.0}])
    assert line == (
        "3 processes need 2 CPU each (2 expert hosts and 1 worker); of 4 nodes, free are 3 CPU on 2 of them, "
        "0 CPU on one of them, 1 CPU on one of them: room for 2"
    )


class Played:
    """Ray's placement groups and the actor of the turn, for one run."""

    def __init__(self, patch: pytest.MonkeyPatch, *, ready: list[bool]) -> None:
        self.held: list[str] = []
        self.killed: list[Any] = []
        self._ready = iter(ready)
        patch.setattr("ray.nodes", lambda: [{"Resources": node, "Alive": True} for node in NODES])
        patch.setattr("ray.kill", self.killed.append)
        patch.setattr(reservation, "take_turn", lambda name, begin: f"turn of {name}")
        patch.setattr(reservation, "placement_group", self._group)
        patch.setattr(reservation, "remove_placement_group", lambda group: self.held.remove(group.name))
        patch.setattr(reservation, "RETRY_S", 0.0)
        patch.setattr(reservation, "GIVE_BACK_S", 0.0)

    def _group(self, bundles: list[Any], *, strategy: str) -> Any:
        name = "hosts" if strategy == "SPREAD" else "workers"
        self.held.append(name)
        return SimpleNamespace(name=name, wait=lambda _seconds: name == "hosts" or next(self._ready))


def began(*_what: Any, **_missing: Any) -> None:
    """Nothing is shown."""


def test_hosts_are_given_back_where_the_workers_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the workers need is free again before Ray Train asks for it."""
    played = Played(monkeypatch, ready=[False, False, False, False, True])
    held_then: list[int] = []
    monkeypatch.setattr(reservation.time, "sleep", lambda _: held_then.append(len(played.held)))
    taken = Reservation(request(2, 1), begin=began)
    assert held_then and set(held_then) == {0}, "nothing is held between two attempts"
    assert played.held == ["hosts"] and played.killed == []
    taken.end_turn()
    taken.end_turn()
    assert played.killed == ["turn of the run a"]
    taken.close()
    assert played.held == [] and len(played.killed) == 1


def test_the_turn_ends_with_the_start_of_the_workers_and_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, ready=[True, True])
    hosts = HostsOfRun(None, reservation=Reservation(request(2, 1), begin=began))
    assert hosts.reserved and played.killed == []
    hosts.workers_started()
    assert len(played.killed) == 1 and played.held == ["hosts"]
    HostsOfRun(None, reservation=Reservation(request(2, 1), begin=began)).close()
    assert len(played.killed) == 2 and played.held == ["hosts"]


def test_a_signal_while_a_run_waits_gives_back_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch, ready=[])

    def stopped(*_groups: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(reservation, "_both", stopped)
    with pytest.raises(KeyboardInterrupt):
        Reservation(request(2, 1), begin=began)
    assert played.held == [] and len(played.killed) == 1
