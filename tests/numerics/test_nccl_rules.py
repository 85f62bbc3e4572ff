"""Experts on GPUs, as far as a CPU shows it: rows travel by a stand-in with the rules of NCCL (`nccl_stand_in`).

What would hang on GPUs is an error here after seconds, and what runs equals the run over gloo to the last bit.
"""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import expert_shortages
import nccl_stand_in
import numpy as np
import pytest
import torch
import torch.distributed as dist
from exchange import Scene, act, play
from gang import run_gang
from test_exchange import check_equal
from test_expert_shortages import COLOCATED, HOSTS, LOOP, THREE, TWICE, WORKERS

from experts.hosts.generation import GenerationSpec, join_as_worker, open_store
from experts.placement.policy import first_placement
from raytrain.train.parallel.collectives import Workers

COLUMNS = ("loss", "aux_loss", "grad_norm", "eval", "counts", "load_imbalance", "loss_scale")
SCENES = {
    "2 workers, 2 hosts, replicas and moves": Scene(2, 2, steps=10, seed=2, replicas=3, moves=((2, 11), (5, 12))),
    "2 workers, 2 hosts, row by row, some without a label": Scene(2, 2, micro=1, steps=4),
    "2 workers, 2 hosts, two in flight": Scene(2, 2, micro=2, steps=6, sections=(("experts", (("inflight", 2),)),)),
    "1 worker, 3 hosts, placement with replicas, fp16": Scene(1, 3, seed=1, replicas=5, steps=6, precision="fp16"),
    "4 workers, colocated, replicas": Scene(4, "colocated", micro=1, seed=5, replicas=2, steps=6),
    "4 workers, colocated, two in flight": Scene(
        4, "colocated", micro=1, steps=6, sections=(("experts", (("inflight", 2),)),)
    ),
    "2 workers, 2 hosts, activation checkpointing": Scene(
        2, 2, steps=4, sections=(("loop", (("activation_checkpointing", True),)),)
    ),
}
"""Each of four processes."""


@pytest.fixture(scope="module")
def pairs() -> dict[str, list[Any]]:
    """Name -> for each member what it made over gloo, and by the stand-in."""
    scenes = [*SCENES.values(), *(replace(scene, nccl=True) for scene in SCENES.values())]
    members = run_gang(play, scenes, world_size=4)
    size = len(SCENES)
    return {name: [(member[at], member[size + at]) for member in members] for at, name in enumerate(SCENES)}


@pytest.mark.parametrize("name", list(SCENES))
def test_rows_by_the_rules_of_nccl_change_nothing(pairs: dict[str, list[Any]], name: str) -> None:
    for rank, (plain, ruled) in enumerate(pairs[name][: SCENES[name].workers]):
        for column in (*COLUMNS, *(["in force", "refused"] if "in force" in plain else [])):
            assert ruled[column] == plain[column], f"rank {rank}: {column}"
        for key, value in plain["weights"].items():
            assert np.array_equal(ruled["weights"][key], value), key


def test_a_host_computes_with_the_settings_of_the_workers() -> None:
    """Every setting of torch that is global to a process, sent with the set-up: the host starts with torch's own."""
    loop = (("deterministic", True), ("cudnn_benchmark", False))
    scene = Scene(1, 1, steps=1, sections=(("loop", loop),))
    worker, host = (made[0]["process"] for made in run_gang(play, [scene], world_size=2))
    assert host == worker
    assert worker["deterministic"] and worker["cudnn_deterministic"] and worker["cublas_workspace"] == ":4096:8"
    assert not worker["cudnn_tf32"], "torch allows it unless told otherwise"


def collectives(rank: int, world_size: int) -> list[Any]:
    """What the workers of a generation do with their group: sums of many sizes, in all types, and broadcasts."""
    nccl_stand_in.install()
    store = dist.distributed_c10d._get_default_store()
    served = open_store("127.0.0.1") if rank == 0 else None
    if served is not None:
        store.set("address", json.dumps(served[1]))
    address = tuple(json.loads(store.get("address")))
    spec = GenerationSpec(1, world_size, 0, address, "lo", "cpu", first_placement([4], hosts=1))
    _, group, _ = join_as_worker(spec, rank=rank, wait=lambda: str(threading.Event().wait()))
    assert group is not None
    found: list[Any] = []
    workers = Workers()
    workers.use(replace(group, flags=group.payload))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for size in (1, 3000, 300_000, 7_000_000):
            tensor = torch.full((size,), rank + 1.0, dtype=dtype)
            workers.all_reduce([tensor])
            found.append(float(tensor[-1]))
    tensor = torch.full((3000,), rank + 1.0)
    workers.broadcast([tensor])
    return [*found, float(tensor[-1])]


def test_nothing_is_left_to_connect_when_the_workers_have_met() -> None:
    """A worker may be late for the first sum of large gradients, which NCCL adds in another way than one number."""
    assert run_gang(collectives, world_size=2) == [[3.0] * 12 + [1.0]] * 2


SHORT = {
    "2 workers, 2 hosts, two in flight": (Scene(2, 2, steps=30, sections=TWICE, nccl=True), WORKERS + HOSTS),
    "2 workers, colocated, two in flight": (Scene(2, "colocated", steps=30, sections=TWICE, nccl=True), COLOCATED),
    "3 workers, colocated": (Scene(3, "colocated", micro=2, steps=30, sections=LOOP, nccl=True), THREE),
}


@pytest.mark.parametrize("name", list(SHORT))
def test_a_worker_or_host_without_memory_holds_up_nobody(name: str) -> None:
    """The others' passes go on while it takes no part."""
    scene, fates = SHORT[name]
    made = [member[0] for member in run_gang(expert_shortages.play, [(scene, fates)], world_size=scene.size)]
    assert sorted(fate for member in made for fate in member["happened"]) == sorted(fates)
    check_equal(made, act(0, Scene(1, 0, steps=30)), workers=scene.workers, where=name)
