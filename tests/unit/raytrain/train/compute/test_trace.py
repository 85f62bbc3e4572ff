"""Tracing forward and backward without storage: what is counted, and that nothing of the model changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experts.config import ExpertsConfig
from experts.models import moe_gpt
from experts.plan.sizes import expert_facts
from raytrain.models.cnn import cnn
from raytrain.models.gpt import gpt
from raytrain.models.mlp import mlp
from raytrain.models.registry import to_trainable
from raytrain.models.sizes import model_facts
from raytrain.train.compute.trace import BUDGET_S, TracedModel, trace_model, trace_pass
from raytrain.train.precision.policy import policy_for
from raytrain.trainable import Batch, Trainable

CPU = torch.device("cpu")
WIDTH = 64


class TwoLayers(nn.Module):
    """relu between two linear maps without bias; `labels` are ignored."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.reads = reads
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.seen += 1
        if self.reads and x.sum().item() == 0:  # as a router reads its counts
            return {"loss": self.up(x).sum() * 0}
        return {"loss": self.down(F.relu(self.up(x))).sum()}


def rows(number: int) -> Batch:
    return {"x": torch.ones(number, WIDTH), "labels": torch.zeros(number)}


def traced(module: nn.Module, *, recomputed: bool = False) -> TracedModel:
    found = trace_model(to_trainable(module), rows, device=CPU, recomputed=recomputed, budget_s=60.0)
    assert found is not None
    return found


@pytest.mark.parametrize("reads", [False, True])
def test_a_row_costs_what_the_layers_keep_and_compute(reads: bool) -> None:
    found = traced(TwoLayers(reads=reads))
    hidden, out = 4 * 4 * WIDTH, 4 * WIDTH
    # in backward: the hidden values after relu, and the gradients before and after it; the gradient of the result
    # is an expanded scalar, copied for the product
    assert 2 * hidden <= found.passes.full_bytes <= 3 * hidden + 2 * out
    assert found.passes.half_bytes < 0.8 * found.passes.full_bytes
    # the gradient of the input is not computed: x needs none
    assert found.flops_per_sample == 2 * (3 * 2 - 1) * 4 * WIDTH * WIDTH
    assert found.passes.width == 2 * WIDTH and 0 < found.passes.operations < 40
    assert 0 < found.passes.fixed_bytes <= 2 * 4 * 4 * WIDTH * WIDTH


def test_the_model_and_the_generators_stay_as_they_are() -> None:
    module = TwoLayers(reads=True)
    before, state = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    traced(module)
    assert module.calls == 0 and all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and all(p.grad is None for p in module.parameters())


def test_a_model_that_cannot_be_traced_is_unknown() -> None:
    class Fails(TwoLayers):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            raise ValueError("no")

    assert trace_model(to_trainable(Fails()), rows, device=CPU, recomputed=False) is None
    assert trace_model(to_trainable(TwoLayers()), rows, device=CPU, recomputed=False, budget_s=0.0) is None


def test_a_module_on_meta_is_traced_like_one_with_weights() -> None:
    with torch.device("meta"):
        empty = TwoLayers()
    assert traced(empty) == traced(TwoLayers())


def test_blocks_that_are_recomputed_keep_only_their_inputs() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)) for _ in range(6)
            )

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            for block in self.blocks:
                x = x + block(x)
            return {"loss": x.sum()}

    kept, again = traced(Deep()), traced(Deep(), recomputed=True)
    assert again.passes.full_bytes < 0.45 * kept.passes.full_bytes
    assert again.passes.recomputed_bytes == again.passes.full_bytes and kept.passes.recomputed_bytes is None
    assert again.flops_per_sample > 1.1 * kept.flops_per_sample, "a block's last product is not repeated"


# ---------------------------------------------------------------- the formulas of the built-in models

LANGUAGE: dict[str, Any] = {"layers": 3, "heads": 4, "width": 64, "context": 32}
IMAGE = {"image_shape": [28, 28], "num_classes": 10}


def tokens(number: int) -> Batch:
    draw = torch.Generator().manual_seed(1)
    return {name: torch.randint(50, (number, 32), generator=draw) for name in ("input_ids", "labels")}


