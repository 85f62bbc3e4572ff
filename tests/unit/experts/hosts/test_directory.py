"""The directory with played hosts, without Ray: hosts that never start or fall silent, and replaced workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions
from plans import check_placement

from experts.config import LayerShape
from experts.hosts import directory as module
from experts.hosts.directory import ExpertDirectory
from experts.placement.policy import PlacementRules
from experts.placement.values import LayerPlacement, Placement
from raytrain.errors import RunError, StateLost

SHAPES = [LayerShape(8, (16,) * 12, "gelu")]
LIMIT_S = 20.0
"""Only a test that fails waits so long."""


class Died(ray.exceptions.RayError):
    """What a call of a dead host raises."""


class Call:
    """`host.method.remote(...)` and its result, as `PlayedRay.get` takes it."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self._answer, self._given = answer, ()

    def remote(self, *given: Any) -> Callable[[], Any]:
        return lambda: self._answer(*given)


class Host:
    """An expert host whose start, answers and death a test decides."""

    def __init__(self, number: int, *, starts: bool = True, starting: threading.Event | None = None) -> None:
        self.number, self.dead, self.silent = number, threading.Event(), threading.Event()
        self.joined: list[tuple[int, int]] = []
        self.aborted: list[tuple[int, str]] = []
        if not starts:
            self.dead.set()
        self._starting = starting
        self.ready = Call(lambda: self._started({"node": "n", "pid": number, "memory_bytes": None, "name": "CPU"}))
        self.stay = Call(self._stay)
        self.ping = Call(lambda: self._alive(None))
        self.join = SimpleNamespace(remote=lambda spec, rank: self.joined.append((spec.number, rank)))
        self.abort = SimpleNamespace(remote=lambda number, why: self.aborted.append((number, why)))
        self.__dict__["__ray_call__"] = Call(lambda _function: f"id of {number}")

    def _started(self, value: Any) -> Any:
        if self._starting is not None:
            self._starting.wait(LIMIT_S)
        return self._alive(value)

    def _alive(self, value: Any) -> Any:
        if self.dead.is_set():
            raise Died("the constructor failed")
        return value

    def _stay(self) -> None:
        self.dead.wait()
        self._alive(None)


