"""The stages of a replica as Ray actors: the first one runs in the process that asks for the replica."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import torch

from raytrain.infer.stages import places
from raytrain.infer.stages.links import SECRET_BYTES, Link, LocalLink, StageListener, StageLost, connect
from raytrain.infer.stages.pipeline import StagePipeline
from raytrain.infer.stages.split import load_stage, start_stages
from raytrain.train.memory.device import limit_device_memory

if TYPE_CHECKING:
    from raytrain.infer.worker import Work

#: Variables that must be set before torch is imported, so that products use no more threads than planned.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
#: Seconds for a stage to answer when another one has ended.
ANSWER_S = 10.0


class StageActor:
    """One of the later stages."""

    def __init__(self, work: Work, stage: int, secret: bytes) -> None:
        if work.threads is not None:
            torch.set_num_threads(work.threads)
        self._work, self._stage, self._secret = work, stage, secret
        self._device = torch.device(work.model.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        limit_device_memory(self._device, fraction=work.memory_fraction, limit=work.memory_limit)
        self._listener = StageListener(_own_address(), secret)
        self._links: list[Link] = []

    def address(self) -> tuple[str, int]:
        """Where the stage before connects."""
        return self._listener.address

    def link(self, following: tuple[str, int]) -> None:
        """Connect to the next stage, and wait for the one before."""
        target = connect(following, self._secret)
        self._links = [self._listener.accept(), target]

    def start(self) -> int:
        """Load the stage's tensors and begin to compute; returns the bytes that were read."""
        assert self._work.split is not None
        stage = load_stage(self._work.model, self._work.split, self._stage, self._device)
        start_stages([stage], self._links, threads=self._work.threads)
        return stage.bytes_read


def remote_pipeline(work: Work, *, cpus: float, gpus: float, accelerator: str | None = None) -> StagePipeline:
    """Start the stages of one replica; they end with this process, and it notices if one of them ends.

    In an actor of a placement group each stage has the bundle of its number.

    Args:
        cpus, gpus, accelerator: Ray resources of each further stage, and the type of its GPU.
    Raises:
        StageLost: a stage ended before all were ready. RunError: there is no room for them in the cluster.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    stages = _FurtherStages(work, secret, cpus=cpus, gpus=gpus, accelerator=accelerator)
    try:
        return stages.connect()
    except StageLost as error:
        raise stages.lost(error) from error
    finally:
        stages.end_unless_connected()


class _FurtherStages:
    """All stages of a replica but the first, each in an actor."""

    def __init__(self, work: Work, secret: bytes, *, cpus: float, gpus: float, accelerator: str | None) -> None:
        import ray
        from ray.util.placement_group import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert work.split is not None
        self._work, self._split, self._secret = work, work.split, secret
        self._bundle = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
        self._connected = False
        variables = {} if work.threads is None else dict.fromkeys(THREADS, str(work.threads))
        # a stage that has lost its neighbours is of no use: the whole replica starts again
        options: Any = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "runtime_env": {"env_vars": variables}}
        options |= {} if accelerator is None else {"accelerator_type": accelerator}
        kind: Any = ray.remote(**options)(StageActor)
        group = get_current_placement_group()
        self._actors: list[Any] = []
        for stage in range(1, work.split.plan.stages):
            place = {} if group is None else {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, stage)}
            self._actors.append(kind.options(**place).remote(work, stage, secret))

    def connect(self) -> StagePipeline:
        """Load all stages, and connect them in a circle that begins and ends in this process."""
        work, count = self._work, self._split.plan.stages
        addresses = self._get([actor.address.remote() for actor in self._actors], timeout=places.ROOM_S)
        own = StageListener(_own_address(), self._secret)
        following = zip(self._actors, [*addresses[1:], own.address], strict=True)
        linked = [actor.link.remote(after) for actor, after in following]
        target = connect(addresses[0], self._secret)
        source = own.accept()
        self._get(linked)
        started = [actor.start.remote() for actor in self._actors]
        first: Link = LocalLink()
        stage = load_stage(work.model, self._split, 0, torch.device(work.model.device))
        self._get(started)
        start_stages([stage], [first, target], threads=work.threads)
        self._connected = True
        return StagePipeline(first, source, stages=count, close=self._end, lost=self.lost)

    def _get(self, answers: list[Any], timeout: float | None = None) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        try:
            return ray.get(answers, timeout=timeout)
        except GetTimeoutError as error:
            raise places.no_room(len(self._actors), self._bundle) from error
        except RayActorError as error:
            raise StageLost(_in_one_line(error)) from error
        except RayTaskError as error:
            raise getattr(error, "cause", None) or error from None

    def lost(self, error: StageLost) -> StageLost:
        """The error of the stage that ended, as far as Ray knows it; else the one given."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        for number, actor in enumerate(self._actors, start=1):
            try:
                ray.get(actor.address.remote(), timeout=ANSWER_S)
            except RayActorError as found:
                return StageLost(f"stage {number} of 0 to {len(self._actors)} ended: {_in_one_line(found)}")
            except GetTimeoutError:
                continue
        return error

    def end_unless_connected(self) -> None:
        """End the actors of stages that did not all start."""
        if not self._connected:
            self._end()

    def _end(self) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _own_address() -> str:
    """The address of this node, as the other nodes of the cluster reach it."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    return next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node)
