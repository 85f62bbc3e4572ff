"""The cluster while workers train: the nodes and daemons that it has lost, and the room that it has."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from cluster.network import answers
from jobs.driver.screen.progress import Clock
from raytrain.errors import ClusterLost, InputError
from raytrain.execution import trainer
from raytrain.execution.ray_private import autoscales, controller_pid, dead_daemons
from raytrain.plan.room import Need, missing, short_of

#: Seconds between two looks at a cluster.
LOOK_EVERY_S = 2.0
#: The head may be unreachable for this long; Ray itself ends this process after 60 s.
HEAD_SILENT_S = 40.0


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

    def describe(self, nodes: Sequence[Mapping[str, Any]]) -> str:
        """What was lost and what happens next, in one line.

        Args:
            nodes: `ray.nodes()`. What they have in all is said: what is free changes as the lost workers end.
        """
        what = [f"rank {rank}" for rank in self.ranks] + [f"expert host {host}" for host in self.hosts]
        ran = f"{', '.join(what)} ran there" if what else "nothing of this run was there"
        alive = [node["Resources"] for node in nodes if node["Alive"]]
        amounts = {name: sum(one.get(name, 0.0) for one in alive) for name in ("CPU", "GPU")}
        have = ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount) or "no CPU"
        if self.ranks:
            after = f"all workers restart from the latest checkpoint on the other nodes, which have {have} in all"
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

    Attributes:
        controller: process id of Ray Train's controller, once it was seen.
        looked_now: the last call looked at the nodes.
    """

    def __init__(self, *, local: bool, clock: Clock = time.monotonic) -> None:
        self._local, self._clock = local, clock
        self.controller: int | None = None
        self.looked_now = False
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
        self.looked_now = now - self._looked >= LOOK_EVERY_S
        if not self.looked_now:
            return {}
        self._looked = now
        if self._local:
            self.find_controller()
            return {}
        head = ray.get_runtime_context().gcs_address
        self.looked_now = answers(head)
        if not self.looked_now:  # a call to it would wait
            if now - self._answered >= HEAD_SILENT_S:
                raise ClusterLost(f"the head of the cluster at {head} does not answer")
            return {}
        self._answered = now
        self.find_controller()
        return self.compare(ray.nodes())

    def find_controller(self) -> int | None:
        """The process id of Ray Train's controller; asks Ray only until it is known."""
        self.controller = self.controller or controller_pid()
        return self.controller

    def compare(self, nodes: list[dict[str, Any]]) -> dict[str, str]:
        """Node id -> address of the nodes that were alive at the last call and are not in `nodes` (`ray.nodes()`)."""
        alive = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}
        lost = {node: address for node, address in self._alive.items() if node not in alive}
        self._alive = alive
        return lost


def workers_wait_for_room() -> bool:
    """Whether the cluster has not placed the workers that Ray Train starts for this process."""
    return trainer.waits_for_room(ray.util.placement_group_table(), ray.get_runtime_context().get_job_id())


def check_room(needs: Sequence[Need]) -> str:
    """Refuse processes that the nodes of the connected cluster never have room for (InputError); a line where an
    autoscaler may add nodes, "" where there may be room."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    found, text = short_of(needs, nodes), missing(needs, nodes, are="there are")
    if found is None:
        return ""
    if autoscales():
        return f"waiting for nodes that the autoscaler may add: {text}\n"
    need, there = found
    raise InputError(
        need.key, got=need.many, expected=f"at most {there} ({text})",
        remedy=f"lower it{'' if 'GPU' in need.each else ' or scale.threads'}, or add nodes",
    )  # fmt: skip
