"""Starts expert hosts: on the driver, with their places reserved before the workers'; or for one inference worker.

Called by `jobs.driver.watch` before the workers start, and by an inference worker that needs hosts of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import ray.exceptions
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group

from cluster.ray_runtime import on_this_node
from experts.config import LayerShape
from experts.exchange.membership import ColocatedConnection, Connection, Membership
from experts.exchange.rebalancer import recorded_speeds
from experts.hosts.directory import ExpertDirectory
from experts.hosts.generation import HostConnection, join_directory
from experts.hosts.host import ProcessLimits
from experts.placement.policy import PlacementRules
from raytrain.config.sections import RetryConfig
from raytrain.execution.ray_private import free_by_node
from raytrain.execution.telemetry import HostTelemetry
from raytrain.plan.expert_hosts import kinds_of_hosts, separate_hosts
from raytrain.plan.plan import Plan
from raytrain.plan.room import TYPE_SHARE, Need, missing
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event

# ---------------------------------------------------------------- reservation
# Reserves a cluster for a run with expert hosts: hosts and workers together, one run at a time.

#: Name of the actor that stands for the turn; Ray lets one process create it, and ends it with that process's driver.
TURN, NAMESPACE = "reservation-turn", "raytrain"
#: Seconds between two attempts to take the turn, or to reserve.
RETRY_S = 1.0
#: With its hosts' places but no room for its workers, a run waits this long; then it gives the places back.
GIVE_BACK_S = 60.0
ANSWER_S = 5.0
Begin = Callable[..., None]
"""`Activity.begin(what, missing=...)`: what the driver waits for."""
Bundle = dict[str, float]


@dataclass(frozen=True)
class Request:
    """What a run reserves: the resources of each host, spread over the nodes, and of each worker, by `strategy`."""

    hosts: list[Bundle]
    workers: list[Bundle]
    strategy: str
    name: str

    @property
    def needs(self) -> list[Need]:
        of = (("experts.hosts", "expert host", self.hosts), ("scale.workers", "worker", self.workers))
        alike = ((key, who, Counter(tuple(one.items()) for one in bundles)) for key, who, bundles in of)
        return [Need(key, who, many, dict(one)) for key, who, found in alike for one, many in found.items()]


class ReservationTurn:
    """Held by the one run that reserves now; an actor on its driver's node, which dies with the driver."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def holder(self) -> str:
        return self._holder


def take_turn(holder: str, *, begin: Begin) -> Any:
    """Wait until no other run of this cluster reserves; returns the actor that stands for the turn."""
    waiting = False
    while True:
        options = {"name": TURN, "namespace": NAMESPACE, "num_cpus": 0, "scheduling_strategy": on_this_node()}
        try:
            actor: Any = ray.remote(ReservationTurn)
            turn = actor.options(**options).remote(holder)
            ray.get(turn.holder.remote())
            return turn
        except ValueError:  # another run has created it
            if not waiting:
                begin(f"waiting while {_holder()} reserves")
                waiting = True
        except ray.exceptions.RayActorError:  # ended before it started
            pass
        time.sleep(RETRY_S)


def _holder() -> str:
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        turn = ray.get_actor(TURN, namespace=NAMESPACE)
        return str(ray.get(turn.holder.remote(), timeout=ANSWER_S))
    return "another run"


class Reservation:
    """The places of a run's hosts, and its turn until the workers have theirs.

    Attributes:
        group: placement group with one bundle for each host.
    """

    def __init__(self, request: Request, *, begin: Begin) -> None:
        self._turn = take_turn(request.name, begin=begin)
        try:
            self.group = _reserve(request, begin=begin)
        except BaseException:
            self.end_turn()
            raise

    def end_turn(self) -> None:
        """The workers have their places: another run may reserve."""
        turn, self._turn = self._turn, None
        if turn is not None:
            ray.kill(turn)

    def close(self) -> None:
        self.end_turn()
        remove_placement_group(self.group)


def _reserve(request: Request, *, begin: Begin) -> Any:
    """The hosts' placement group, once there is room for the workers too; Ray Train reserves that room itself."""
    begin("waiting for room in the cluster", missing=lambda: missing(request.needs, free_by_node()))
    while True:
        hosts = placement_group(request.hosts, strategy="SPREAD")
        workers = placement_group(request.workers, strategy=request.strategy)
        ready = False
        try:
            ready = _both(hosts, workers)
        finally:  # also after a signal
            remove_placement_group(workers)
            if not ready:
                remove_placement_group(hosts)
        if ready:
            return hosts
        time.sleep(RETRY_S)


