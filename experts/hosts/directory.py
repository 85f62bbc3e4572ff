"""The Ray actor that owns the expert hosts.

It places the hosts, brings workers and hosts together in numbered generations, and ends a generation on every member as
soon as one of them dies: a dead peer is noticed by those that talk to it, the others would wait (DESIGN 5). A host that
dies is replaced; where nothing comes in its place in time, the next generation has one host fewer.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from typing import Any

import ray
import ray.exceptions

from experts.hosts.generation import open_store
from experts.hosts.host import ExpertHost, HostPlace
from experts.placement.starting import PlacementRules, starting_placement
from experts.placement.values import Placement
from experts.shapes import LayerShape
from raytrain.errors import RaytrainError, RunError, StateLost

JOIN_S = 300.0
START_S = 240.0
"""So long may the first hosts take to stand; they are reserved by then."""
TRIES = 2
"""Processes in a row that end before they stand: the place is given up."""
LOOPBACK = "127.0.0.1"


class ExpertDirectory:
    """One per run, named, owned by the driver.

    Args:
        hosts: how many.
        threads: of each host.
        gpus: of each host, 0 or 1.
        loopback: the cluster is this machine alone.
        interface: for gloo, or None.
        group: placement group with one bundle for each host, or None.
        host_wait_s: so long is a new host waited for; with 0 nothing is started in a dead one's place.
    """

    def __init__(
        self, *, hosts: int, threads: int, gpus: float, loopback: bool, interface: str | None, group: Any,
        host_wait_s: float,
    ) -> None:  # fmt: skip
        self._number, self._threads, self._gpus = hosts, threads, gpus
        self._device = "cuda" if gpus else "cpu"
        self._loopback, self._interface = loopback, interface
        self._group, self._host_wait_s = group, host_wait_s
        self._lock = threading.Condition()
        self._places: list[HostPlace] = []
        self._members: list[int] = []
        """Places that take part in the generation, in the order of their ranks."""
        self._spare: Any = None
        self._waiting: dict[int, set[int]] = {}
        self._generation = 0
        self._gangs: list[int] = []
        self._lost: dict[int, str] = {}
        self._joined: dict[int, dict[str, Any]] = {}
        self._refused: dict[int, RaytrainError] = {}
        self._deaths: list[dict[str, Any]] = []
        self._deaths_heard = 0
        """So many of them are on record."""
        self._placement: Placement | None = None
        """In force; the next generation of as many hosts goes on with it."""
        self._me = ray.get_runtime_context().current_actor
        self._store, self._address = open_store(LOOPBACK if loopback else ray.util.get_node_ip_address())

    # -- hosts --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the hosts; returns at once. The first generation begins when all stand."""
        with self._lock:
            self._places = [HostPlace(self._new_host(index)) for index in range(self._number)]
            for index in range(self._number):
                self._look_after(index)

    def standing(self) -> list[dict[str, Any]]:
        """What each host is, once all of them stand for the first time.

        Raises:
            RunError: they do not.
        """
        with self._lock:
            self._await_hosts(START_S, all_of_them=True)
            return [place.about for place in self._places if place.about is not None]

    def _new_host(self, index: int) -> Any:
        options: dict[str, Any] = {"num_cpus": 0 if self._gpus else 1, "num_gpus": self._gpus, "max_concurrency": 8}
        if self._group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=index
            )
        return self._made(options)

    def _made(self, options: dict[str, Any]) -> Any:
        host: Any = ray.remote(ExpertHost)
        return host.options(**options).remote(threads=self._threads, device=self._device, directory=self._me)

    def _look_after(self, index: int) -> None:
        arguments = (index, self._places[index].host)
        threading.Thread(target=self._await_death, args=arguments, daemon=True, name="death-watch").start()

    def _await_death(self, index: int, host: Any) -> None:
        place = self._places[index]
        try:
            about: Any = ray.get(host.ready.remote())
            with self._lock:
                place.about, place.tries = about, 0
                self._lock.notify_all()
            ray.get(host.stay.remote())
        except ray.exceptions.RayError as error:
            ray.kill(host)  # it may only be out of reach, and would keep the GPU that the next one needs
            with self._lock:
                self._replace(index, why=str(error).splitlines()[0])

    def _replace(self, index: int, *, why: str) -> None:
        """A host is gone: another process in its place, where one may come; the generation that it was in is over."""
        place = self._places[index]
        rank = self._members.index(index) if index in self._members else index
        about = place.about or {}
        where = {"node": str(about.get("node", "")), "pid": about.get("pid")}
        self._deaths.append({"who": f"expert host {rank}", **where, "time": time.time(), "why": why})
        place.tries += place.about is None
        place.about, place.host, place.why = None, None, why
        if self._host_wait_s and place.tries < TRIES:
            spare, self._spare = self._spare, None
            place.host = spare if spare is not None else self._new_host(index)
            self._look_after(index)
        if index in self._members and self._generation in self._joined:
            self._end_locked(f"expert host {rank} died ({why})")
        self._lock.notify_all()

    def keep_spare(self) -> None:
        """Start a process that stands by for a host that dies; on CPUs only, a GPU has no second owner."""
        with self._lock:
            if self._spare is None and not self._gpus and self._host_wait_s:
                self._spare = self._made({"num_cpus": 0, "max_concurrency": 8})

    def _await_hosts(self, limit: float, *, all_of_them: bool, generation: int | None = None) -> None:
        """Until every place has a host that stands or is given up.

        Raises:
            RunError: none stands, or not `all_of_them`. StateLost: the generation is over meanwhile.
        """
        ends = time.monotonic() + limit
        while any(place.about is None and place.host is not None for place in self._places) or not self._places:
            if generation in self._lost:
                raise StateLost(self._lost[generation])
            if not self._lock.wait(timeout=max(0.0, ends - time.monotonic())) and time.monotonic() >= ends:
                break
        missing = {index: place.why for index, place in enumerate(self._places) if place.about is None}
        if missing and (all_of_them or len(missing) == len(self._places)):
            said = "; ".join(f"expert host {index}: {why}" for index, why in missing.items())
            waited = "" if all_of_them else f" (retry.host_wait_s {self._host_wait_s:g})"
            raise RunError(
                f"{len(missing)} of {len(self._places)} expert hosts do not stand after {limit:g} s{waited}: {said}"
            )

    # -- generations --------------------------------------------------------------------------------------

    def join(
        self, *, gang: int, rank: int, workers: int, shapes: list[dict[str, Any]], rules: dict[str, Any]
    ) -> dict[str, Any]:
        """A worker comes; returns when all workers of its gang have, with what the next generation is.

        Args:
            gang: a number that the workers of one start by Ray share. After a restart the old ones may still be on
                their way here; they do not count.

        Raises:
            RunError: they do not come in time, others have come in their place, or no host stands.
            InputError: the hosts have no room for the experts.
        """
        ends = time.monotonic() + JOIN_S
        with self._lock:
            generation = self._open(gang)
            came = self._waiting[generation]
            came.add(rank)
            if len(came) == workers:
                try:
                    layers = [LayerShape.from_json(shape) for shape in shapes]
                    self._begin(generation, workers, layers, PlacementRules.from_json(rules))
                except RaytrainError as error:
                    self._refused[generation] = error
                    self._end_locked(str(error))
                self._lock.notify_all()
            while generation not in self._joined:
                if generation in self._refused:
                    raise self._refused[generation]
                if generation in self._lost:
                    raise StateLost(self._lost[generation])
                if len(came) < workers and time.monotonic() > ends:
                    raise RunError(f"only {len(came)} of {workers} workers came within {JOIN_S} s")
                self._lock.wait(timeout=1.0)
            return self._joined[generation]

    def _open(self, gang: int) -> int:
        """The generation that this gang gathers for: a new one where the last has begun, is over, or was another's."""
        if gang in self._gangs[:-1]:
            raise RunError("these workers were replaced by others")
        newcomers = gang not in self._gangs
        if newcomers:
            self._gangs.append(gang)
        if newcomers or self._generation in self._joined or self._generation in self._lost:
            if self._generation and self._generation not in self._lost:
                self._end_locked("the workers begin anew")
            self._generation += 1
            self._waiting[self._generation] = set()
        return self._generation

    def _begin(self, generation: int, workers: int, shapes: list[LayerShape], rules: PlacementRules) -> None:
        """All workers are here: tell the hosts that stand, and the workers, what the generation is."""
        first = not self._joined
        limit = START_S if first else self._host_wait_s
        self._await_hosts(limit, all_of_them=first, generation=generation)
        members = [index for index, place in enumerate(self._places) if place.about is not None]
        before = self._placement
        if before is None or before.num_hosts != len(members):
            hosts = [self._places[index].spec(rank) for rank, index in enumerate(members)]
            self._placement = starting_placement(rules, shapes, hosts)
        assert self._placement is not None
        self._members = members
        told = {
            "generation": generation,
            "workers": workers,
            "hosts": len(members),
            "address": self._address,
            "interface": "lo" if self._loopback else self._interface,
            "device": self._device,
            "placement": self._placement.to_json(),
            "specs": [asdict(self._places[index].spec(rank)) for rank, index in enumerate(members)],
            "note": self._note(before),
            "deaths": self._deaths[self._deaths_heard :],
            "deaths_known": len(self._deaths),
        }
        for rank, index in enumerate(members):
            self._places[index].host.join.remote({**told, "host": rank})
        self._joined[generation] = told

    def _note(self, before: Placement | None) -> str:
        """What differs from the generation before; nothing where a newcomer took the dead one's place."""
        now = len(self._members)
        if before is None or before.num_hosts == now:
            return ""
        if now > before.num_hosts:
            return f"{now} hosts again hold the experts; equal within rounding only"
        gone = "; ".join(f"host {index}: {it.why}" for index, it in enumerate(self._places) if it.about is None)
        return (
            f"no new host came within {self._host_wait_s:g} s (retry.host_wait_s; {gone}): {now} of "
            f"{self._number} hosts hold all experts; equal within rounding only"
        )

    def acknowledge_deaths(self, deaths: int) -> None:
        """The first so many deaths are on record: no later generation is told of them."""
        self._deaths_heard = deaths

    def switched(self, generation: int, placement: dict[str, Any]) -> None:
        """Experts have moved: the generation after this one begins with this placement."""
        with self._lock:
            if generation == self._generation:
                self._placement = Placement.from_json(placement)

    def failed(self, generation: int, reason: str, trace: str) -> None:
        """A member tells that it cannot go on."""
        if trace:
            print(trace)
        self._end_generation(reason, only=generation)

    def _end_generation(self, reason: str, *, only: int | None = None) -> None:
        with self._lock:
            if only is not None and only != self._generation:
                return
            self._end_locked(reason)

    def _end_locked(self, reason: str) -> None:
        if self._generation in self._lost:
            return
        self._lost[self._generation] = reason
        for index in self._members:
            if self._places[index].about is not None:
                self._places[index].host.abort.remote(self._generation, reason)
        self._lock.notify_all()

    def watch(self, generation: int) -> str:
        """Returns when the generation is over, with the reason: workers poll it in a thread."""
        with self._lock:
            while generation not in self._lost:
                self._lock.wait(timeout=5.0)
            return self._lost[generation]