class PlayedRay:
    """The parts of Ray that the directory uses."""

    exceptions = ray.exceptions
    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(current_actor=None)

    def __init__(self) -> None:
        self.ended = False

    def get(self, asked: Callable[[], Any]) -> Any:
        if self.ended:
            raise Died("the test has ended")
        return asked()

    def wait(self, asked: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        """A silent host answers no call; the thread sleeps no longer than the directory says."""
        host = Directory.newest.host_of(asked[0])
        if host is not None and host.silent.wait(0) and not host.dead.is_set():
            threading.Event().wait(timeout)
            return [], asked
        return asked, []

    def kill(self, host: Host) -> None:
        host.dead.set()


class Directory(ExpertDirectory):
    """A directory of played hosts; `fails` numbers the hosts, in the order of their start, that never become ready."""

    newest: Any = None

    def __init__(
        self, hosts: int = 2, *, fails: frozenset[int] = frozenset(), wait_s: float = LIMIT_S, gpus: float = 0
    ) -> None:
        self.made: list[Host] = []
        self.starting = threading.Event()
        """Hosts become ready only while it is set."""
        self.starting.set()
        self._fails = fails
        super().__init__(
            hosts=hosts, threads=1, gpus=gpus, loopback=True, interface=None, group=None, host_wait_s=wait_s,
            host_silence_s=0.2,
        )  # fmt: skip
        Directory.newest = self
        self.start()

    def host_of(self, asked: Any) -> Host | None:
        cells = [cell.cell_contents for cell in asked.__closure__ or ()]
        calls = [cell for cell in cells if isinstance(cell, Call)]
        return next((host for host in self.made for call in calls if host.ping is call), None)

    def _create_actor(self, options: dict[str, Any]) -> Any:
        self.options = options
        number = len(self.made) + 1
        self.made.append(Host(number, starts=number not in self._fails, starting=self.starting))
        return self.made[-1]

    def joined_by(self, group: int, *, workers: int = 2) -> list[Any]:
        """What each worker of a group gets: its generation, or the error."""
        found: list[Any] = [None] * workers

        def join(rank: int) -> None:
            try:
                found[rank] = self.join(
                    worker_group=group, rank=rank, workers=workers, shapes=SHAPES, rules=PlacementRules()
                )
            except RunError as error:
                found[rank] = error

        threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        return found

    def ended(self, generation: int) -> str:
        """Why a generation is over, once it is."""
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(self.watch(generation)), daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        return found[0]


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    played = PlayedRay()
    monkeypatch.setattr(module, "ray", played)
    monkeypatch.setattr(module, "PING_EVERY_S", 0.02)
    yield
    played.ended = True  # the threads of the directory must not go on with the real Ray: it would start a cluster
    while watching := [one for one in threading.enumerate() if one.name in ("death-watch", "host-pulse")]:
        for host in Directory.newest.made:
            host.dead.set()
        watching[0].join(0.1)


def test_a_host_that_can_never_start_is_given_up_and_reported() -> None:
    """Two processes in a row end before they are ready: nobody waits for a third."""
    directory = Directory(fails=frozenset(range(1, 100)))
    found = directory.joined_by(1)
    assert all(isinstance(error, RunError) for error in found), found
    assert "2 of 2 expert hosts are not ready" in str(found[0]) and "the constructor failed" in str(found[0])
    assert len(directory.made) == 2 * module.TRIES


def test_one_host_that_fails_once_is_started_again() -> None:
    directory = Directory(fails=frozenset({1}))
    one, two = directory.joined_by(1)
    assert one.number == two.number == 1 and one.hosts == 2
    assert sorted(number for host in directory.made for number in host.joined) == [(1, 0), (1, 1)]


def test_a_worker_group_that_ray_replaced_gets_a_generation_of_its_own() -> None:
    directory = Directory()
    first, _ = directory.joined_by(group=11)
    assert first.number == 1
    again, other = directory.joined_by(group=22)
    assert again.number == other.number == 2 and again.placement == first.placement
    assert directory.ended(1) == "the workers were restarted"
    assert all(host.aborted == [(1, "the workers were restarted")] for host in directory.made)
    assert all([number for number, _ in host.joined] == [1, 2] for host in directory.made)
    late = directory.joined_by(group=11)
    assert all("replaced by others" in str(error) for error in late), "a call of the old workers that arrives late"
    third, _ = directory.joined_by(group=22)
    assert third.number == 3, "the same workers after a rewind"


def test_workers_that_are_replaced_while_they_join_are_not_mixed_with_the_new_ones() -> None:
    directory = Directory()
    old: list[Any] = []

    def joins() -> None:
        try:
            directory.join(worker_group=11, rank=0, workers=2, shapes=SHAPES, rules=PlacementRules())
        except StateLost as error:
            old.append(error)

    thread = threading.Thread(target=joins, daemon=True)
    thread.start()
    while not directory._worker_groups:
        threading.Event().wait(0.01)
    one, two = directory.joined_by(group=22)
    thread.join(LIMIT_S)
    assert one.number == two.number == 2 and "restarted" in str(old[0])


def test_a_host_that_does_not_respond_is_reported_then_replaced() -> None:
    directory = Directory()
    directory.joined_by(group=1)
    directory.made[1].silent.set()
    assert directory.ended(1).startswith("expert host 1 did not respond (no response for ")
    spec, _ = directory.joined_by(group=1)
    (death,) = spec.deaths
    assert (death.who, death.pid, death.silent) == ("expert host 1", 2, True)
    assert directory.made[1].dead.is_set() and len(directory.made) == 3, "ended, and replaced once"
    nodes, lines = directory.report()
    assert nodes == {0: "id of 1", 1: "id of 3"}
    assert len(lines) == 1 and lines[0].startswith("expert host 1 on n (pid 2) has not responded since ")
    assert "retry.host_silence_s" in lines[0] and directory.report()[1] == []


def test_a_replacement_that_dies_with_its_host_is_one_death() -> None:
    """Such as a spare on the node that was lost: users would read of two deaths of one host."""
    directory = Directory(fails=frozenset({3}))
    directory.joined_by(group=1)
    directory.made[1].dead.set()
    assert directory.ended(1).startswith("expert host 1 died")
    spec, _ = directory.joined_by(group=1)
    assert [(death.who, death.pid) for death in spec.deaths] == [("expert host 1", 2)]
    assert len(directory.made) == 4 and directory.report()[0] == {0: "id of 1", 1: "id of 4"}


def moved(placement: Placement, version: int) -> Placement:
    """The experts of each host on the next one."""
    hosts, layers = placement.num_hosts, []
    for layer in placement.layers:
        copies = tuple(tuple((host + 1) % hosts for host in held) for held in layer.copies)
        layers.append(LayerPlacement(copies, layer.shares))
    return Placement(version, hosts, tuple(layers))


@pytest.mark.parametrize("hosts", [2, 3])
def test_after_experts_have_moved_a_new_host_takes_the_place_of_the_one_that_died(hosts: int) -> None:
    """With what that held then, and not at the start of the run."""
    directory = Directory(hosts)
    first, _ = directory.joined_by(group=1)
    now = moved(first.placement, 2)
    assert now.layers != first.placement.layers
    directory.switched(1, now)
    directory.made[-1].dead.set()
    assert directory.ended(1).startswith(f"expert host {hosts - 1} died")
    again, _ = directory.joined_by(group=1)
    assert again.placement == now and again.hosts == hosts and again.note == ""
    directory.switched(1, first.placement)  # of a generation that is over: it arrives late
    third, _ = directory.joined_by(group=2)
    assert third.number == 3 and third.placement == now


def test_after_experts_have_moved_survivors_keep_what_they_have_then() -> None:
    """Where no other takes its place."""
    directory = Directory(4, wait_s=0.0)
    first, _ = directory.joined_by(group=1)
    now = moved(first.placement, 2)
    directory.switched(1, now)
    directory.made[1].dead.set()
    directory.ended(1)
    three, _ = directory.joined_by(group=1)
    ranks = {0: 0, 2: 1, 3: 2}  # place -> rank in the generation
    assert three.hosts == three.placement.num_hosts == 3 and "3 of 4 hosts hold all experts" in three.note
    for expert in range(len(SHAPES[0].hidden_E)):
        before = now.home_of(0, expert)
        assert before == 1 or three.placement.home_of(0, expert) == ranks[before]


def test_a_host_that_comes_late_while_others_are_lost_begins_anew_with_them() -> None:
    """No survivor of the last generation alone: its placement says nothing of the host that has come."""
    directory = Directory(4)
    directory.joined_by(group=1)
    directory._host_wait_s = 0.05
    directory.starting.clear()
    directory.made[3].dead.set()
    directory.ended(1)
    three, _ = directory.joined_by(group=1)
    assert three.hosts == 3
    directory.starting.set()
    while len(directory.report()[0]) < 4:
        threading.Event().wait(0.01)
    directory.starting.clear()
    for lost in (1, 2):
        directory.made[lost].dead.set()
    directory.ended(2)
    while len(directory.made) < 7:
        threading.Event().wait(0.01)
    two, _ = directory.joined_by(group=1)
    assert two.hosts == two.placement.num_hosts == 2 and "2 of 4 hosts hold all experts" in two.note
    check_placement(two.placement, [len(SHAPES[0].hidden_E)])
    assert directory.made[0].joined[-1] == (3, 0) and directory.made[4].joined[-1] == (3, 1)
    directory.starting.set()


def test_a_spare_replaces_one_host_and_the_next_death_starts_another_process() -> None:
    """Two deaths, the second of the host that was the spare."""
    directory = Directory()
    directory.joined_by(group=1)
    directory.keep_spare()
    directory.keep_spare()
    assert len(directory.made) == 3, "one spare, however often it is asked for"
    for generation, made in ((1, 3), (2, 4)):
        directory._places[1].host.dead.set()
        directory.ended(generation)
        spec, _ = directory.joined_by(group=1)
        assert spec.hosts == 2 and len(directory.made) == made
        assert directory.report()[0] == {0: "id of 1", 1: f"id of {made}"}


def test_what_a_host_has_to_say_is_for_the_driver_to_print() -> None:
    directory = Directory()
    directory.joined_by(group=1)
    said = iter([["fell back: a loop instead of a grouped product"]])
    directory.made[0].ping = Call(lambda: next(said, []))
    lines: list[str] = []
    while not lines:
        lines += directory.report()[1]
    assert lines == ["expert host 0 on n (pid 1): fell back: a loop instead of a grouped product"]


def test_a_host_that_responds_again_stays() -> None:
    directory = Directory()
    directory._host_silence_s = LIMIT_S
    module_say = module.SAY_SILENT_S
    module.SAY_SILENT_S = 0.05
    try:
        directory.joined_by(group=1)
        directory.made[0].silent.set()
        lines: list[str] = []
        while not lines:
            lines += directory.report()[1]
        directory.made[0].silent.clear()
        while len(lines) < 2:
            lines += directory.report()[1]
    finally:
        module.SAY_SILENT_S = module_say
    assert "has not responded since" in lines[0] and "responds again" in lines[1]
    assert len(directory.made) == 2 and directory.joined_by(group=1)[0].deaths == []


@pytest.mark.parametrize(
    ("gpus", "device", "through_host"), [(0, "cpu", False), (1, "cuda", False), (0.5, "cuda", True)]
)
def test_hosts_with_a_part_of_a_gpu_exchange_rows_through_the_host(
    gpus: float, device: str, through_host: bool
) -> None:
    directory = Directory(1, gpus=gpus)
    (spec, _) = directory.joined_by(1)
    assert (spec.device, spec.through_host, directory.options["num_gpus"]) == (device, through_host, gpus)
