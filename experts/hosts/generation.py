"""A generation on one member: rendezvous with the others, notice of its end, the way to the directory.

Hosts and workers join through it; a member that dies ends the generation for all, and the next one begins without it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError

from cluster.network import join_network
from experts.config import LayerShape
from experts.exchange.membership import Membership
from experts.placement.policy import PlacementRules
from experts.placement.values import HostSpec, Placement
from experts.transport import RENDEZVOUS_S, JointGroup, abort_groups, gloo, nccl, uses_nccl, with_index
from raytrain.errors import RaytrainError, RunError, StateLost, first_line
from raytrain.runs.faults import Death
from raytrain.train.parallel.collectives import WorkersGroup

# ---------------------------------------------------------------- generation

HOSTS_WAIT_LONGER_S = 10.0
"""Hosts wait this much longer than the workers, so that a failed rendezvous ends with the workers' reason."""
POLL_S = 0.02
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
INTERFACE_HINT = "cluster.interface names the network interface over which all nodes reach each other"
Reason = Callable[[], str | None]
"""Why the generation is over; None while it lives."""


@dataclass(frozen=True)
class GenerationSpec:
    """A generation, as the directory describes it to each member.

    Attributes:
        workers, hosts: number of members of each kind.
        address: host and port of the store.
        interface: of gloo and NCCL; None takes the one by which Ray reaches each member.
        device: "cpu" or "cuda", of the hosts.
        through_host: several members share a GPU, so that rows travel through the host.
        placement: in force at the start.
        specs: of the hosts.
        deaths: of hosts that are not recorded yet; `num_deaths` counts all of the run.
        note: what differs from the generation before, for the record.
    """

    number: int
    workers: int
    hosts: int
    address: tuple[str, int]
    interface: str | None
    device: str
    placement: Placement
    specs: list[HostSpec] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    num_deaths: int = 0
    note: str = ""
    through_host: bool = False

    def title_of(self, rank: int) -> str:
        return f"worker {rank}" if rank < self.workers else f"expert host {rank - self.workers}"


@dataclass(frozen=True)
class MemberPlace:
    """Where a member is: the name of its machine, for messages, what identifies it, also in containers, and the place
    of its GPU on the PCI bus ("" without one)."""

    node: str
    machine: str = ""
    gpu: str = ""

    @classmethod
    def of(cls, device: torch.device) -> MemberPlace:
        """Of this process, whose rows are on `device`."""
        node = os.uname().nodename
        if device.type != "cuda" or torch.version.hip:  # RCCL knows the parts of an AMD GPU as GPUs
            return cls(node)
        about: Any = torch.cuda.get_device_properties(device)
        gpu = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}"
        try:
            return cls(node, BOOT_ID.read_text().strip(), gpu)
        except OSError:
            return cls(node, node, gpu)


def open_group(spec: GenerationSpec, *, rank: int, lost: Reason = lambda: None) -> JointGroup:
    """Open a member's end of the generation's joint group; blocks until all members are connected.

    Args:
        lost: polled while waiting.

    Raises:
        StateLost: the generation ended meanwhile. RunError: a member did not join, cannot be reached, or uses the GPU
            of another.
    """
    if ray.is_initialized():
        join_network(spec.interface, address=ray.util.get_node_ip_address())
    device = with_index(torch.device(spec.device))
    size, limit = spec.workers + spec.hosts, RENDEZVOUS_S + (HOSTS_WAIT_LONGER_S if rank >= spec.workers else 0.0)
    store = connect(spec.address, who=spec.title_of(rank), limit=limit)
    name, nodes = f"generation-{spec.number}", []
    try:
        places = _rendezvous(store, name, spec, own=MemberPlace.of(device), rank=rank, limit=limit, lost=lost)
        nodes = [place.node for place in places]
        if not spec.through_host:
            _refuse_shared_gpus(places, spec)
        return JointGroup(
            store, name=name, rank=rank, size=size, workers=spec.workers, holders=list(range(spec.workers, size)),
            device=device, through_host=spec.through_host, interface=spec.interface, watched=True, lost=lost,
        )  # fmt: skip
    except RuntimeError as error:  # from torch; our own errors are no RuntimeErrors
        reason = lost()
        if reason is not None:
            raise StateLost(reason) from error
        others = ", ".join(f"{spec.title_of(other)} on {node}" for other, node in enumerate(nodes))
        raise RunError(
            f"{spec.title_of(rank)} cannot connect with all others over {spec.interface or 'the default'} "
            f"interface ({first_line(error)}); the members are {others}; {INTERFACE_HINT}"
        ) from error