def images(number: int) -> Batch:
    return {"x": torch.zeros(number, 28, 28, dtype=torch.uint8), "labels": torch.zeros(number, dtype=torch.int64)}


def slopes(
    trainable: Trainable, batch_of: Any, dtype: str, *, recomputed: bool = False, many: int, scored: bool = False
) -> tuple[float, float]:
    """(peak bytes, moved bytes) that a row adds."""
    few, several = (
        trace_pass(
            replace(trainable), batch_of(number), policy=policy_for(dtype), device=CPU, recomputed=recomputed,
            budget_s=BUDGET_S + 60.0, scored=scored,
        )
        for number in (many // 2, many)
    )  # fmt: skip
    return tuple(2 * (getattr(several, name) - getattr(few, name)) / many for name in ("peak_bytes", "moved_bytes"))  # type: ignore[return-value]


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_the_formula_of_a_gpt_is_what_a_trace_counts(dtype: str, recomputed: bool) -> None:
    known = model_facts("raytrain.models.gpt:gpt", LANGUAGE, {"vocab_size": 50})
    assert known is not None and known.passes is not None
    peak, moved = slopes(gpt(**LANGUAGE, vocab_size=50), tokens, dtype, recomputed=recomputed, many=16)
    assert known.passes.row_bytes(dtype, recomputed=recomputed) == pytest.approx(peak, rel=0.2)
    if dtype == "fp32" and not recomputed:
        assert known.passes.moved_bytes == pytest.approx(moved, rel=0.2)
    scored, _ = slopes(gpt(**LANGUAGE, vocab_size=50), tokens, dtype, many=16, scored=True)
    assert known.passes.scored_bytes(dtype) == pytest.approx(scored, rel=0.2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_the_formulas_of_plain_networks_are_what_a_trace_counts(kind: str, dtype: str) -> None:
    keys: dict[str, Any] = {"hidden": [256, 128]} if kind == "mlp" else {"channels": [16, 32]}
    source = {"num_features": 784, "num_classes": 10} if kind == "mlp" else IMAGE
    known = model_facts(f"raytrain.models.{kind}:{kind}", keys, source)
    assert known is not None and known.passes is not None
    made: Trainable = (mlp if kind == "mlp" else cnn)(**keys, **source)
    peak, _ = slopes(made, images, dtype, recomputed=False, many=512)
    assert known.passes.row_bytes(dtype, recomputed=False) == pytest.approx(peak, rel=0.2)
    scored, _ = slopes(made, images, dtype, many=512, scored=True)
    assert known.passes.scored_bytes(dtype) == pytest.approx(scored, rel=0.25)


@pytest.mark.parametrize(("dtype", "recomputed"), [("fp32", False), ("bf16", False), ("fp32", True)])
def test_the_formula_of_a_mixture_is_what_a_trace_counts(dtype: str, recomputed: bool) -> None:
    section = ExpertsConfig(num_experts=4, top_k=2)
    known = expert_facts("experts.models:moe_gpt", LANGUAGE, {"vocab_size": 50}, section)
    assert known is not None and known.passes is not None
    made = moe_gpt(**LANGUAGE, vocab_size=50, experts=section)
    peak, _ = slopes(made, tokens, dtype, recomputed=recomputed, many=64)
    assert known.passes.row_bytes(dtype, recomputed=recomputed) == pytest.approx(peak, rel=0.2)
    if recomputed:  # an evaluation recomputes nothing: it is compared once for each format
        return
    scored, _ = slopes(moe_gpt(**LANGUAGE, vocab_size=50, experts=section), tokens, dtype, many=64, scored=True)
    assert known.passes.scored_bytes(dtype) == pytest.approx(scored, rel=0.3)


def test_a_trace_depends_neither_on_weights_nor_on_the_random_state() -> None:
    """Where rows are routed decides the peak of an evaluation: weights and buffers of the copy are always the same."""
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        made = moe_gpt(**LANGUAGE, vocab_size=50, experts=ExpertsConfig(num_experts=4, top_k=2))
        found.append(slopes(made, tokens, "fp32", many=64, scored=True))
    assert found[0] == found[1]