def _both(hosts: Any, workers: Any) -> bool:
    """Whether both groups are ready; False if the workers' is not `GIVE_BACK_S` after the hosts'."""
    while not hosts.wait(RETRY_S):
        continue
    ends = time.monotonic() + GIVE_BACK_S
    while not workers.wait(RETRY_S):
        if time.monotonic() > ends:
            return False
    return True


# ---------------------------------------------------------------- reserve

#: Seconds between two questions to the directory.
ASK_EVERY_S = 2.0
#: Ray declares a node dead some time after its processes died. A host of it may have started on another node by then.
LEFT_S = 60.0


class HostsOfRun:
    """What the driver knows of a run's expert hosts. Without hosts, every method does nothing.

    Attributes:
        connection: how the workers reach the owners of the experts; None where every worker holds all experts.
    """

    def __init__(
        self, connection: Connection | None, *, directory: Any = None, reservation: Reservation | None = None
    ) -> None:
        self.connection = connection
        self._directory, self._reservation = directory, reservation
        self._asked: Any = None
        self._asked_at = time.monotonic()
        self._nodes: dict[int, str] = {}
        self._left: dict[int, tuple[str, float]] = {}  # host -> (its node before this one, when it was seen to change)

    @property
    def reserved(self) -> bool:
        """Whether the hosts hold places in a cluster that other runs may wait for."""
        return self._reservation is not None

    def workers_started(self) -> None:
        if self._reservation is not None:
            self._reservation.end_turn()

    def on_node(self, node: str) -> list[int]:
        """The hosts that are on the node with this id, or were there until `LEFT_S` ago."""
        since = time.monotonic() - LEFT_S
        left = [host for host, (place, when) in self._left.items() if place == node and when > since]
        return sorted({*left, *(host for host, place in self._nodes.items() if place == node)})

    def changes(self) -> list[str]:
        """Lines about hosts that do not respond, or do again; never waits for an answer."""
        now = time.monotonic()
        if self._directory is None:
            return []
        if self._asked is None and now - self._asked_at >= ASK_EVERY_S:
            self._asked, self._asked_at = self._directory.report.remote(), now
        if self._asked is None or not ray.wait([self._asked], timeout=0)[0]:
            return []
        asked, self._asked = self._asked, None
        try:
            nodes, lines = ray.get(asked)
        except ray.exceptions.RayError:  # the workers learn of it too, and end with the reason
            return []
        self._left |= {host: (old, now) for host, old in self._nodes.items() if nodes.get(host, old) != old}
        self._nodes.update(nodes)
        return lines

    def close(self) -> None:
        """End the hosts, and give their places back."""
        if self.connection is not None:
            self.connection.close()
        if self._reservation is not None:
            self._reservation.close()


def start_hosts(
    plan: Plan, run: RunFolder, *, local: bool, interface: str | None, retry: RetryConfig, begin: Begin,
    limits: ProcessLimits | None = None, telemetry: HostTelemetry | None = None,
) -> HostsOfRun:  # fmt: skip
    """Start the owners of the experts, before the workers take the machines; the directory starts the hosts meanwhile.

    Args:
        local: the cluster is this machine alone, and all connections stay on loopback.
        retry: the limits of waiting for hosts.
        begin: called with what is awaited while the cluster has no room.
        limits: of each host's process; None for none.
        telemetry: of the nodes that only hosts are on; None for none.
    """
    hosts = plan.hosts.value_or(None)
    if hosts in ("none", 0):
        return HostsOfRun(None)
    if hosts == "colocated":
        dtype = str(plan.precision.candidates[0])
        device, shared = plan.device.value_or(None), plan.per_gpu > 1
        return HostsOfRun(ColocatedConnection(run.path, interface, device, dtype, through_host=shared))
    reservation = None if local else Reservation(request_of(plan, run.path), begin=begin)
    begin("starting the expert hosts")
    number, on_gpu = len(kinds_of_hosts(hosts)), plan.device.value_or(None) == "cuda"
    threads = int(plan.threads.value_or(None) or 1)
    directory = _start_directory(
        2 * int(plan.workers.value_or(None)) + 4 * number + 8, hosts=number, threads=threads,
        gpus=plan.gpu_share if on_gpu else 0, loopback=local, interface=interface, retry=retry,
        group=None if reservation is None else reservation.group, dtype=str(plan.precision.candidates[0]),
        speeds=recorded_speeds(run.path), limits=limits, telemetry=telemetry,
    )  # fmt: skip
    began = time.perf_counter()

    def record() -> None:
        try:
            ready = ray.get(directory.ready_hosts.remote())
        except ray.exceptions.RayError:  # the workers wait for the hosts, and end with the reason
            return
        run.append_event(event("expert_hosts", hosts=ready, seconds=time.perf_counter() - began, threads=threads))

    threading.Thread(target=record, daemon=True, name="expert-hosts").start()
    connection = HostConnection(directory=directory, run_path=run.path)
    return HostsOfRun(connection, directory=directory, reservation=reservation)