def open_store(address: str) -> tuple[Any, tuple[str, int]]:
    """Open the store of all generations on this address only; returns it with its host and port."""
    listener = socket.create_server((address, 0), backlog=1024)
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, (address, port)


def connect(address: tuple[str, int], *, who: str, limit: float) -> Any:
    """Open a client of the store. Raises RunError."""
    host, port = address
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit))  # pyright: ignore
    except RuntimeError as error:
        raise RunError(
            f"{who} cannot reach the expert directory at {host}:{port} within {limit:g} s "
            f"({first_line(error)}); {INTERFACE_HINT}"
        ) from error


def _rendezvous(
    store: Any, name: str, spec: GenerationSpec, *, own: MemberPlace, rank: int, limit: float, lost: Reason
) -> list[MemberPlace]:
    """Write this member's place into the store and wait for all others; returns the place of each rank."""
    keys = [f"{name}/place/{other}" for other in range(spec.workers + spec.hosts)]
    ends = time.monotonic() + limit
    store.set(keys[rank], json.dumps(asdict(own)))
    while not store.check(keys):
        reason = lost()
        if reason is not None:
            raise StateLost(reason)
        if time.monotonic() > ends:
            absent = [spec.title_of(other) for other, key in enumerate(keys) if not store.check([key])]
            raise RunError(f"{', '.join(absent)} did not join the other members within {limit:g} s; {INTERFACE_HINT}")
        time.sleep(POLL_S)
    return [MemberPlace(**json.loads(store.get(key))) for key in keys]


