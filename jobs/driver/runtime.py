"""Starts and stops Ray for a command. Driver side."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from cluster.environment import LOOPBACK, ray_environment, restored_environment
from cluster.network import answers, head_problem, loopback_only
from cluster.preflight import is_submitted
from cluster.ray_runtime import private_folder, private_ray
from jobs import torchrun
from jobs.driver.signals import restored_handlers
from raytrain.errors import ClusterLost, InputError, RunError, first_line
from raytrain.execution.ray_start import start_ray, unreachable
from raytrain.plan.choice import Resolved
from raytrain.plan.expert_hosts import separate_hosts
from raytrain.plan.plan import Plan
from raytrain.runs.faults import RAY_FAILED

#: Actors of a run that reserve no CPU: the driver's channel, Ray Train's controller and its meeting point of workers.
RAY_PROCESSES = 3
#: Loggers whose levels a command changes.
RAYS_LOGGERS = ("ray", "ray.train", "ray.tune", "ray.data")
#: Names of threads that call Ray for a command.
CALLING_RAY = ("fit", "tune")
CALL_INIT = "does not work any more, and the connection is shut down; call ray.init again, then resume the run"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to."""

    local: bool  # started by this command, for this command only, on loopback
    address: str
    folder: str  # a private directory of the command
    # once set, no thread may call Ray: it would start another cluster, or end the process
    ended: threading.Event = field(default_factory=threading.Event)


