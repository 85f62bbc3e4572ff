"""The vote: its vector for layers of unequal sizes, and what a step that is dropped leaves for the next."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from experts.config import Key, LayerShape
from experts.member.commit import StepCommit, VoteLayout, read_vote
from experts.member.shard import ExpertShard
from experts.placement.values import LayerPlacement, Placement
from raytrain.config.sections import OptimConfig
from raytrain.train.memory.device import Shortage

SIZES = (3, 2, 12)
LAYOUT = VoteLayout.of([LayerShape(8, (8,) * size, "gelu") for size in SIZES], holders=3)
KEYS = [(layer, expert) for layer, size in enumerate(SIZES) for expert in range(size)]


def voted(squares: dict[Key, float]) -> torch.Tensor:
    """The sum over three holders, each with a third of the experts."""
    total = torch.zeros_like(LAYOUT.empty(7))
    for holder in range(3):
        own = LAYOUT.empty(7)
        LAYOUT.put_squares(own, {key: squares[key] for n, key in enumerate(KEYS) if n % 3 == holder})
        LAYOUT.put_spent(own, holder, busy_s=1.0 + holder, moving_s=0.1 * holder, sent_bytes=10 * holder)
        LAYOUT.put(own, lr=0.5 if holder == 0 else 0.0, inverse_scale=1.0 if holder == 0 else 0.0)
        total += own
    return total


def test_each_expert_of_each_layer_has_a_slot_of_its_own() -> None:
    vector = voted({key: 4.0**n for n, key in enumerate(KEYS)})
    assert vector[LAYOUT.squares].tolist() == [4.0**n for n in range(len(KEYS))]
    result = read_vote(LAYOUT, vector, step=7, members=3)
    assert float(result.norm) == math.sqrt(sum(4.0**n for n in range(len(KEYS)))) and result.nonfinite == []
    assert (result.busy_s, result.sent_bytes, result.lr) == ([1.0, 2.0, 3.0], [0.0, 10.0, 20.0], 0.5)


def test_the_experts_that_are_not_finite_are_named() -> None:
    bad = [(0, 2), (1, 0), (2, 11)]
    result = read_vote(LAYOUT, voted({key: math.inf if key in bad else 1.0 for key in KEYS}), step=7, members=3)
    assert bool(result.skip) and result.nonfinite == bad


def test_what_moves_have_cost_is_reported_once_and_with_a_step_that_is_committed() -> None:
    """Memory runs out in the step whose vote would have carried it."""
    shapes = [LayerShape(8, (8, 8), "gelu")]
    placement = Placement(1, 1, (LayerPlacement(((0,), (0,)), ((1.0,), (1.0,))),))
    alone: Any = SimpleNamespace(rank=0, size=1, holders=[0], all_reduce=lambda _vector: None)
    layout = VoteLayout.of(shapes, holders=1)
    commit = StepCommit(alone, placement, layout)
    commit.shard = shard = ExpertShard(
        shapes, placement, 0, optim=OptimConfig(), dtype=torch.float64, device=torch.device("cpu")
    )
    commit.migration.add_spent(2.0, 30)
    shard.ran_out(Shortage("expert host 0", "OutOfMemoryError"))
    dropped, committed, later = (
        commit.run(7, max_grad_norm=None, fill_in=lambda vector: layout.put(vector, lr=0.1, inverse_scale=1.0))
        for _ in range(3)
    )
    assert dropped.shortages and not committed.shortages
    assert (committed.moving_s, committed.sent_bytes) == ([2.0], [30.0])
    assert (later.moving_s, later.sent_bytes) == ([0.0], [0.0])
