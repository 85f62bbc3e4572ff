"""The stages of a replica as Ray actors, and the places that Ray reserves for them: all of a replica, or none.

`raytrain.infer.ray_data` makes one replica per group of places.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from raytrain.errors import RunError, StateLost, mismatch
from raytrain.infer.stages.split import StagePipeline, load_stage
from raytrain.infer.stages.stage import ModelStage, StagePass
from raytrain.plan.room import TYPE_SHARE
from raytrain.train.memory.device import limit_device_memory

if TYPE_CHECKING:
    from raytrain.infer.worker import Work


#: Variables that must be set before torch is imported, so that products use no more threads than planned.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
#: Seconds for a stage to answer when another one has ended.
ANSWER_S = 10.0
#: Seconds that replicas wait for room in a cluster; after them the job gives back what it holds.
ROOM_S = 120.0
POLL_S = 0.2


class StageActor:
    def __init__(self, work: Work, stage: int) -> None:
        if work.threads is not None:
            torch.set_num_threads(work.threads)
        self._work, self._number = work, stage
        self._device = torch.device(work.model.device)
        limit_device_memory(self._device, fraction=work.memory_fraction, limit=work.memory_limit)
        self._stage: ModelStage | None = None

    def started(self) -> None:
        """Returns once the process has a place in the cluster."""

    def load(self) -> None:
        assert self._work.split is not None
        self._stage = load_stage(self._work.model, self._work.split, self._number, self._device)

    def run(self, message: StagePass) -> StagePass:
        """Compute a pass, and what the next stage gets, on the CPU."""
        assert self._stage is not None
        try:
            return _without_device(self._stage.run(message))
        except torch.AcceleratorError:  # the context of the device is lost
            os._exit(1)


def remote_pipeline(work: Work, *, cpus: float, gpus: float, accelerator: str | None = None) -> StagePipeline:
    """Start the stages of one replica; they end with this process, and it notices if one of them ends.

    In an actor of a placement group each stage has the bundle of its number. `cpus`, `gpus`, `accelerator`: Ray
    resources of each further stage, and the type of its GPU. Raises StateLost: a stage ended before all were ready.
    RunError: there is no room for them in the cluster."""
    assert work.split is not None
    stages = _FurtherStages(work, cpus=cpus, gpus=gpus, accelerator=accelerator)
    try:
        loaded = stages.load()
        first = load_stage(work.model, work.split, 0, torch.device(work.model.device))
        stages.get(loaded)
    except BaseException:
        stages.end()
        raise
    return StagePipeline([first], stages.run, stages=work.split.plan.stages, threads=work.threads, close=stages.end)


class _FurtherStages:
    """All stages of a replica but the first, each in an actor."""

    def __init__(self, work: Work, *, cpus: float, gpus: float, accelerator: str | None) -> None:
        import ray
        from ray.util.placement_group import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert work.split is not None
        self._bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        variables = {} if work.threads is None else dict.fromkeys(THREADS, str(work.threads))
        # a stage that has lost its neighbours is of no use: the whole replica starts again
        options: Any = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "runtime_env": {"env_vars": variables}}
        options |= {} if accelerator is None else {"accelerator_type": accelerator}
        kind: Any = ray.remote(**options)(StageActor)
        group = get_current_placement_group()
        self._actors: list[Any] = []
        for stage in range(1, work.split.plan.stages):
            place = {} if group is None else {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, stage)}
            self._actors.append(kind.options(**place).remote(work, stage))

    def load(self) -> list[Any]:
        """Wait for the places of all stages; returns what `get` waits for until they have read their tensors."""
        from ray.exceptions import GetTimeoutError

        try:
            self.get([actor.started.remote() for actor in self._actors], timeout=ROOM_S)
        except GetTimeoutError as error:
            raise no_room(len(self._actors), self._bundle) from error
        return [actor.load.remote() for actor in self._actors]

    def run(self, message: StagePass) -> StagePass:
        """Compute a pass in one stage after another; what is between two of them goes there at once."""
        answer: Any = _without_device(message)
        for actor in self._actors:
            answer = actor.run.remote(answer)
        return self.get(answer)

    def get(self, answers: Any, timeout: float | None = None) -> Any:
        """`ray.get`, with our own error of a stage. Raises StateLost: one has ended."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return ray.get(answers, timeout=timeout)
        except RayActorError as error:
            reason = " ".join(str(error).split())
            for number, actor in enumerate(self._actors, start=1):
                try:
                    ray.get(actor.started.remote(), timeout=ANSWER_S)
                except RayActorError as found:
                    reason = f"stage {number} of 0 to {len(self._actors)} ended: {' '.join(str(found).split())}"
                    break
                except GetTimeoutError:
                    continue
            raise StateLost(reason) from error
        except RayTaskError as error:
            raise getattr(error, "cause", None) or error from None

    def end(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)


def _without_device(message: StagePass) -> StagePass:
    """The message with what crosses the cut on the CPU; a model's inputs are there."""
    return message if message.hidden is None else replace(message, hidden=message.hidden.cpu())


# ---------------------------------------------------------------- places


class ReplicaPlaces:
    """One placement group for each replica, with a bundle for each of its processes, which are stages, or a worker and
    its `hosts` of experts.

    Stages that Ray places one by one could leave two replicas with half of their stages each, which wait for each
    other. `at_once` replicas must have room within `ROOM_S` (else RunError); more are placed as soon as there is
    some."""

    def __init__(
        self, replicas: int, stages: int, *, cpus: float, gpus: float, accelerator: str | None, at_once: int,
        hosts: int = 0,
    ) -> None:  # fmt: skip
        from ray.util.placement_group import placement_group

        bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        kind = {} if accelerator is None else {f"accelerator_type:{accelerator}": TYPE_SHARE}
        self._groups: list[Any] = []
        try:
            for _ in range(replicas):
                self._groups.append(placement_group([{**bundle, **kind}] * stages, strategy="PACK"))
            ends = time.monotonic() + ROOM_S
            while sum(map(_is_placed, self._groups)) < at_once:
                if time.monotonic() > ends:
                    raise no_room(stages, bundle, replicas=at_once, hosts=hosts)
                time.sleep(POLL_S)
        except BaseException:
            self.close()
            raise
        self._turns = itertools.cycle(sorted(self._groups, key=lambda group: not _is_placed(group)))

    def next_first_stage(self) -> dict[str, Any]:
        """Options of the actor that is the first stage of the next replica, those with room first."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(next(self._turns), 0)}

    def close(self) -> None:
        from ray.util.placement_group import remove_placement_group

        for group in self._groups:
            remove_placement_group(group)


def _is_placed(group: Any) -> bool:
    from ray.util.placement_group import placement_group_table

    return placement_group_table(group)["state"] == "CREATED"


def no_room(stages: int, bundle: dict[str, float], *, replicas: int = 1, hosts: int = 0) -> RunError:
    """The error of stages that were not placed in time: what they need, and what the cluster has. `bundle`: the
    resources of a stage. `hosts`: see `ReplicaPlaces`."""
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
