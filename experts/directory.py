"""The Ray actor that owns the expert hosts.

It places the hosts, brings workers and hosts together in numbered generations, and ends a generation on every member as
soon as one of them dies: a dead peer is noticed by those that talk to it, the others would wait (DESIGN 5).
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import ray
import ray.exceptions
import torch.distributed as dist

from experts.host import ExpertHost
from experts.placement import HostSpec, Placement
from experts.shapes import LayerShape
from experts.starting import PlacementRules, starting_placement
from raytrain.errors import RunError, StateLost

JOIN_S = 300.0
LOOPBACK = "127.0.0.1"


class ExpertDirectory:
    """One per run, named, owned by the driver.

    Args:
        hosts: how many.
        threads: of each host.
        gpus: of each host, 0 or 1.
        loopback: the cluster is this machine alone.
        interface: for gloo, or None.
    """

    def __init__(
        self, *, hosts: int, threads: int, gpus: float, loopback: bool, interface: str | None, group: Any
    ) -> None:
        self._number, self._threads, self._gpus = hosts, threads, gpus
        self._device = "cuda" if gpus else "cpu"
        self._loopback, self._interface = loopback, interface
        self._group = group
        self._lock = threading.Condition()
        self._hosts: list[Any] = []
        self._spare: Any = None
        self._waiting: dict[int, set[int]] = {}
        self._generation = 0
        self._gangs: list[int] = []
        self._lost: dict[int, str] = {}
        self._joined: dict[int, dict[str, Any]] = {}
        self._placement: Placement | None = None
        self._me = ray.get_runtime_context().current_actor
        self._store, self._address = _open_store(loopback=loopback)

    # -- hosts --------------------------------------------------------------------------------------------

    def start(self) -> list[dict[str, Any]]:
        """Start the hosts; what each of them is, once all stand."""
        self._hosts = [self._new_host(index) for index in range(self._number)]
        found = ray.get([host.ready.remote() for host in self._hosts])
        for host in self._hosts:
            self._watch(host)
        return found

    def _new_host(self, index: int) -> Any:
        strategy = None
        if self._group is not None:
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = {"num_cpus": 0 if self._gpus else 1, "num_gpus": self._gpus, "max_concurrency": 8}
        if strategy is not None:
            options["scheduling_strategy"] = strategy
        return self._made(options)

    def _made(self, options: dict[str, Any]) -> Any:
        host: Any = ray.remote(ExpertHost)
        return host.options(**options).remote(threads=self._threads, device=self._device, directory=self._me)

    def _watch(self, host: Any) -> None:
        threading.Thread(target=self._await_death, args=(host,), daemon=True, name="death-watch").start()

    def _await_death(self, host: Any) -> None:
        try:
            ray.get(host.stay.remote())
        except ray.exceptions.RayError as error:
            with self._lock:
                if host not in self._hosts:
                    return
                index = self._hosts.index(host)
                self._hosts[index] = self._replacement(index)
            self._end_generation(f"expert host {index} died ({str(error).splitlines()[0]})")

    def _replacement(self, index: int) -> Any:
        spare, self._spare = self._spare, None
        host = spare if spare is not None else self._new_host(index)
        self._watch(host)
        return host

    def keep_spare(self) -> None:
        """Start a process that stands by for a host that dies; on CPUs only, a GPU has no second owner."""
        with self._lock:
            if self._spare is None and not self._gpus:
                self._spare = self._made({"num_cpus": 0, "max_concurrency": 8})

    # -- generations --------------------------------------------------------------------------------------

    def join(
        self, *, gang: int, rank: int, workers: int, shapes: list[dict[str, Any]], rules: dict[str, Any]
    ) -> dict[str, Any]:
        """A worker comes; returns when all workers of its gang have, with what the next generation is.

        Args:
            gang: a number that the workers of one start by Ray share. After a restart the old ones may still be on
                their way here; they do not count.

        Raises:
            RunError: they do not come in time, or others have come in their place.
        """
        ends = time.monotonic() + JOIN_S
        with self._lock:
            generation = self._open(gang)
            self._waiting[generation].add(rank)
            if len(self._waiting[generation]) == workers:
                layers = [LayerShape.from_json(shape) for shape in shapes]
                self._begin(generation, workers, layers, PlacementRules.from_json(rules))
                self._lock.notify_all()
            while generation not in self._joined:
                if generation in self._lost:
                    raise StateLost(self._lost[generation])
                if not self._lock.wait(timeout=max(0.0, ends - time.monotonic())) and time.monotonic() >= ends:
                    raise RunError(f"only {len(self._waiting[generation])} of {workers} workers came within {JOIN_S} s")
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
                self._lock.notify_all()
            self._generation += 1
            self._waiting[self._generation] = set()
        return self._generation

    def _begin(self, generation: int, workers: int, shapes: list[LayerShape], rules: PlacementRules) -> None:
        if self._placement is None:
            hosts = [HostSpec(host, 1.0, None) for host in range(self._number)]
            self._placement = starting_placement(rules, shapes, hosts)
        placement = self._placement
        told = {
            "generation": generation,
            "workers": workers,
            "hosts": self._number,
            "address": self._address,
            "interface": "lo" if self._loopback else self._interface,
            "device": self._device,
            "placement": placement.to_json(),
        }
        for index, host in enumerate(self._hosts):
            host.join.remote({**told, "host": index})
        self._joined[generation] = told

    def switched(self, placement: dict[str, Any]) -> None:
        """Experts have moved: the next generation begins with this placement."""
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
            self._lock.notify_all()

    def _end_locked(self, reason: str) -> None:
        if self._generation in self._lost:
            return
        self._lost[self._generation] = reason
        for host in self._hosts:
            host.abort.remote(reason)

    def watch(self, generation: int) -> str:
        """Returns when the generation is over, with the reason: workers poll it in a thread."""
        with self._lock:
            while generation not in self._lost:
                self._lock.wait(timeout=5.0)
            return self._lost[generation]


def _open_store(*, loopback: bool) -> tuple[Any, tuple[str, int]]:
    """The store of all generations; on loopback alone where the cluster is this machine."""
    address = LOOPBACK if loopback else ray.util.get_node_ip_address()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(1024)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, (address, port)