def cluster_address(configured: str | None) -> str:
    """The cluster of torchrun's nodes, else `cluster.address`, else the one this job was submitted to, else "local".

    Returns "connected" if this process (a notebook) is connected to a cluster already: it is used and left running.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return "connected"
    if under_torchrun := os.environ.get(torchrun.CLUSTER):
        return under_torchrun
    if configured:
        return first_that_answers(configured) if "," in configured else configured
    if is_submitted():
        return os.environ.get("RAY_ADDRESS") or "auto"
    return "local"


def first_that_answers(addresses: str) -> str:
    """The first of several addresses (`HOST:PORT,HOST:PORT`) at which a Ray cluster answers."""
    several = [address.strip() for address in addresses.split(",") if address.strip()]
    found = next((one for one in several if re.fullmatch(r"[^/]+:\d+", one) and not head_problem(one)), None)
    if found is not None:
        return found
    hosts = {one.rpartition(":")[0] for one in several}
    remedy = "the other nodes join it with `ray start --address=HEAD:6379`; see cluster/README.md"
    if len(hosts) == 1 and len(several) > 1:
        remedy = (
            f"these are {len(several)} ports of one host, {hosts.pop()}: where they are tunnels to as many machines, "
            f"only the port of the head's own address counts; {remedy}"
        )
    expected = "the address of the head of a running Ray cluster, or several of which one answers"
    raise InputError("cluster.address", got=f"{addresses} (nothing answers there)", expected=expected, remedy=remedy)


def dashboard_url() -> str | None:
    """Where the dashboard of the connected cluster is; None without one."""
    from ray._private import worker

    node = worker._global_node
    url = None if node is None else node.webui_url
    return None if not url else url if "://" in url else f"http://{url}"


def cluster_size(plan: Plan | None) -> tuple[int, int, int]:
    """(CPUs, GPUs, processes that compute) of a private cluster: those that the plan needs, not all of the machine.

    Ray starts a process in advance for each CPU that it is given, so that its own ones (`RAY_PROCESSES`) count.
    """
    if plan is None:
        return RAY_PROCESSES, 0, 0
    assert isinstance(plan.workers, Resolved) and isinstance(plan.device, Resolved)  # never deferred
    processes = int(plan.workers.value) + separate_hosts(plan.hosts)
    gpus = -(-processes // plan.per_gpu) if plan.device.value == "cuda" else 0
    return processes + RAY_PROCESSES, gpus, processes


@contextlib.contextmanager
def connected(address: str, *, num_cpus: int, num_gpus: int, verbose: bool, workers: int = 0) -> Iterator[Cluster]:
    """Connect to `address`, or start a private cluster (`cluster.ray_runtime`) if it is "local"; shut down at the end.

    Call it in the main thread, since Ray ties the cluster's lifetime to the thread that started it.

    Args:
        num_cpus, num_gpus: logical resources that a local cluster declares.
        workers: processes of a local cluster that will compute with torch, which they import in advance.

    Raises:
        InputError: the address cannot be reached.
        RunError: a private cluster did not start, or Ray failed while it was used.
    """
    if address == "connected":
        with restored_environment(), _loggers_restored():
            yield from _already_connected(verbose=verbose)
        return
    with _program_restored(), contextlib.ExitStack() as stack:
        if address == "auto":  # Ray would look for it itself, but not see that a cluster listens on loopback only
            from raytrain.execution.ray_private import running_address

            try:
                address = running_address()
            except ConnectionError as error:
                raise unreachable("auto", "no Ray cluster runs on this machine, and RAY_ADDRESS is not set") from error
        variables = ray_environment(local_cluster=address == "local", quiet=not verbose)
        if loopback_only(address):
            variables |= LOOPBACK
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        options = {"log_to_driver": verbose, "logging_level": "info" if verbose else "error"}
        if address == "local":
            private = stack.enter_context(private_ray(workers=workers))
            private.set_environment(os.environ)
            folder = private.folder
            options |= {"num_cpus": num_cpus, "num_gpus": num_gpus, **private.options}
        else:
            folder = stack.enter_context(private_folder())
        cluster = Cluster(address == "local", address, folder)
        try:
            with restored_handlers():  # Ray puts a handler of SIGTERM in place that exits with 15; every verb has 130
                # imported meanwhile is what the driver needs next; the slowest are Ray Train and pandas
                start_ray(cluster.address, options, folder=cluster.folder, imports="raytrain.execution.trainer")
            from raytrain.execution.ray_private import no_pages_of_daemons  # imports Ray
            from raytrain.execution.trainer import quiet_ray

            if not verbose:
                quiet_ray()
            with _ray_errors_explained(), contextlib.nullcontext() if verbose else no_pages_of_daemons():
                yield cluster
        finally:
            cluster.ended.set()
            with contextlib.suppress(KeyboardInterrupt):  # a second signal: the exit of the process cleans up the rest
                if "ray" in sys.modules:
                    sys.modules["ray"].shutdown()


@contextlib.contextmanager
def _program_restored() -> Iterator[None]:
    """Context manager for a cluster of a command, after which a program can start Ray as if nothing had been.

    A command that was interrupted may leave a thread that still calls Ray. It must not start another cluster.
    """
    with restored_handlers(), _loggers_restored():
        try:
            with restored_environment():
                yield
        finally:
            if "ray" in sys.modules and not sys.modules["ray"].is_initialized():
                from raytrain.execution.ray_private import allow_auto_connect, reread_environment

                reread_environment()
                if any(thread.name in CALLING_RAY for thread in threading.enumerate()):
                    allow_auto_connect(False)


@contextlib.contextmanager
def _loggers_restored() -> Iterator[None]:
    """Context manager after which the loggers of Ray have the levels that the program gave them."""
    before = {name: logging.getLogger(name).level for name in RAYS_LOGGERS}
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def _ray_errors_explained() -> Iterator[None]:
    """Raise errors of Ray itself, which no other layer handled, as one `RunError`."""
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise RunError(
            f"{RAY_FAILED} ({type(error).__name__}: {first_line(error)}). Resume the run, after "
            "starting the cluster again if it has died; --verbose shows Ray's own messages"
        ) from error


def _already_connected(*, verbose: bool) -> Iterator[Cluster]:
    import ray

    from raytrain.execution.trainer import quiet_ray

    if not verbose:
        quiet_ray()
    for name, value in ray_environment(local_cluster=False, quiet=not verbose).items():
        os.environ.setdefault(name, value)  # Ray Train reads its own when it starts a run
    context = ray.get_runtime_context()
    if not answers(context.gcs_address):  # a call to it would wait until Ray ends this process
        ray.shutdown()
        raise ClusterLost(f"the Ray at {context.gcs_address} that this process had connected to {CALL_INIT}")
    loopback = all(node["NodeManagerAddress"].startswith("127.") for node in ray.nodes() if node["Alive"])
    with private_folder() as folder:
        cluster = Cluster(local=loopback, address=context.gcs_address, folder=folder)
        try:
            with _ray_errors_explained():
                yield cluster
        except ClusterLost as error:
            cluster.ended.set()
            ray.shutdown()  # Ray ends a process whose connection is lost, after a minute
            raise ClusterLost(f"{error}: the Ray that this process had connected to {CALL_INIT}") from error
