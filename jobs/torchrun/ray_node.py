"""One node of a Ray cluster that lives as long as this process, the head or one that joins it.

`ray start` would leave its daemons running if this process is killed, and refuses to join a cluster on loopback.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cluster.devices.inventory import local_inventory
from cluster.environment import LOOPBACK, ray_environment, variables_kept_from_ray
from cluster.private_ray import last_words
from raytrain.errors import InputError, RunError, first_line

STORE_FRACTION = 0.3
"""Of a node's memory, for Ray's object store: Ray's own default."""
OF_ANOTHER_CLUSTER = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_NAMESPACE", "RAY_REDIS_ADDRESS")


@dataclass(frozen=True)
class NodeShare:
    """What a node of this process may use of the machine.

    Attributes:
        processes: of training, on this node.
        nodes_here: nodes on this machine, which share its cores and its memory.
    """

    processes: int
    nodes_here: int = 1


def find_token() -> None:
    """Check that there is the token by which the nodes of a cluster know each other.

    Raises:
        InputError: there is none.
    """
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    found = Path(path).is_file() if path else (Path.home() / ".ray" / "auth_token").is_file()
    if not (os.environ.get("RAY_AUTH_TOKEN") or found):
        raise InputError(
            "RAY_AUTH_TOKEN_PATH",
            got="no token" if not path else f"{path}, which is no file",
            expected="the token of Ray that all nodes share: whoever reaches a node without one can run code on it",
            remedy="`ray get-auth-token --generate` writes ~/.ray/auth_token; copy that file to every node",
        )


def set_environment(*, loopback: bool, token_path: str | None) -> None:
    """Set the variables that Ray reads when it is imported, in the process of a node and in all that it starts.

    Args:
        loopback: every port stays on 127.0.0.1.
        token_path: file of the token; None: where the user has put it (`find_token`).
    """
    for name in OF_ANOTHER_CLUSTER:
        os.environ.pop(name, None)
    for name, value in ray_environment(local_cluster=True, quiet=True).items():
        if loopback or name not in LOOPBACK:
            os.environ.setdefault(name, value)
    os.environ["RAY_AUTH_MODE"] = "token"
    if token_path is not None:
        os.environ["RAY_AUTH_TOKEN_PATH"] = token_path
        os.environ.pop("RAY_AUTH_TOKEN", None)


@contextlib.contextmanager
def ray_node(*, folder: str, address: str, share: NodeShare, head: str | None = None) -> Iterator[str]:
    """Start a node, and end its processes at the end; called in the main thread, after `set_environment`.

    The daemons have process groups of their own, so that a signal to the group of this process does not end them before
    the workers could save. The kernel ends them if this process is killed.

    Args:
        folder: a private folder for Ray's files.
        address: this machine's, at which the other nodes reach it.
        share: what it declares to Ray.
        head: `HOST:PORT` of the head to join; None starts the head.

    Returns:
        `HOST:PORT` of the head.

    Raises:
        RunError: a daemon did not start, or the head refused this node.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    from raytrain.execution.ray_private import only_needed_daemons, own_process_groups, reread_environment

    reread_environment()
    (here,) = local_inventory().nodes
    memory = here.memory_bytes // share.nodes_here
    parameters = RayParams(
        gcs_address=head,
        node_ip_address=address,
        num_cpus=max(share.processes, here.cpus // share.nodes_here),
        num_gpus=min(share.processes, len(here.devices)),
        memory=int(memory * (1 - STORE_FRACTION)),
        object_store_memory=int(memory * STORE_FRACTION),
        min_worker_port=0,
        max_worker_port=0,
        include_dashboard=False,
        include_log_monitor=False,  # pyright: ignore[reportArgumentType]  (annotated as str)
        dashboard_agent_listen_port=0,
        temp_dir=os.path.join(folder, "r"),
    )
    node = None
    try:
        with variables_kept_from_ray(), own_process_groups(), only_needed_daemons(logs=False):
            node = Node(parameters, head=head is None, shutdown_at_exit=False, spawn_reaper=True)
    except Exception as error:  # Ray raises plain `Exception` too
        what = "start the head" if head is None else f"join the head at {head}"
        words = last_words(os.path.join(folder, "r"))
        raise RunError(f"Ray could not {what} on {address}: {first_line(error)}; {words}") from error
    try:
        yield str(node.gcs_address)
    finally:
        started = _descendants({one.process.pid for many in node.all_processes.values() for one in many})
        node.kill_all_processes(check_alive=False, allow_graceful=True, wait=True)
        _end(started)


def _descendants(pids: set[int]) -> set[tuple[int, str]]:
    """(pid, start time) of all processes below these; Ray's agents outlive their raylet by up to a minute."""
    found, parents = set[tuple[int, str]](), pids
    while parents:
        children = {row for row in map(_stat, Path("/proc").glob("[0-9]*")) if row is not None and row[1] in parents}
        parents = {pid for pid, _, _ in children} - {pid for pid, _ in found}
        found |= {(pid, began) for pid, _, began in children}
    return found


def _stat(entry: Path) -> tuple[int, int, str] | None:
    """(pid, parent, start time) of a process; None where it has exited."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(entry.name), int(fields[1]), fields[19]


def _end(processes: set[tuple[int, str]]) -> None:
    """Kill those of them that are still there."""
    for pid, began in processes:
        row = _stat(Path(f"/proc/{pid}"))
        if row is not None and row[2] == began:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
