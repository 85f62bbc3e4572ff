"""The Ray actor that owns the expert hosts.

It starts the hosts, brings workers and hosts together in numbered generations, and ends a generation on every member as
soon as one of them dies: only members that talk to a dead peer would notice, the others would wait. A host
that dies is replaced; if no replacement is ready in time, the next generation has one host fewer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from experts.config import LayerShape
from experts.exchange.rebalancer import speeds_by_kind
from experts.hosts.generation import GenerationSpec, open_store
from experts.hosts.host import ExpertHost, HostPlace, ProcessLimits
from experts.placement.policy import PlacementRules, starting_placement, surviving_placement
from experts.placement.values import Placement
from raytrain.errors import RaytrainError, RunError, StateLost, first_line
from raytrain.execution.telemetry import HostTelemetry
from raytrain.runs.faults import Death

JOIN_S = 300.0
START_S = 240.0
"""Timeout until the first hosts are ready; their resources are already reserved."""
MEASURE_LIMIT_S = 60.0
"""Timeout of the measurement of one host, which takes half a second on an idle machine."""
TRIES = 2
"""A place is given up after this many processes in a row that ended before they were ready."""
LOOPBACK = "127.0.0.1"
PING_EVERY_S = 5.0
SAY_SILENT_S = 15.0
"""A host that has not answered for this long is reported, before it is ended."""


class ExpertDirectory:
    """Starts hosts and forms generations; one per run, owned by the driver.

    Args:
        hosts: number of hosts. threads, gpus: of each host.
        loopback: the cluster is this machine alone.
        interface: of gloo and NCCL, or None.
        group: placement group with one bundle for each host from `first_bundle` on, or None.
        host_wait_s: timeout of the wait for a replacement; with 0 no host is replaced.
        host_silence_s: a host that has not responded for this long is ended.
        dtype: planned number format of the experts' products, a value of `precision.dtype`.
        speeds: kind -> speed of hosts, as the run recorded them; empty for a new run.
        limits: of each host's process.
    """

    def __init__(
        self, *, hosts: int, threads: int, gpus: float, loopback: bool, interface: str | None, group: Any,
        host_wait_s: float, host_silence_s: float, dtype: str = "fp32", speeds: Mapping[str, float] | None = None,
        limits: ProcessLimits | None = None, first_bundle: int = 0, telemetry: HostTelemetry | None = None,
    ) -> None:  # fmt: skip
        self._first_bundle, self._telemetry = first_bundle, telemetry
        self._dtype, self._speeds, self._limits = dtype, dict(speeds or {}), limits
        self._number, self._threads, self._gpus = hosts, threads, gpus
        self._device = "cuda" if gpus else "cpu"
        self._interface = "lo" if loopback else interface
        self._group, self._host_wait_s, self._host_silence_s = group, host_wait_s, host_silence_s
        self._lines: list[str] = []
        """For the driver to print; taken by `report`."""
        self._lock = threading.Condition()
        self._places: list[HostPlace] = []
        self._members: list[int] = []
        """Places that take part in the generation, in the order of their ranks."""
        self._spare: Any = None
        self._waiting: dict[int, set[int]] = {}
        """Generation -> ranks of the workers that have asked to join it."""
        self._generation = 0
        self._worker_groups: list[int] = []
        self._lost: dict[int, str] = {}
        self._joined: dict[int, GenerationSpec] = {}
        self._refused: dict[int, RaytrainError] = {}
        self._deaths: list[Death] = []
        self._deaths_recorded = 0
        self._placement: Placement | None = None
        """In force; the next generation starts with it if it has equally many hosts."""
        self._me = ray.get_runtime_context().current_actor
        self._store, self._address = open_store(LOOPBACK if loopback else ray.util.get_node_ip_address())

    # -- hosts --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the hosts; returns at once. The first generation starts when all are ready."""
        with self._lock:
            self._places = [HostPlace(self._start_host(index)) for index in range(self._number)]
            for index in range(self._number):
                self._watch_host(index)

    def ready_hosts(self) -> list[dict[str, Any]]:
        """Wait for all hosts to be ready for the first time; returns the description of each. Raises RunError."""
        with self._lock:
            self._await_hosts(START_S, all_of_them=True)
            return [place.about for place in self._places if place.about is not None]

    def report(self) -> tuple[dict[int, str], list[str]]:
        """(host -> id of its node, lines to print since the last call). The driver calls it every few seconds."""
        with self._lock:
            lines, self._lines = self._lines, []
            ready = [(index, place.about) for index, place in enumerate(self._places) if place.about is not None]
            return {self._rank_of(index): str(about["node_id"]) for index, about in ready}, lines

    def _rank_of(self, index: int) -> int:
        """The number of a host in messages: its rank in the generation, or its place before the first one."""
        return self._members.index(index) if index in self._members else index

    def _start_host(self, index: int) -> Any:
        options: dict[str, Any] = {"num_cpus": 0 if self._gpus else 1, "num_gpus": self._gpus, "max_concurrency": 8}
        # for a Ray of this machine, which may have been started with several nodes
        options["scheduling_strategy"] = "SPREAD"
        if self._group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._first_bundle + index
            )
        return self._create_actor(options)

    def _create_actor(self, options: dict[str, Any]) -> Any:
        host: Any = ray.remote(ExpertHost)
        return host.options(**options).remote(
            threads=self._threads, device=self._device, directory=self._me, limits=self._limits,
            telemetry=self._telemetry,
        )  # fmt: skip

    def _watch_host(self, index: int) -> None:
        arguments = (index, self._places[index].host)
        threading.Thread(target=self._await_death, args=arguments, daemon=True, name="death-watch").start()

    def _await_death(self, index: int, host: Any) -> None:
        place = self._places[index]
        try:
            about: Any = ray.get(host.ready.remote())
            about["node_id"] = ray.get(host.__ray_call__.remote(lambda _host: ray.get_runtime_context().get_node_id()))
            with self._lock:
                place.about, place.tries = about, 0
                self._lock.notify_all()
            threading.Thread(target=self._await_silence, args=(index, host), daemon=True, name="host-pulse").start()
            ray.get(host.stay.remote())
        except ray.exceptions.RayError as error:
            ray.kill(host)  # it may only be unreachable, and would keep the GPU that its replacement needs
            with self._lock:
                self._replace(index, host, why=str(error).splitlines()[0])

    def _await_silence(self, index: int, host: Any) -> None:
        """Ask a host again and again whether it responds; report it if it does not, and end it after a while."""
        about = self._places[index].about or {}
        while True:
            asked, since, reported = host.ping.remote(), time.monotonic(), False
            at = time.strftime("%H:%M:%S")
            who = f"expert host {self._rank_of(index)} on {about.get('node')} (pid {about.get('pid')})"
            while not ray.wait([asked], timeout=min(PING_EVERY_S, self._host_silence_s / 4))[0]:
                silent = time.monotonic() - since
                if silent >= self._host_silence_s:
                    with self._lock:
                        self._replace(index, host, why=f"no response for {silent:.0f} s", silent=True)
                    ray.kill(host)
                    return
                if silent >= min(SAY_SILENT_S, self._host_silence_s / 2) and not reported:
                    reported = True
                    self._lines.append(
                        f"{who} has not responded since {at}; after {self._host_silence_s:g} s it is replaced "
                        "(retry.host_silence_s)"
                    )
            try:
                said: Any = ray.get(asked)
            except ray.exceptions.RayError:  # it died, which `_await_death` notices
                return
            self._lines += [f"{who}: {line}" for line in said or ()]
            if reported:
                self._lines.append(f"{who} responds again, after {time.monotonic() - since:.0f} s")
            time.sleep(PING_EVERY_S)

    def _replace(self, index: int, host: Any, *, why: str, silent: bool = False) -> None:
        """A host has died, or did not respond: start a replacement if one is allowed, and end its generation."""
        place = self._places[index]
        if place.host is not host:
            return  # it was replaced before
        about = place.about or {}
        node, pid = str(about.get("node", "")), about.get("pid")
        death = Death(f"expert host {self._rank_of(index)}", node, pid, time=time.time(), why=why, silent=silent)
        if place.about is not None:  # else a replacement that was never ready, such as a spare on the same node
            self._deaths.append(death)
        place.tries += place.about is None
        place.about, place.host, place.why = None, None, why
        if self._host_wait_s and place.tries < TRIES:
            spare, self._spare = self._spare, None
            place.host = spare if spare is not None else self._start_host(index)
            self._watch_host(index)
        if index in self._members and self._generation in self._joined:
            self._end_locked(f"{death.who} {'did not respond' if silent else 'died'} ({why})")
        self._lock.notify_all()

    def keep_spare(self) -> None:
        """Start a spare process to replace a host that dies; on CPUs only, as a GPU cannot be owned twice."""
        with self._lock:
            if self._spare is None and not self._gpus and self._host_wait_s:
                self._spare = self._create_actor({"num_cpus": 0, "max_concurrency": 8})

    def _await_hosts(self, limit: float, *, all_of_them: bool, generation: int | None = None) -> None:
        """Wait until every place has a host that is ready, or is given up.

        Raises:
            RunError: no host is ready; with `all_of_them`, one is not. StateLost: the generation ended meanwhile.
        """
        ends = time.monotonic() + limit
        while any(place.about is None and place.host is not None for place in self._places) or not self._places:
            if generation in self._lost:
                raise StateLost(self._lost[generation])
            if not self._lock.wait(timeout=max(0.0, ends - time.monotonic())) and time.monotonic() >= ends:
                break
        missing = {index: place.why for index, place in enumerate(self._places) if place.about is None}
        if missing and (all_of_them or len(missing) == len(self._places)):
            reasons = "; ".join(f"expert host {index}: {why}" for index, why in missing.items())
            waited = "" if all_of_them else f" (retry.host_wait_s {self._host_wait_s:g})"
            raise RunError(
                f"{len(missing)} of {len(self._places)} expert hosts are not ready after {limit:g} s{waited}: {reasons}"
            )

    # -- generations --------------------------------------------------------------------------------------

    def join(
        self, *, worker_group: int, rank: int, workers: int, shapes: list[LayerShape], rules: PlacementRules
    ) -> GenerationSpec:
        """Let a worker join the next generation; returns when all workers of its group have joined.

        Args:
            worker_group: a number that all workers started together by Ray share. After a restart, calls of the old
                workers may still arrive; they are refused.

        Raises:
            RunError: workers did not join in time or were replaced by others, or no host is ready.
            InputError: the hosts have no room for the experts.
        """
        ends = time.monotonic() + JOIN_S
        with self._lock:
            generation = self._open(worker_group)
            ranks = self._waiting[generation]
            ranks.add(rank)
            if len(ranks) == workers:
                try:
                    self._begin(generation, workers, shapes, rules)
                except RaytrainError as error:
                    self._refused[generation] = error
                    self._end_locked(str(error))
                self._lock.notify_all()
            while generation not in self._joined:
                if generation in self._refused:
                    raise self._refused[generation]
                if generation in self._lost:
                    raise StateLost(self._lost[generation])
                if len(ranks) < workers and time.monotonic() > ends:
                    raise RunError(f"only {len(ranks)} of {workers} workers joined within {JOIN_S} s")
                self._lock.wait(timeout=1.0)
            return self._joined[generation]

    def _open(self, worker_group: int) -> int:
        """The generation that this group joins: a new one if the last has started, has ended, or was another's."""
        if worker_group in self._worker_groups[:-1]:
            raise RunError("these workers were replaced by others")
        newcomers = worker_group not in self._worker_groups
        if newcomers:
            self._worker_groups.append(worker_group)
        if newcomers or self._generation in self._joined or self._generation in self._lost:
            if self._generation and self._generation not in self._lost:
                self._end_locked("the workers were restarted")
            self._generation += 1
            self._waiting[self._generation] = set()
        return self._generation

    def _begin(self, generation: int, workers: int, shapes: list[LayerShape], rules: PlacementRules) -> None:
        """All workers have joined: send the generation to the hosts that are ready."""
        first = not self._joined
        limit = START_S if first else self._host_wait_s
        self._await_hosts(limit, all_of_them=first, generation=generation)
        members = [index for index, place in enumerate(self._places) if place.about is not None]
        speeds = self._measured_speeds(members, shapes)
        specs = [
            self._places[index].spec(rank, speed)
            for rank, (index, speed) in enumerate(zip(members, speeds, strict=True))
        ]
        before = self._placement
        if before is not None and len(members) < before.num_hosts and set(members) <= set(self._members):
            survivors = [self._members.index(index) for index in members]
            self._placement = surviving_placement(rules, shapes, specs, before=before, survivors=survivors)
        elif before is None or before.num_hosts != len(members):
            self._placement = starting_placement(rules, shapes, specs)
        assert self._placement is not None
        self._members = members
        spec = GenerationSpec(
            generation, workers, len(members), self._address, self._interface, self._device, self._placement, specs,
            deaths=self._deaths[self._deaths_recorded :], num_deaths=len(self._deaths), note=self._note(before),
            through_host=0 < self._gpus < 1,
        )  # fmt: skip
        for rank, index in enumerate(members):
            self._places[index].host.join.remote(spec, rank)
        self._joined[generation] = spec

    def _measured_speeds(self, members: list[int], shapes: list[LayerShape]) -> list[float]:
        """The speed of each member; hosts of a kind that is not known yet are measured, one after the other. Raises
        StateLost if one died meanwhile."""
        places = [self._places[index] for index in members]
        first = {place.kind: place for place in reversed(places)}

        def measure(kinds: Sequence[str]) -> list[float]:
            if not set(kinds) <= self._speeds.keys():
                calls = ((kind, first[kind].host.measure.remote(shapes, self._dtype)) for kind in kinds)
                try:  # one at a time: two on one machine would share its cores
                    found: dict[str, Any] = {kind: ray.get(call, timeout=MEASURE_LIMIT_S) for kind, call in calls}
                except ray.exceptions.RayError as error:
                    raise StateLost(f"an expert host did not measure its speed ({first_line(error)})") from error
                self._speeds = found
            return [self._speeds[kind] for kind in kinds]

        return speeds_by_kind([place.kind for place in places], measure)

    def _note(self, before: Placement | None) -> str:
        """What differs from the generation before; empty if the number of hosts is the same."""
        now = len(self._members)
        if before is None or before.num_hosts == now:
            return ""
        if now > before.num_hosts:
            return f"{now} hosts hold the experts again; results are equal within rounding only"
        missing = "; ".join(f"host {index}: {it.why}" for index, it in enumerate(self._places) if it.about is None)
        return (
            f"no new host was ready within {self._host_wait_s:g} s (retry.host_wait_s; {missing}): {now} of "
            f"{self._number} hosts hold all experts; results are equal within rounding only"
        )

    def acknowledge_deaths(self, number: int) -> None:
        """The first `number` deaths of the run are recorded: no later generation reports them."""
        self._deaths_recorded = number

    def switched(self, generation: int, placement: Placement) -> None:
        """Experts have moved: the next generation starts with this placement."""
        with self._lock:
            if generation == self._generation:
                self._placement = placement

    def failed(self, generation: int, reason: str, trace: str) -> None:
        """A host has failed: end its generation."""
        if trace:
            print(trace)
        with self._lock:
            if generation == self._generation:
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
        """Wait until the generation is over; returns the reason. Each worker calls it in a thread."""
        with self._lock:
            while generation not in self._lost:
                self._lock.wait(timeout=5.0)
            return self._lost[generation]
