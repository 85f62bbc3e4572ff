"""The places of a divided model's replicas in a cluster: each replica has room for all of its processes, or none."""

from __future__ import annotations

import itertools
import time
from typing import Any

from raytrain.errors import RunError, mismatch
from raytrain.plan.room import TYPE_SHARE

#: Seconds that replicas wait for room in a cluster; after them the job gives back what it holds.
ROOM_S = 120.0
POLL_S = 0.2


class ReplicaPlaces:
    """One placement group for each replica, with a bundle for each of its processes.

    Stages that Ray places one by one could leave two replicas with half of their stages each, which wait for each
    other. Replicas beyond the first that find no room are placed as soon as there is some.

    Args:
        stages: of a replica, or other processes.
        cpus, gpus, accelerator: Ray resources of each, and the type of its GPU.
        at_once: replicas that must have room before the job begins.
        hosts: of experts, which all processes of a replica but the first are; 0 where they are stages.
    Raises:
        RunError: the cluster has no room for them within `ROOM_S`.
    """

    def __init__(
        self, replicas: int, stages: int, *, cpus: float, gpus: float, accelerator: str | None, at_once: int,
        hosts: int = 0,
    ) -> None:  # fmt: skip
        from ray.util.placement_group import placement_group

        self._stages, self._at_once, self._hosts = stages, at_once, hosts
        self._bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        kind = {} if accelerator is None else {f"accelerator_type:{accelerator}": TYPE_SHARE}
        self._groups: list[Any] = []
        try:
            for _ in range(replicas):
                self._groups.append(placement_group([{**self._bundle, **kind}] * stages, strategy="PACK"))
            self._wait()
        except BaseException:
            self.close()
            raise
        self._turns = itertools.cycle(sorted(self._groups, key=lambda group: not _is_placed(group)))

    def _wait(self) -> None:
        ends = time.monotonic() + ROOM_S
        while sum(map(_is_placed, self._groups)) < self._at_once:
            if time.monotonic() > ends:
                raise no_room(self._stages, self._bundle, replicas=self._at_once, hosts=self._hosts)
            time.sleep(POLL_S)

    def next_first_stage(self) -> dict[str, Any]:
        """Options of the actor that is the first stage of the next replica, those with room first."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(next(self._turns), 0)}

    def close(self) -> None:
        """Give the places back."""
        from ray.util.placement_group import remove_placement_group

        for group in self._groups:
            remove_placement_group(group)


def _is_placed(group: Any) -> bool:
    from ray.util.placement_group import placement_group_table

    return placement_group_table(group)["state"] == "CREATED"


def no_room(stages: int, bundle: dict[str, float], *, replicas: int = 1, hosts: int = 0) -> RunError:
    """The error of stages that were not placed in time: what they need, and what the cluster has.

    Args:
        bundle: the resources of a stage.
        hosts: see `ReplicaPlaces`.
    """
    import ray

    free, have = ray.available_resources(), ray.cluster_resources()
    need = " and ".join(f"{amount * stages * replicas:g} {name}" for name, amount in bundle.items())
    room = " and ".join(f"{free.get(name, 0):g} of {have.get(name, 0):g} {name}" for name in bundle)
    each = f"a worker and {hosts} hosts" if hosts else f"{stages} stages"
    what = f"{replicas} replicas of {each}" if replicas > 1 else each
    key = "experts.hosts" if hosts else "infer.stages"
    return RunError(
        mismatch(
            key, got=f"{what}, which need {need}",
            expected=f"as much free in the cluster within {ROOM_S:g} s, where {room} are free",
            remedy=f"lower {key}, wait until other jobs end, or add nodes",
        )
    )  # fmt: skip
