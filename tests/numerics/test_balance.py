"""Load balancing, and a limited capacity of experts, in training."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
import torch
from exchange import padded
from lab import MOE, Rows, class_rows, make_session, token_rows, train
from torch import nn

from experts.router import Routing, TopKRouter

DET = {"train": class_rows(512), "eval": class_rows(64, seed=1)}
LATE = 50


def trained_on_det(**experts: Any) -> Rows:
    """200 steps of a mixture of experts on DET; learns to distinguish the classes."""
    session = make_session(
        {"builder": "experts.models:moe_mlp", "width": 32},
        DET,
        loop={"max_steps": 200, "global_batch_size": 64},
        experts={"num_experts": 8, "hidden": 32, "hosts": 0, "z_loss_weight": 0.0, **experts},
    )
    rows, _ = train(session)
    assert fmean(rows.losses[-LATE:]) < 0.1 * rows.losses[0]
    return rows


@pytest.mark.covers("EXP-05")
def test_the_balance_loss_keeps_the_busiest_expert_within_one_and_a_half_times_the_mean(record_property: Any) -> None:
    """Busiest over mean of each step and layer, over the last 50 steps."""
    peaks = {
        name: fmean(trained_on_det(**options).of("train", "load_imbalance")[-LATE:])
        for name, options in {
            "with": {"balance": "loss", "balance_weight": 0.1},
            "without": {"balance": "none"},
        }.items()
    }
    record_property("busiest_over_mean", peaks)
    assert peaks["with"] <= 1.5 < peaks["without"], peaks


@pytest.mark.covers("EXP-06")
@pytest.mark.parametrize("capacity", [1.25, None])
def test_dropped_tokens_are_counted_and_only_a_capacity_drops_any(capacity: float | None) -> None:
    """The logged count and share of every step against the routers' own answers, choice by choice."""
    data = {"train": padded(token_rows(70, ragged=True, empty=(3, 11)), visible=2), "eval": token_rows(20, seed=5)}
    session = make_session(MOE, data, loop={"max_steps": 8}, experts={"hosts": 0, "capacity_factor": capacity})
    counted: list[list[int]] = []  # [routed, dropped] of each training forward of a layer

    def count(router: nn.Module, inputs: tuple[torch.Tensor, ...], routing: Routing) -> None:
        if router.training:
            valid = (inputs[1] & (inputs[2] > 0)).flatten()
            kept = torch.ones_like(routing.indices_TK, dtype=torch.bool) if routing.kept_TK is None else routing.kept_TK
            counted.append([int(valid.sum()) * router.top_k, int((~kept[valid]).sum())])

    for part in session.trainable.module.modules():
        if isinstance(part, TopKRouter):
            part.register_forward_hook(count)
    rows, _ = train(session)
    logged = rows.of("train", "dropped_fraction")
    each = torch.tensor(counted).view(8, -1, 2).sum(1)  # every step has as many forwards as any other
    assert [sum(interval["dropped"]) for interval in rows.intervals] == each[:, 1].tolist()
    assert logged == pytest.approx((each[:, 1] / each[:, 0].double()).tolist(), abs=1e-15)
    assert all(logged) if capacity else not any(logged)
