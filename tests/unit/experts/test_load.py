"""Load figures from the counts of a step."""

from __future__ import annotations

import pytest
import torch

from experts.router import LoadTracker, TopKRouter, imbalance
from raytrain.trainable import GlobalStep


def committed(counts: torch.Tensor | None, *, skip: bool = False) -> GlobalStep:
    return GlobalStep(norm=torch.tensor(1.0), skip=torch.tensor(skip), counts=counts)


def book() -> LoadTracker:
    torch.manual_seed(0)
    return LoadTracker([TopKRouter(4, 3, 1), TopKRouter(4, 2, 1, capacity_factor=1.0)])


def test_imbalance_is_the_busiest_over_the_mean() -> None:
    assert imbalance(torch.tensor([[6, 0, 0], [2, 2, 2], [0, 0, 0]])).tolist() == [3.0, 1.0, 1.0]


def test_pending_counts_stand_layer_by_layer_and_a_commit_clears_them() -> None:
    made = book()
    for router in made.routers:
        router(torch.randn(2, 5, 4))
    pending = made.pending()
    assert pending.dtype == torch.int64 and len(pending) == 4 + 3
    assert [int(pending[:3].sum()), int(pending[4:6].sum())] == [10, 10]
    made.commit(committed(pending))
    assert not made.pending().any()
    assert int(pending[:3].sum()) == 10  # a copy, not the buffer


def test_metrics_are_of_the_last_committed_step() -> None:
    made = book()
    assert made.metrics() == {}
    made.commit(committed(torch.tensor([6, 0, 0, 0, 3, 1, 1])))
    figures = {name: float(value) for name, value in made.metrics().items()}
    assert figures == {"load_imbalance": pytest.approx((3.0 + 1.5) / 2), "dropped_fraction": pytest.approx(0.1)}
    made.commit(committed(torch.tensor([2, 2, 2, 0, 2, 2, 0]), skip=True))
    made.commit(committed(None))
    assert {name: float(value) for name, value in made.metrics().items()} == figures


def test_each_router_commits_its_own_counts() -> None:
    made = book()
    made.commit(committed(torch.tensor([6, 0, 0, 0, 0, 4, 0])))
    assert torch.allclose(made.routers[0].bias_E, torch.tensor([-0.001, 0.001, 0.001]))
    assert torch.allclose(made.routers[1].bias_E, torch.tensor([0.001, -0.001]))


def test_the_interval_sums_committed_steps_and_leaves_out_skipped_ones() -> None:
    made, counts = book(), torch.tensor([6, 0, 0, 0, 3, 1, 1])
    made.commit(committed(counts))
    made.commit(committed(10 * counts, skip=True))
    made.commit(committed(counts))
    assert made.window.tolist() == (2 * counts).tolist() and made.window_steps == 3
    assert made.used.tolist() == [3, 0, 0, 0, 3, 3, 3]
