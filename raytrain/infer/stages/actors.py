"""The stages of a replica as Ray actors: the first one runs in the process that asks for the replica."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any

import torch

from raytrain.infer.stages.links import SECRET_BYTES, Link, LocalLink, StageListener, connect
from raytrain.infer.stages.pipeline import StagePipeline
from raytrain.infer.stages.split import load_stage, start_stages
from raytrain.train.memory.device import limit_device_memory

if TYPE_CHECKING:
    from raytrain.infer.worker import Work

#: Variables that must be set before torch is imported, so that products use no more threads than planned.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


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

    Args:
        cpus, gpus, accelerator: Ray resources of each further stage, and the type of its GPU.
    """
    import ray

    assert work.split is not None
    count, secret = work.split.plan.stages, secrets.token_bytes(SECRET_BYTES)
    variables = {} if work.threads is None else dict.fromkeys(THREADS, str(work.threads))
    # a stage that has lost its neighbours is of no use: the whole replica starts again
    options: Any = {"num_cpus": cpus, "num_gpus": gpus, "max_restarts": 0, "runtime_env": {"env_vars": variables}}
    options |= {} if accelerator is None else {"accelerator_type": accelerator}
    kind: Any = ray.remote(**options)(StageActor)
    actors = [kind.remote(work, stage, secret) for stage in range(1, count)]
    own = StageListener(_own_address(), secret)
    addresses = ray.get([actor.address.remote() for actor in actors])
    linked = [actor.link.remote(after) for actor, after in zip(actors, [*addresses[1:], own.address], strict=True)]
    target = connect(addresses[0], secret)
    source = own.accept()
    ray.get(linked)
    started = [actor.start.remote() for actor in actors]
    first: Link = LocalLink()
    stage = load_stage(work.model, work.split, 0, torch.device(work.model.device))
    ray.get(started)
    start_stages([stage], [first, target], threads=work.threads)

    def close() -> None:
        for actor in actors:
            ray.kill(actor)

    return StagePipeline(first, source, stages=count, close=close)


def _own_address() -> str:
    """The address of this node, as the other nodes of the cluster reach it."""
    import ray

    node = ray.get_runtime_context().get_node_id()
    return next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node)


def end_replica() -> None:
    """End this process, which cannot go on without its stages: Ray starts it again, and repeats its unit."""
    os._exit(1)
