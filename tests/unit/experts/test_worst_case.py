from __future__ import annotations

import torch

from experts.config import ExpertsConfig
from experts.models import moe_gpt
from experts.router import TopKRouter
from raytrain.trainable import Trainable


def build(**keys: object) -> tuple[Trainable, list[TopKRouter], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    experts = ExpertsConfig.model_validate({"num_experts": 4, "top_k": 2, "trace_every": 1, **keys})
    trainable = moe_gpt(layers=2, heads=2, width=8, context=6, vocab_size=11, experts=experts)
    tokens = torch.randint(11, (3, 6))
    routers = [part for part in trainable.module.modules() if isinstance(part, TopKRouter)]
    return trainable, routers, {"input_ids": tokens, "labels": tokens}


def test_the_worst_routing_sends_every_token_to_the_widest_experts() -> None:
    trainable, routers, batch = build(hidden=[8, 32, 16, 8])
    assert trainable.worst_case is not None
    with trainable.worst_case():
        output = trainable.loss(trainable.module, batch)
        for router in routers:
            assert router.pending_counts.tolist() == [0, 18, 18, 0, 0]
        output.loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in trainable.module.parameters())


def test_with_a_capacity_the_worst_case_is_that_no_token_is_dropped() -> None:
    trainable, routers, batch = build(capacity_factor=1.0)
    assert trainable.worst_case is not None
    with trainable.worst_case():
        trainable.loss(trainable.module, batch)
    for router in routers:
        assert router.pending_counts.tolist() == [9, 9, 9, 9, 0]


def test_afterwards_tokens_go_where_the_scores_say() -> None:
    trainable, _, batch = build()
    plain = trainable.loss(trainable.module, batch).loss
    assert trainable.worst_case is not None
    with trainable.worst_case():
        forced = trainable.loss(trainable.module, batch).loss
    assert not torch.equal(forced, plain)
    assert torch.equal(trainable.loss(trainable.module, batch).loss, plain)