def _refuse_shared_gpus(places: Sequence[MemberPlace], spec: GenerationSpec) -> None:
    """NCCL would end with an error of its own in each member: it identifies a GPU by its place in the machine, which
    parts of one GPU share (MIG)."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0":
        return
    found: dict[tuple[str, str], int] = {}
    for rank, place in enumerate(places):
        other = found.setdefault((place.machine, place.gpu), rank)
        if place.gpu and other != rank:
            raise RunError(
                f"{spec.title_of(other)} and {spec.title_of(rank)} use the same GPU {place.gpu} of {place.node}, or "
                "parts of it that MIG made: NCCL needs a GPU for each of them. Use fewer workers or expert hosts, "
                "experts.hosts: colocated, or switch MIG off"
            )


def join_as_worker(
    spec: GenerationSpec, *, rank: int, wait: Callable[[], str]
) -> tuple[JointGroup, WorkersGroup | None, Reason]:
    """Open a worker's groups of one generation, all of which end with it.

    Args:
        wait: blocks until the generation is over; returns why.

    Returns:
        (the joint group, a group of the workers only if there are several, why the generation is over).

    Raises as `open_group`.
    """
    watch = GenerationWatch(wait)
    group = open_group(spec, rank=rank, lost=watch.reason)
    watch.abort_at_end(group.groups, group.mark)
    if spec.workers == 1:
        return group, None, watch.reason
    try:
        payload, flags = _workers_groups(spec, rank=rank, device=group.device, lost=watch.reason)
    except RuntimeError as error:  # all workers were connected just before, so one of them has died
        raise StateLost(watch.reason() or f"the workers could not connect: {first_line(error)}") from error
    watch.abort_at_end([flags] if payload is flags else [payload, flags])  # `Workers` translates their errors
    return group, WorkersGroup(payload, flags, watch.reason), watch.reason


def _workers_groups(spec: GenerationSpec, *, rank: int, device: torch.device, lost: Reason) -> tuple[Any, Any]:
    """(payload, flags) groups over the workers of one generation."""
    store = connect(spec.address, who=spec.title_of(rank), limit=RENDEZVOUS_S)
    name = f"generation-{spec.number}/workers"
    flags = gloo(store, f"{name}/flags", rank, spec.workers, interface=spec.interface, timeout_s=1800.0)
    if not uses_nccl(device) or spec.through_host:  # gloo sums and broadcasts tensors of a GPU through the host itself
        return flags, flags
    payload = nccl(
        store, f"{name}/payload", rank, spec.workers, device=device, interface=spec.interface, timeout_s=1800.0,
        limit_s=RENDEZVOUS_S, collectives=True, lost=lost,
    )  # fmt: skip
    return payload, flags


class GenerationWatch:
    """A member's thread that waits for the end of the generation and then aborts all its groups here.

    Args:
        wait: blocks until the generation is over; returns why.
    """

    def __init__(self, wait: Callable[[], str]) -> None:
        self._lock = threading.Lock()
        self._groups: list[Any] = []
        self._marks: list[Callable[[str], None]] = []
        self._reason: str | None = None

        def watch() -> None:
            reason = wait()
            with self._lock:
                self._reason, groups, marks = reason, list(self._groups), list(self._marks)
            _abort(groups, marks, reason)

        threading.Thread(target=watch, daemon=True, name="generation-watch").start()

    def reason(self) -> str | None:
        """Why the generation is over; None while it lives."""
        return self._reason

    def abort_at_end(self, groups: Sequence[Any], *marks: Callable[[str], None]) -> None:
        """At the end, at once if the generation is already over, give each mark the reason and abort these groups."""
        with self._lock:
            self._groups += groups
            self._marks += marks
            reason = self._reason
        if reason is not None:
            _abort(groups, marks, reason)


def _abort(groups: Sequence[Any], marks: Sequence[Callable[[str], None]], reason: str) -> None:
    """End all of them together: no group has to wait until another has ended."""
    for mark in marks:
        mark(reason)
    abort_groups(groups)


# ---------------------------------------------------------------- connection


@dataclass(frozen=True)
class HostConnection:
    """A worker's connection to the directory; implements `experts.exchange.membership.Connection`."""

    directory: Any
    run_path: str

    def close(self) -> None:
        """End the directory and the hosts that it owns. Explicit, as a handle inside a job would keep it alive."""
        ray.kill(self.directory)

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[Any, Membership]:
        import ray.train

        context = ray.train.get_context()
        rank, workers = context.get_world_rank(), context.get_world_size()
        return join_directory(self.directory, shapes, rules, rank=rank, workers=workers, run_path=self.run_path)


def join_directory(
    directory: Any, shapes: list[LayerShape], rules: PlacementRules, *, rank: int, workers: int, run_path: str
) -> tuple[Any, Membership]:
    """Join the next generation of a directory as one of its workers; see `Connection.join`."""
    try:
        request = directory.join.remote(
            worker_group=group_number(), rank=rank, workers=workers, shapes=shapes, rules=rules
        )
        spec: GenerationSpec = ray.get(request)  # pyright: ignore[reportAssignmentType]
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, RaytrainError) else error) from None

    def await_end() -> str:
        try:
            return str(ray.get(directory.watch.remote(spec.number)))
        except RayError as error:
            return f"the expert directory has died: {type(error).__name__}"

    group, workers_group, lost = join_as_worker(spec, rank=rank, wait=await_end)
    if rank == 0:
        directory.keep_spare.remote()
    return group, Membership(
        generation=spec.number, rank=rank, workers=workers, placement=spec.placement, run_path=run_path,
        workers_group=workers_group, lost=lost, deaths=spec.deaths, note=spec.note, hosts=spec.specs,
        acknowledge_deaths=lambda: directory.acknowledge_deaths.remote(spec.num_deaths),
        switched=lambda placement: directory.switched.remote(spec.number, placement), trains=rules.trains,
    )  # fmt: skip


@cache
def group_number() -> int:
    """A random number that all workers started together share for the life of their processes; rank 0 draws it."""
    drawn = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
    if dist.is_initialized():
        drawn = drawn.to("cuda") if dist.get_backend() == "nccl" else drawn
        dist.broadcast(drawn, src=0)
    return int(drawn.item())
