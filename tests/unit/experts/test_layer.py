"""The layer against a loop over tokens and choices, in float64: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experts.config import ExpertsConfig, weight_shapes
from experts.grouped import GroupedExperts, UnevenExperts, build_experts
from experts.layer import MoELayer, combine, dispatch
from experts.models import moe_layer
from experts.router import TopKRouter

D = 6


def layer(**options: object) -> MoELayer:
    torch.manual_seed(0)
    made = moe_layer(D, ExpertsConfig(**{"num_experts": 5, "hidden": 7, **options}), residual_scale=1.0).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.7)
    return made


def tokens(B: int = 3, S: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(B, S, D, generator=generator, dtype=torch.float64)


def dense(made: MoELayer, x_BSD: Tensor) -> Tensor:
    """The same mathematics, one token and one expert at a time."""
    routing, experts, rows = made.router(x_BSD), made.experts, []
    for x, indices, weights in zip(x_BSD.reshape(-1, D), routing.indices_TK, routing.weights_TK, strict=True):
        y = torch.zeros_like(x)
        for e, weight in zip(indices.tolist(), weights, strict=True):
            w, zero = weights_of(experts, e), torch.zeros(())
            up = w["w1"] @ x + w.get("b1", zero)
            inner = {"gelu": F.gelu, "relu": torch.relu, "swiglu": F.silu}[experts.activation](up)
            if experts.activation == "swiglu":
                inner = inner * (w["w3"] @ x + w.get("b3", zero))
            y = y + weight * (w["w2"] @ inner + w.get("b2", zero))
        rows.append(y if made.shared is None else y + made.shared(x))
    return torch.stack(rows).view_as(x_BSD)


def weights_of(experts: nn.Module, e: int) -> dict[str, Tensor]:
    """As `weights_of`, with a graph behind it."""
    for run in getattr(experts, "runs", [experts]):
        if e < len(run.hidden_E):
            return {name: getattr(run, name)[e] for name in run.names}
        e -= len(run.hidden_E)
    raise AssertionError


def gradients(made: MoELayer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    made.zero_grad()
    x.grad = None
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"x": x.grad.clone()} | {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "swiglu", "top_k": 3},
        {"top_k": 1, "renormalize": False},
        {"score": "sigmoid", "shared_expert": True},
        {"capacity_factor": 0.6, "shared_expert": True, "activation": "swiglu"},
        {"activation": "relu", "bias": True, "shared_expert": True},
        {"activation": "swiglu", "bias": True, "hidden": [3, 3, 9, 1, 3]},
        {"hidden": [4, 8, 8, 8, 2], "capacity_factor": 0.6, "shared_expert": True, "shared_gate": True},
    ],
)
def test_layer_equals_the_dense_reference(options: dict[str, object]) -> None:
    made, x = layer(**options), tokens().requires_grad_()
    y, expected = made(x)[0], dense(made, x)
    assert (y - expected).abs().max() < 1e-12
    ours, theirs = gradients(made, x, y), gradients(made, x, expected)
    assert set(ours) >= set(theirs)
    # an expert that the reference never calls has no gradient there, and zeros here
    assert all((value - theirs.get(name, 0.0)).abs().max() < 1e-12 for name, value in ours.items())


class Identity(nn.Module):
    """Experts that return their rows."""

    def forward(self, x_RD: Tensor, counts_E: Tensor, splits: list[int] | None = None) -> Tensor:
        return x_RD


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_with_identity_experts_the_layer_is_the_identity_and_so_is_its_gradient(top_k: int) -> None:
    made, x = MoELayer(TopKRouter(D, 4, top_k), Identity()).double(), tokens().requires_grad_()
    y = made(x)[0]
    assert (y - x).abs().max() < 1e-14
    upstream = tokens(B=3).flip(0)
    (gradient,) = torch.autograd.grad(y, x, upstream)
    assert (gradient - upstream).abs().max() < 1e-12


def test_rows_coded_by_powers_of_two_come_back_summed_exactly_once() -> None:
    x = torch.ones(4, 1, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([7, 0, 3, 2, 5, 1, 6, 4])
    rows = dispatch(x, order, top_k=2)
    rows.backward(torch.tensor([[2.0**place] for place in order.tolist()], dtype=torch.float64))
    assert x.grad.flatten().tolist() == [1 + 2, 4 + 8, 16 + 32, 64 + 128]
    y = combine(order.double().unsqueeze(1), order, torch.ones(4, 2, dtype=torch.float64))
    assert y.flatten().tolist() == [0 + 1, 2 + 3, 4 + 5, 6 + 7]


def test_experts_without_tokens_get_zero_gradients_not_none() -> None:
    made, x = layer(top_k=1), tokens()
    made.router.bias_E[2] = 100.0  # everything goes to expert 2
    made(x)[0].sum().backward()
    for weight in made.experts.parameters():
        assert [bool(g.any()) for g in weight.grad] == [False, False, True, False, False]


def test_no_token_at_all_still_gives_every_weight_its_zeros() -> None:
    experts = GroupedExperts(3, D, 7, activation="swiglu")
    y = experts(torch.zeros(0, D), torch.zeros(3, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == (0, D)
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


def test_uneven_experts_without_a_row_give_every_weight_its_zeros() -> None:
    experts = UnevenExperts(D, [4, 4, 7, 2], activation="relu", bias=True)
    for counts in ([0, 0, 0, 0], [0, 0, 5, 0]):
        experts.zero_grad()
        x = torch.ones(sum(counts), D, requires_grad=True)
        experts(x, torch.tensor(counts)).sum().backward()
        assert all(p.grad is not None for p in experts.parameters())
        assert [bool(run.b2.grad.any()) for run in experts.runs] == [False, any(counts), False]


def test_the_weights_of_one_expert_have_the_names_and_shapes_that_the_plan_counts() -> None:
    kind = {"activation": "swiglu", "bias": True}
    experts = build_experts(D, [4, 4, 7, 2], **kind)
    assert experts.hidden_E == (4, 4, 7, 2)
    for e, hidden in enumerate(experts.hidden_E):
        views = experts.weights_of(e)
        assert {name: tuple(view.shape) for name, view in views.items()} == weight_shapes(D, hidden, **kind)
        assert list(views) == ["w1", "w2", "w3", "b1", "b2", "b3"]  # the order in which they are packed
        views["b2"].fill_(e + 1.0)
    assert experts.runs[0].b2[:, 0].tolist() == [1.0, 2.0] and experts.runs[2].b2[0, 0] == 4.0
    with pytest.raises(IndexError, match="expert 4 of 4"):
        experts.weights_of(4)


@pytest.mark.parametrize(
    ("activation", "bias", "dtype", "tolerance"),
    [
        ("gelu", False, torch.bfloat16, 0.05),
        ("swiglu", False, torch.bfloat16, 0.05),
        ("gelu", True, torch.float32, 1e-5),
        ("relu", True, torch.float32, 1e-5),
        ("swiglu", True, torch.float32, 1e-5),
    ],
)
def test_grouped_product_equals_the_loop(activation: str, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    experts = GroupedExperts(4, 16, 32, activation=activation, bias=bias).double()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    counts = torch.tensor([5, 0, 9, 2])
    x = torch.randn(16, 16, dtype=torch.float64)
    looped = experts._looped(x, counts.tolist())
    expected = torch.autograd.grad(looped.square().sum(), list(experts.parameters()))
    rounded = experts.to(dtype)
    grouped = rounded._grouped(x.to(dtype), counts, dtype)
    found = torch.autograd.grad(grouped.square().sum(), list(rounded.parameters()))
    assert (grouped.double() - looped).abs().max() < tolerance * looped.abs().max()
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.double() - theirs).abs().max() < tolerance * theirs.abs().max()
        assert not ours[1].any()


def test_output_dtype_is_the_inputs_under_autocast_and_in_low_precision() -> None:
    made, x = layer(shared_expert=True).float(), tokens().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = made(x)[0]
    assert cast.dtype == torch.float32
    assert (cast - made(x)[0]).abs().max() < 0.05 * cast.abs().max()
    assert made.bfloat16()(x.bfloat16())[0].dtype == torch.bfloat16


def test_a_dropped_row_returns_zeros() -> None:
    made, x = layer(top_k=1, capacity_factor=0.01), tokens()
    y, kept = made(x)[0].view(-1, D), made.router(x).kept_TK[:, 0]
    assert 0 < int(kept.sum()) < len(kept)
    assert not y[~kept].any() and bool(y[kept].any(1).all())


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="0 experts"):
        GroupedExperts(0, D, 7)