def _start_directory(concurrency: int, *, retry: RetryConfig, **named: Any) -> Any:
    """Start a directory on this node, and have it start its hosts; arguments as `ExpertDirectory`."""
    options = {"num_cpus": 0, "max_concurrency": concurrency, "scheduling_strategy": on_this_node()}
    actor: Any = ray.remote(ExpertDirectory)
    limits = {"host_wait_s": retry.host_wait_s, "host_silence_s": retry.host_silence_s}
    directory = actor.options(**options).remote(**named, **limits)
    directory.start.remote()
    return directory


def request_of(plan: Plan, run: str = "", *, workers: int | None = None) -> Request:
    """What expert hosts and workers of a plan, or so many workers, need of a cluster; `run` is the path of the run."""
    from raytrain.execution.trainer import accelerator_type, workers_need

    gpu, threads = plan.gpu_share if plan.device.value_or(None) == "cuda" else 0, int(plan.threads.value_or(None) or 1)
    worker, kind = workers_need(plan, 1).each, accelerator_type(plan, local=False)
    kinds = kinds_of_hosts(plan.hosts.value_or(None)) if separate_hosts(plan.hosts) else []
    return Request(
        # a host without a type of its own is on the GPUs that scale.accelerator names, as the workers are
        hosts=[_bundle(own or kind, gpu=gpu, threads=threads) for own in kinds],
        workers=[dict(worker) for _ in range(workers or int(plan.workers.value_or(None)))],
        strategy=plan.placement.value_or(None),
        name=f"the run {run}",
    )


def _bundle(kind: str | None, *, gpu: float, threads: int) -> Bundle:
    """Resources of one host; a node has one unit of the resource that names its accelerator type."""
    if not gpu:
        return {"CPU": threads}
    return {"GPU": gpu} if kind is None else {"GPU": gpu, f"accelerator_type:{kind}": TYPE_SHARE}


# ---------------------------------------------------------------- inference


@dataclass(eq=False)
class ReplicaConnection:
    """An inference worker's connection; implements `experts.exchange.membership.Connection`.

    In training the workers of a run share hosts, and call every operation together. Workers that answer take rows at
    their own pace, so each has hosts of its own, like the stages of a divided model. The directory is started by the
    first `join` and kept by later ones: after the death of a host only that one is started again. It ends with this
    process, which owns it, and its hosts with it.

    Its process must be the actor of bundle 0 of a placement group, which has a bundle for each host after it. The
    attributes are those of `ExpertDirectory`; `folder` is the job's.
    """

    trains = False

    hosts: int
    threads: int
    gpus: int
    loopback: bool
    interface: str | None
    dtype: str
    limits: ProcessLimits
    retry: RetryConfig
    folder: str
    _directory: Any = field(default=None, init=False)

    def close(self) -> None:
        if self._directory is not None:
            ray.kill(self._directory)
            self._directory = None

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[Any, Membership]:
        """See `Connection`; nothing is trained, and experts stay where they are."""
        if self._directory is None:
            self._directory = _start_directory(
                4 * self.hosts + 10, hosts=self.hosts, threads=self.threads, gpus=self.gpus,
                loopback=self.loopback, interface=self.interface, group=get_current_placement_group(),
                first_bundle=1, retry=self.retry, dtype=self.dtype, limits=self.limits,
            )  # fmt: skip
        rules = replace(rules, every=None, trains=False)
        return join_directory(self._directory, shapes, rules, rank=0, workers=1, run_path=self.folder)
