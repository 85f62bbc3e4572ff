"""Workers and hosts that share a GPU train as those with one each: rows travel through the host, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from exchange import Scene, play
from gang import run_gang

COLUMNS = ("loss", "aux_loss", "grad_norm", "eval", "counts", "load_imbalance", "loss_scale")
SCENES = {
    "1 worker, 2 hosts, replicas and moves": Scene(1, 2, steps=8, seed=2, replicas=3, moves=((2, 11), (5, 12))),
    "2 workers, 1 host, fp16, some without a label": Scene(2, 1, micro=1, steps=4, precision="fp16"),
    "2 workers, 1 host, two in flight": Scene(2, 1, micro=2, steps=4, sections=(("experts", (("inflight", 2),)),)),
    "3 workers, colocated, computed again": Scene(
        3, "colocated", micro=2, steps=4, sections=(("loop", (("activation_checkpointing", True),)),)
    ),
}
"""Each of three processes."""


@pytest.fixture(scope="module")
def pairs() -> dict[str, list[Any]]:
    """Name -> for each member what it made directly, and through the host."""
    scenes = [*SCENES.values(), *(replace(scene, through_host=True) for scene in SCENES.values())]
    members = run_gang(play, scenes, world_size=3)
    size = len(SCENES)
    return {name: [(member[at], member[size + at]) for member in members] for at, name in enumerate(SCENES)}


@pytest.mark.parametrize("name", list(SCENES))
def test_rows_through_the_host_change_nothing(pairs: dict[str, list[Any]], name: str) -> None:
    for rank, (direct, staged) in enumerate(pairs[name][: SCENES[name].workers]):
        for column in COLUMNS:
            assert staged[column] == direct[column], f"rank {rank}: {column}"
        for key, value in direct["weights"].items():
            assert np.array_equal(staged["weights"][key], value), key
