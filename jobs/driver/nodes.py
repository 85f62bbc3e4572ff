"""What the driver watches in Ray itself: its daemons, the head's address, and the nodes of a cluster."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from raytrain.errors import ClusterLost
from raytrain.execution.ray_private import dead_daemons

Clock = Callable[[], float]

#: Seconds between two looks at a cluster.
LOOK_EVERY_S = 2.0
#: The head may be unreachable for this long; Ray itself ends this process after 60 s.
HEAD_SILENT_S = 40.0
CONNECT_S = 2.0


@dataclass(frozen=True)
class LostNode:
    """A node that Ray reports as dead, and what ran there.

    Attributes:
        address: of the node.
        ranks: workers of this run.
        hosts: expert hosts of this run.
    """

    address: str
    ranks: list[int]
    hosts: list[int]

    def describe(self, free: Mapping[str, float]) -> str:
        """What was lost and what happens next, in one line.

        Args:
            free: resources that the other nodes have free.
        """
        what = [f"rank {rank}" for rank in self.ranks] + [f"expert host {host}" for host in self.hosts]
        ran = f"{', '.join(what)} ran there" if what else "nothing of this run was there"
        have = ", ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in free) or "nothing"
        if self.ranks:
            after = f"all workers restart from the latest checkpoint on the other nodes, of which {have} is free"
        elif self.hosts:
            after = "a new host is started, or the other hosts take its experts (retry.host_wait_s)"
        else:
            after = "the run continues"
        return f"node {self.address} was lost: {ran}; {after}"


class ClusterWatch:
    """Looks at Ray's own processes and nodes from the driver, every `LOOK_EVERY_S` seconds.

    Args:
        local: the cluster is private to this command: its daemons are children of this process.
        clock: seconds; replaced in tests.
    """

    def __init__(self, *, local: bool, clock: Clock = time.monotonic) -> None:
        self._local, self._clock = local, clock
        self._looked = self._answered = clock()
        self._alive: dict[str, str] = {}

    def lost_nodes(self) -> dict[str, str]:
        """Node id -> address of the nodes that died since the last call.

        Raises:
            ClusterLost: a daemon of the private cluster died, or the head has not answered for `HEAD_SILENT_S`.
        """
        dead = dead_daemons()
        if dead:
            raise ClusterLost(f"Ray's process {' and '.join(dead)} died")
        now = self._clock()
        if self._local or now - self._looked < LOOK_EVERY_S:
            return {}
        self._looked = now
        head = ray.get_runtime_context().gcs_address
        if not answers(head):  # a call to it would wait
            if now - self._answered >= HEAD_SILENT_S:
                raise ClusterLost(f"the head of the cluster at {head} does not answer")
            return {}
        self._answered = now
        return self.compare(ray.nodes())

    def compare(self, nodes: list[dict[str, Any]]) -> dict[str, str]:
        """Node id -> address of the nodes that were alive at the last call and are not in `nodes` (`ray.nodes()`)."""
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        lost = {node: address for node, address in self._alive.items() if node not in alive}
        self._alive = alive
        return lost


def answers(address: str) -> bool:
    """Whether something accepts connections at `host:port`."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, ValueError), socket.create_connection((host.strip("[]"), int(port)), CONNECT_S):
        return True
    return False


def free_resources() -> dict[str, float]:
    """What the cluster has free now."""
    return {name: float(amount) for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
