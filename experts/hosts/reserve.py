"""Starts the expert hosts of a run on the driver: reserves their places before the workers', and records them."""

from __future__ import annotations

import threading
import time
from typing import Any

from experts.exchange.membership import ColocatedConnection, Connection
from experts.hosts.host import ProcessLimits
from experts.hosts.reservation import Begin, Bundle, Request, Reservation
from raytrain.config.sections import RetryConfig
from raytrain.execution.telemetry import HostTelemetry
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.plan.room import TYPE_SHARE
from raytrain.plan.rules.hosts import kinds_of_hosts, separate_hosts
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import event

#: Seconds between two questions to the directory.
ASK_EVERY_S = 2.0


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

    @property
    def reserved(self) -> bool:
        """Whether the hosts hold places in a cluster that other runs may wait for."""
        return self._reservation is not None

    def workers_started(self) -> None:
        """The workers have their places."""
        if self._reservation is not None:
            self._reservation.end_turn()

    def on_node(self, node: str) -> list[int]:
        """The hosts that were last known to be on the node with this id."""
        return [host for host, place in self._nodes.items() if place == node]

    def changes(self) -> list[str]:
        """Lines about hosts that do not respond, or do again; never waits for an answer."""
        import ray
        import ray.exceptions

        now = time.monotonic()
        if self._directory is None or now - self._asked_at < ASK_EVERY_S:
            return []
        self._asked_at = now
        if self._asked is None:
            self._asked = self._directory.report.remote()
        if not ray.wait([self._asked], timeout=0)[0]:
            return []
        asked, self._asked = self._asked, None
        try:
            nodes, lines = ray.get(asked)
        except ray.exceptions.RayError:  # the workers learn of it too, and end with the reason
            return []
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
    """Start the owners of the experts, before the workers take the machines.

    Args:
        local: the cluster is this machine alone, and all connections stay on loopback.
        retry: the limits of waiting for hosts.
        begin: called with what is awaited while the cluster has no room.
        limits: of each host's process; None for none.
        telemetry: of the nodes that only hosts are on; None for none.

    """
    hosts = _value(plan.hosts)
    if hosts in ("none", 0):
        return HostsOfRun(None)
    if hosts == "colocated":
        dtype = str(plan.precision.candidates[0])
        device, shared = _value(plan.device), plan.per_gpu > 1
        return HostsOfRun(ColocatedConnection(run.path, interface, device, dtype, through_host=shared))
    reservation = None if local else Reservation(request_of(plan, run.path), begin=begin)
    begin("starting the expert hosts")
    return _start(
        plan, run, local=local, interface=interface, retry=retry, reservation=reservation, limits=limits,
        telemetry=telemetry,
    )  # fmt: skip


def _start(
    plan: Plan,
    run: RunFolder,
    *,
    local: bool,
    interface: str | None,
    retry: RetryConfig,
    reservation: Reservation | None,
    limits: ProcessLimits | None,
    telemetry: HostTelemetry | None,
) -> HostsOfRun:
    """Have the directory start the hosts while the workers start."""
    import ray
    import ray.exceptions

    from cluster.placement import on_this_node
    from experts.hosts.connection import HostConnection
    from experts.hosts.directory import ExpertDirectory
    from experts.member.speed import recorded_speeds

    number, on_gpu = len(kinds_of_hosts(_value(plan.hosts))), _value(plan.device) == "cuda"
    threads = int(_value(plan.threads) or 1)
    concurrency = 2 * int(_value(plan.workers)) + 4 * number + 8
    options = {"num_cpus": 0, "max_concurrency": concurrency, "scheduling_strategy": on_this_node()}
    actor: Any = ray.remote(ExpertDirectory)
    directory = actor.options(**options).remote(
        hosts=number, threads=threads, gpus=plan.gpu_share if on_gpu else 0, loopback=local, interface=interface,
        group=None if reservation is None else reservation.group, host_wait_s=retry.host_wait_s,
        host_silence_s=retry.host_silence_s, dtype=str(plan.precision.candidates[0]), speeds=recorded_speeds(run.path),
        limits=limits, telemetry=telemetry,
    )  # fmt: skip
    directory.start.remote()
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


def _value(choice: Any) -> Any:
    assert isinstance(choice, Resolved)
    return choice.value


def request_of(plan: Plan, run: str = "", *, workers: int | None = None) -> Request:
    """What expert hosts and workers of a plan, or so many workers, need of a cluster; `run` is the path of the run."""
    from raytrain.execution.trainer import accelerator_type, workers_need

    gpu, threads = plan.gpu_share if _value(plan.device) == "cuda" else 0, int(_value(plan.threads) or 1)
    worker, kind = workers_need(plan, 1).each, accelerator_type(plan, local=False)
    kinds = kinds_of_hosts(_value(plan.hosts)) if separate_hosts(plan.hosts) else []
    return Request(
        # a host without a type of its own is on the GPUs that scale.accelerator names, as the workers are
        hosts=[_bundle(own or kind, gpu=gpu, threads=threads) for own in kinds],
        workers=[dict(worker) for _ in range(workers or int(_value(plan.workers)))],
        strategy=_value(plan.placement),
        name=f"the run {run}",
    )


def _bundle(kind: str | None, *, gpu: float, threads: int) -> Bundle:
    """Resources of one host; a node has one unit of the resource that names its accelerator type."""
    if not gpu:
        return {"CPU": threads}
    return {"GPU": gpu} if kind is None else {"GPU": gpu, f"accelerator_type:{kind}": TYPE_SHARE}
