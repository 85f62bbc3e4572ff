"""Reserves a cluster for a run with expert hosts: hosts and workers together, one run at a time.

Two runs that each hold their hosts and wait for workers would wait forever. So a run takes its turn first, which only
one run of a cluster has at a time; it has its hosts' places and room for its workers, or it holds nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

from cluster.placement import on_this_node
from raytrain.execution.ray_private import free_by_node
from raytrain.plan.room import Need, missing

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
    """What a run reserves.

    Attributes:
        hosts, workers: the resources of each host and of each worker.
        strategy: Ray's placement strategy of the workers; hosts are spread over the nodes.
        name: of the run, for the messages of other runs.
    """

    hosts: list[Bundle]
    workers: list[Bundle]
    strategy: str
    name: str

    @property
    def needs(self) -> list[Need]:
        """The same, for `raytrain.plan.room`."""
        of = (("experts.hosts", "expert host", self.hosts), ("scale.workers", "worker", self.workers))
        alike = ((key, who, Counter(tuple(one.items()) for one in bundles)) for key, who, bundles in of)
        return [Need(key, who, many, dict(one)) for key, who, found in alike for one, many in found.items()]


class ReservationTurn:
    """Held by the one run that reserves now; an actor on its driver's node, which dies with the driver."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def holder(self) -> str:
        """The run that reserves."""
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
        """Give the places back."""
        from ray.util.placement_group import remove_placement_group

        self.end_turn()
        remove_placement_group(self.group)


def _reserve(request: Request, *, begin: Begin) -> Any:
    """The hosts' placement group, once there is room for the workers too; Ray Train reserves that room itself."""
    from ray.util.placement_group import placement_group, remove_placement_group

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
