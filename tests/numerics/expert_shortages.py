"""Scenes of `exchange` in which memory runs out in the middle of a pass, on a worker or where the experts are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from exchange import Scene, joint_group, placement_of, record, scene_experts, session_of
from lab import Rows, train
from torch import Tensor

from experts.exchange.host_server import HostServer
from experts.layer import MoELayer
from experts.member.shard import ExpertShard
from raytrain.autotune.measurement import Candidate
from raytrain.autotune.startup import Calibration, read_measured, settle_micro_batch
from raytrain.autotune.step_probe import StepProbe
from raytrain.plan.choice import Deferred
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session

Fate = tuple[int, int, str, int]
"""Step, rank in the gang, point, and which time (from 0) that point of layer 1 is met in the step."""


class Fates:
    """Raises `torch.OutOfMemoryError` at the points of this rank, each once."""

    def __init__(self, fates: list[Fate], rank: int) -> None:
        self._left = [fate for fate in fates if fate[1] == rank]
        self._met: dict[tuple[int, str], int] = {}
        self.happened: list[Fate] = []

    def meet(self, step: int, point: str) -> None:
        time = self._met.get((step, point), 0)
        self._met[step, point] = time + 1
        due = [fate for fate in self._left if (fate[0], fate[2], fate[3]) == (step, point, time)]
        for fate in due:
            self._left.remove(fate)
            self.happened.append(fate)
            raise torch.OutOfMemoryError(f"planted at {fate}")


def play(rank: int, world_size: int, scenes: list[tuple[Scene, list[Fate]]]) -> list[Any]:
    """Each scene in turn (all of one size); what this member made of it."""
    return [act(rank, replace(scene, number=number), fates) for number, (scene, fates) in enumerate(scenes)]


def act(rank: int, scene: Scene, planted: list[Fate]) -> Any:
    fates = Fates(planted, rank)
    if rank >= scene.workers:
        server = HostServer(
            joint_group(scene, rank), host=rank - scene.workers, generation=1,
            placement=placement_of(scene, scene_experts(scene)), device=torch.device("cpu"),
        )  # fmt: skip
        with planted_in_experts(fates, lambda: server.steps + 1):
            server.serve()
        return {"happened": fates.happened}
    session = session_of(scene, rank)
    plant(session, fates)
    with planted_in_experts(fates, lambda: session.state.step + 1):
        reporter, _ = train(session)
    made = record(session, reporter)
    made["events"] = [event for event in reporter.events if event["kind"] == "out_of_memory"]
    made["happened"] = fates.happened
    return made


def plant(session: Session, fates: Fates) -> None:
    """Before the rows of layer 1 are sent, while they are under way, behind it in backward, and in backward when
    nothing more is to be sent."""
    first, layer = [part for part in session.trainable.module.modules() if isinstance(part, MoELayer)]
    begin = first.router.forward
    route, share = layer.router.forward, layer._share

    def step() -> int:
        return session.state.step + int(layer.training)

    def router(x_BSD: Tensor, *masks: Tensor | None) -> Any:
        fates.meet(step(), "before" if layer.training else "evaluation")
        if x_BSD.requires_grad:
            x_BSD.register_hook(lambda _gradient: fates.meet(step(), "backward"))
        return route(x_BSD, *masks)

    def shared(x_TD: Tensor) -> Any:
        fates.meet(step(), "under way")
        return share(x_TD)

    def last(x_BSD: Tensor, *masks: Tensor | None) -> Any:
        if x_BSD.requires_grad:
            x_BSD.register_hook(lambda _gradient: fates.meet(step(), "last"))
        return begin(x_BSD, *masks)

    first.router.forward = last  # type: ignore[method-assign]
    layer.router.forward = router  # type: ignore[method-assign]
    layer._share = shared  # type: ignore[method-assign]


class planted_in_experts:
    """In the forward and in the backward of the experts of this process."""

    def __init__(self, fates: Fates, step: Any) -> None:
        self._fates, self._step = fates, step

    def __enter__(self) -> None:
        self._kept = forward, backward = ExpertShard._forward, ExpertShard._backward
        fates, step = self._fates, self._step

        def forward_of(shard: ExpertShard, layer: int, *args: Any, **keys: Any) -> Tensor:
            if layer == 1:
                fates.meet(step(), "expert forward" if keys["keep"] else "expert evaluation")
            return forward(shard, layer, *args, **keys)

        def backward_of(shard: ExpertShard, layer: int, *args: Any) -> Tensor:
            if layer == 1:
                fates.meet(step(), "expert backward")
            return backward(shard, layer, *args)

        ExpertShard._forward, ExpertShard._backward = forward_of, backward_of  # type: ignore[method-assign]

    def __exit__(self, *_exception: object) -> None:
        ExpertShard._forward, ExpertShard._backward = self._kept  # type: ignore[method-assign]


def probe(rank: int, world_size: int, scenes: list[tuple[Scene, dict[int, int]]]) -> list[Any]:
    """Each scene in turn: the micro-batch that memory leaves, where a rank has room for so many rows at a time (a host:
    of an expert layer; a worker: of a micro-batch), and the run that follows."""
    numbered = enumerate(scenes)
    return [_probed(rank, replace(scene, number=number), rooms.get(rank)) for number, (scene, rooms) in numbered]


def _probed(rank: int, scene: Scene, room: int | None) -> Any:
    with less_room_in_experts(room if rank >= scene.workers or scene.hosts == "colocated" else None):
        if rank >= scene.workers:
            HostServer(
                joint_group(scene, rank), host=rank - scene.workers, generation=1,
                placement=placement_of(scene, scene_experts(scene)), device=torch.device("cpu"),
            ).serve()  # fmt: skip
            return None
        session, reporter = session_of(scene, rank), Rows()
        if scene.hosts != "colocated" and room is not None:
            less_room(session, room)
        deferred = Deferred("the largest that fits", (1, 6), "a test")
        session.job = replace(session.job, plan=replace(session.job.plan, micro_batch_size=deferred))
        session.settings = replace(session.settings, micro_batch=None)
        # a folder of its own, as if nobody saw the others'
        run = RunFolder(str(Path(scene.run_path) / f"{scene.size}-{scene.number}-{rank}"))
        settle_micro_batch(Calibration(session, run, reporter, lambda _status: None))
        (compared,) = StepProbe(session).measure_in_turn(
            [Candidate("fp64", 6)], budget=None, rounds=(3, 12), updates=False, budget_s=0.0
        )
        trained, _ = train(session)
        made = record(session, trained)
        made["probe"] = read_measured(run).get("micro_batch")
        made["micro"], made["refused"] = session.loader.batches.micro_batch, compared.reason
        return made


def less_room(session: Session, rows: int) -> None:
    """A worker's own backward fails for a larger micro-batch, behind its last exchange."""
    layer = next(part for part in session.trainable.module.modules() if isinstance(part, MoELayer))
    route = layer.router.forward

    def refuse(_gradient: Tensor) -> None:
        raise torch.OutOfMemoryError("planted")

    def router(x_BSD: Tensor, *masks: Tensor | None) -> Any:
        if x_BSD.requires_grad and len(x_BSD) > rows:
            x_BSD.register_hook(refuse)
        return route(x_BSD, *masks)

    layer.router.forward = router  # type: ignore[method-assign]


class less_room_in_experts:
    """The experts of this process fail in backward for more rows at a time than `room`; None lets them be."""

    def __init__(self, room: int | None) -> None:
        self._room = room

    def __enter__(self) -> None:
        self._kept = backward = ExpertShard._backward
        room = self._room

        def backward_of(shard: ExpertShard, layer: int, micro_batch: int, grads: Tensor, *args: Any) -> Tensor:
            if room is not None and len(grads) > room:
                raise torch.OutOfMemoryError("planted")
            return backward(shard, layer, micro_batch, grads, *args)

        ExpertShard._backward = backward_of  # type: ignore[method-assign]

    def __exit__(self, *_exception: object) -> None:
        ExpertShard._backward = self._kept  # type: ignore[method-assign]
