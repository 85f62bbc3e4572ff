"""Experts that come and go in small runs, at steps that a script names, wherever the experts live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from exchange import Scene, record, serve, session_of
from lab import Rows, train

from experts.lifecycle.controller import Lifecycle
from experts.lifecycle.policy import merge
from experts.lifecycle.table import Change
from raytrain.checkpoint.reader import load
from raytrain.execution.checkpointer import CheckpointSaver
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session
from raytrain.train.state import Clock

LIFECYCLE = (
    ("num_experts", 4), ("top_k", 2),
    ("lifecycle", {"max_experts": 6, "every": 2, "birth": {"uncertainty": 1.0}, "merge": {"similarity": None},
                   "prune": {"idle_steps": None}}),
)  # fmt: skip
"""Experts of a scene of which none comes or goes by itself."""
NAMES = {"birth": "expert_born", "merge": "expert_merged", "prune": "expert_pruned", "rate": "expert_rate"}

SCRIPT: tuple[tuple[int, str, int, tuple[int, ...]], ...] = (
    (2, "birth", 0, (1,)),
    (2, "birth", 1, (2,)),
    (5, "merge", 0, (0, 4)),
    (5, "prune", 1, (0,)),
    (6, "birth", 1, (4,)),
    (8, "rate", 0, (2,)),
    (9, "prune", 0, (3,)),
    (9, "birth", 0, (1,)),
    (11, "merge", 1, (1, 5)),
    (13, "birth", 1, (3,)),
)
"""(decided after this step, kind, layer, experts)."""


def lifecycle_of(session: Session) -> Lifecycle:
    found = session.trainable.state_parts()["lifecycle"]  # type: ignore[misc]
    assert isinstance(found, Lifecycle)
    return found


def follow(lifecycle: Lifecycle, script: Sequence[tuple[int, str, int, tuple[int, ...]]] = SCRIPT) -> None:
    """Have the lifecycle want what the script says."""

    def wanted(step: int) -> list[Change]:
        found: list[Change] = []
        for at, kind, layer, ids in script:
            if at == step:
                table = lifecycle.table.after(found, step=step + 1)
                found.append(change_of(table, kind, layer, ids))
        return found

    lifecycle.sleep = wanted


def change_of(table: Any, kind: str, layer: int, ids: tuple[int, ...]) -> Change:
    if kind == "birth":
        return Change("birth", layer, (*ids, table.next_ids[layer]), "script", slot=table.free_slots(layer)[0])
    if kind == "merge":
        return merge(table, layer, *ids, reason="script")
    return Change(kind, layer, ids, "script", factor=0.5 if kind == "rate" else 1.0)  # type: ignore[arg-type]


def grow(rank: int, world_size: int, scenes: list[Scene]) -> list[Any]:
    """Each scene in turn, with `SCRIPT`; a worker's record, or what a host holds."""
    return [act(rank, replace(scene, number=number)) for number, scene in enumerate(scenes)]


def act(rank: int, scene: Scene) -> Any:
    scene = replace(scene, sections=(*scene.sections, ("experts", LIFECYCLE)))
    if rank >= scene.workers:
        return serve_slots(rank, scene)
    torch.manual_seed(0)
    session = session_of(scene, rank)
    lifecycle = lifecycle_of(session)
    lifecycle.table = replace(lifecycle.table, seed=7)
    follow(lifecycle)
    if scene.from_step:
        session.restore(load(RunFolder(scene.run_path).checkpoint_dir(scene.from_step)))
    saver = None
    if scene.every:
        saver = CheckpointSaver(
            session, RunFolder(scene.run_path), every=scene.every, keep="all", asynchronous=True, reporter=Rows(),
            clock=Clock(), fence=None,
        )  # fmt: skip
    reporter, _ = train(session, saver=saver)
    if saver is not None:
        saver.close()
    changes = [row for row in reporter.events if row["kind"] in NAMES.values()]
    ids = [row["ids"] for row in reporter.intervals]
    return record(session, reporter) | {"changes": changes, "table": lifecycle.table.to_json(), "ids": ids}


def serve_slots(rank: int, scene: Scene) -> Any:
    """`serve` places as many experts as the section names; here there is room for more."""
    given = dict(dict(scene.sections)["experts"])
    slots = {**given, "num_experts": given["lifecycle"]["max_experts"]}
    return serve(rank, replace(scene, sections=(("experts", tuple(slots.items())),)))


def disagree(rank: int, world_size: int, scene: Scene) -> str:
    """The scene, where each worker wants a newcomer of another expert; how it ended on this one."""
    session = session_of(replace(scene, sections=(("experts", LIFECYCLE),)), rank)
    follow(lifecycle_of(session), ((2, "birth", 0, (rank,)),))
    try:
        train(session)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"
