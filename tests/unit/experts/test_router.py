"""Routing: the experts of each token and their weights, and losses and counts that are additive over any split."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from experts.router import TopKRouter

D, E = 6, 5


def router(top_k: int = 2, *, seed: int = 0, width: int = D, num_experts: int = E, **options: object) -> TopKRouter:
    torch.manual_seed(seed)
    made = TopKRouter(width, num_experts, top_k, **options).double()
    torch.nn.init.normal_(made.weight, std=1.0)
    return made


def tokens(B: int = 4, S: int = 7, *, seed: int = 1, skew: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, S, D, generator=generator, dtype=torch.float64) + skew


@pytest.mark.covers("EXP-03")
@pytest.mark.parametrize(("score", "top_k"), list(itertools.product(["softmax", "sigmoid"], [1, 2, E])))
def test_each_token_reaches_exactly_k_experts_with_weights_that_sum_to_one(score: str, top_k: int) -> None:
    routing = router(top_k, score=score)(tokens())
    assert routing.indices_TK.shape == (28, top_k)
    assert all(len(set(row)) == top_k for row in routing.indices_TK.tolist())
    assert set(routing.indices_TK.flatten().tolist()) <= set(range(E))
    assert torch.allclose(routing.weights_TK.sum(1), torch.ones(28, dtype=torch.float64), atol=1e-12)
    assert routing.counts_E.tolist() == [int((routing.indices_TK == e).sum()) for e in range(E)]


def test_without_renormalisation_the_weights_are_the_scores_of_the_best() -> None:
    layer, x = router(2, renormalize=False), tokens()
    scores = (x.flatten(0, 1) @ layer.weight.T).softmax(-1)
    routing = layer(x)
    assert torch.allclose(routing.weights_TK, scores.sort(descending=True).values[:, :2], atol=1e-14)


@pytest.mark.covers("EXP-04")
def test_noise_is_seeded_and_off_in_evaluation_and_temperature_is_not() -> None:
    noisy, plain, x = router(noise=3.0, temperature=0.5), router(temperature=0.5), tokens()
    torch.manual_seed(5)
    first = noisy(x)
    torch.manual_seed(5)
    again = noisy(x)
    assert torch.equal(first.indices_TK, again.indices_TK) and torch.equal(first.weights_TK, again.weights_TK)
    expected = plain(x)
    assert not torch.equal(first.indices_TK, expected.indices_TK)
    evaluated = noisy.eval()(x)
    assert torch.equal(evaluated.indices_TK, expected.indices_TK)
    assert torch.equal(evaluated.weights_TK, expected.weights_TK)
    assert evaluated.aux is None


@pytest.mark.parametrize("training", [True, False])
def test_temperature_divides_the_logits_in_training_and_evaluation(training: bool) -> None:
    x, plain = tokens(), router(renormalize=False)
    expected = ((x.flatten(0, 1) @ plain.weight.T) / 0.25).softmax(-1).sort(descending=True).values[:, :2]
    cool = router(temperature=0.25, renormalize=False).train(training)(x).weights_TK
    assert torch.allclose(cool, expected, atol=1e-14)


@pytest.mark.parametrize(
    ("scope", "score", "balance", "z"),
    [
        ("sequence", "softmax", "both", 0.1),
        ("sequence", "sigmoid", "loss", 0.0),
        ("batch", "softmax", "loss", 0.1),
        ("sequence", "softmax", "bias", 0.1),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_auxiliary_loss_adds_up_over_any_split(scope: str, score: str, balance: str, z: float, padded: bool) -> None:
    layer = router(score=score, balance=balance, balance_scope=scope, balance_weight=0.3, z_loss_weight=z)
    layer.shares_E.copy_(torch.tensor([0.5, 0.2, 0.2, 0.1, 0.0]))
    x, lengths = tokens(), torch.tensor([7, 3, 5, 1]) if padded else torch.full((4,), 7)
    valid = torch.arange(7) < lengths[:, None]
    whole = layer(x, valid if padded else None).aux
    for parts in ([[0], [1, 2, 3]], [[2, 0], [3], [1]]):
        total = torch.zeros((), dtype=torch.float64)
        for rows in parts:
            cut = int(lengths[rows].max())  # each part is padded to its own longest sequence
            part = layer(x[rows][:, :cut], valid[rows][:, :cut] if padded else None).aux
            total = total + part * lengths[rows].sum() / lengths.sum()
        assert abs(total - whole) < 1e-14


def test_balance_loss_follows_its_formula_and_its_gradient_lowers_it() -> None:
    layer, x = router(1, balance="loss", balance_weight=0.5, z_loss_weight=0.0), tokens(B=2)
    expected = 0.0
    for sequence in x:
        scores = (sequence @ layer.weight.T).softmax(-1)
        shares = torch.bincount(scores.argmax(-1), minlength=E) / len(sequence)
        expected += 0.5 * E * (shares * scores.mean(0)).sum().item() / 2
    aux = layer(x).aux
    assert aux.item() == pytest.approx(expected, abs=1e-14)
    aux.backward()
    with torch.no_grad():
        layer.weight -= 0.1 * layer.weight.grad
    assert layer(x).aux.item() < expected


def test_z_loss_is_the_mean_square_of_the_log_partition() -> None:
    layer, x = router(balance="none", z_loss_weight=0.25), tokens()
    logits = x.flatten(0, 1) @ layer.weight.T
    assert layer(x).aux.item() == pytest.approx(0.25 * torch.logsumexp(logits, 1).square().mean().item(), abs=1e-14)


def test_without_an_auxiliary_loss_it_is_none() -> None:
    assert router(balance="none", z_loss_weight=0.0)(tokens()).aux is None


def test_capacity_drops_the_latest_of_a_sequence_and_counts_them() -> None:
    layer, x = router(capacity_factor=0.8), tokens(skew=1.0)
    limit = math.ceil(0.8 * 7 * 2 / E)
    routing = layer(x)
    free = router()(x)
    kept = torch.ones(4, 7, 2, dtype=torch.bool)
    for b in range(4):
        room = [limit] * E
        for s, k in itertools.product(range(7), range(2)):
            expert = int(free.indices_TK.view(4, 7, 2)[b, s, k])
            kept[b, s, k] = room[expert] > 0
            room[expert] -= 1
    assert torch.equal(routing.kept_TK, kept.view(28, 2))
    assert 0 < int((~kept).sum()) == int(layer.pending_counts[-1])
    assert torch.equal(routing.weights_TK, free.weights_TK * kept.view(28, 2))
    assert int(routing.counts_E.sum()) == int(kept.sum())
    assert layer.pending_counts[:-1].tolist() == free.counts_E.tolist()


def test_ample_capacity_drops_nothing() -> None:
    layer = router(capacity_factor=float(E))
    assert bool(layer(tokens(skew=2.0)).kept_TK.all())
    assert int(layer.pending_counts[-1]) == 0


@pytest.mark.parametrize("context", [None, 7])
def test_with_capacity_no_tokens_fate_depends_on_a_later_token_or_on_padding(context: int | None) -> None:
    layer, x = router(capacity_factor=0.8, context=context), tokens(skew=1.0)
    before = layer(x).kept_TK.view(4, 7, 2)
    changed = x.clone()
    changed[:, 5:] = tokens(seed=9)[:, 5:]
    assert torch.equal(layer(changed).kept_TK.view(4, 7, 2)[:, :5], before[:, :5])
    longer = torch.cat([x, tokens(seed=3)], dim=1)
    valid = (torch.arange(14) < 7).expand(4, 14)
    assert torch.equal(layer(longer, valid).kept_TK.view(4, 14, 2)[:, :7], before)


def test_with_a_context_a_prefix_keeps_what_the_whole_sequence_keeps() -> None:
    layer, x = router(capacity_factor=0.8, context=7), tokens(skew=1.0)
    before = layer(x).kept_TK.view(4, 7, 2)
    assert not before.all()
    for length in range(1, 7):
        assert torch.equal(layer(x[:, :length]).kept_TK.view(4, length, 2), before[:, :length])


def test_tokens_of_weight_zero_are_routed_and_take_capacity_but_are_not_counted() -> None:
    layer, x = router(capacity_factor=0.8), tokens(skew=1.0)
    plain = layer(x)
    kept = plain.kept_TK.view(4, 7, 2)
    layer.commit(None, skipped=False)
    weight = torch.tensor([1.0, 0.5, 0.0, 2.0])[:, None].expand(4, 7)
    routing = layer(x, None, weight)
    assert torch.equal(routing.indices_TK, plain.indices_TK) and torch.equal(routing.kept_TK, plain.kept_TK)
    assert torch.equal(routing.counts_E, plain.counts_E)
    counted = plain.indices_TK.view(4, 7, 2)[weight[:, 0] > 0].flatten()
    assert layer.pending_counts[:-1].tolist() == torch.bincount(counted, minlength=E).tolist()
    assert int(layer.pending_counts[-1]) == int((~kept[weight[:, 0] > 0]).sum()) > 0
    rows = [layer(x[[row]]).aux.item() for row in range(4)]
    mean = (rows[0] + 0.5 * rows[1] + 2 * rows[3]) / 3.5
    assert routing.aux.item() == pytest.approx(mean, abs=1e-14)


def test_bias_decides_selection_but_never_enters_the_weights() -> None:
    layer, x = router(2), tokens()
    layer.bias_E[3] = 10.0
    routing = layer(x)
    assert bool((routing.indices_TK == 3).any(1).all())
    scores = (x.flatten(0, 1) @ layer.weight.T).softmax(-1).gather(1, routing.indices_TK)
    assert torch.allclose(routing.weights_TK, scores / scores.sum(1, keepdim=True), atol=1e-14)


def test_commit_moves_the_bias_by_the_sign_of_the_global_counts() -> None:
    layer = router(bias_rate=0.5)
    layer(tokens())
    assert int(layer.pending_counts.sum()) == 56
    layer.commit(torch.tensor([10, 0, 4, 4, 2, 7]), skipped=False)
    assert layer.bias_E.tolist() == [-0.5, 0.5, 0.0, 0.0, 0.5]
    assert layer.shares_E.tolist() == [0.5, 0.0, 0.2, 0.2, 0.1]
    assert int(layer.pending_counts.sum()) == 0


@pytest.mark.parametrize("skipped", [True, torch.tensor(True)])
def test_a_skipped_or_dropped_step_moves_no_experts(skipped: bool | torch.Tensor) -> None:
    layer = router(bias_rate=0.5)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer(tokens())
    layer.commit(torch.tensor([10, 0, 4, 4, 2, 0]), skipped=skipped)
    layer.commit(None, skipped=False)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert int(layer.pending_counts.sum()) == 0


def test_the_bias_alone_evens_out_a_skewed_load() -> None:
    layer, x = router(2, balance="bias", bias_rate=0.003), tokens(B=16, S=16, skew=0.5)
    peaks = []
    for _ in range(400):
        counts_E = layer(x).counts_E.double()
        peaks.append(float(counts_E.max() / counts_E.mean()))
        layer.commit(layer.pending_counts.clone(), skipped=False)
    assert peaks[0] > 1.5 and sum(peaks[-20:]) / 20 < 1.1


def test_only_training_forwards_are_counted_and_recompute_is_not() -> None:
    layer, x = router(), tokens().requires_grad_()
    layer.eval()(x)
    assert int(layer.pending_counts.sum()) == 0
    layer.train()
    checkpoint(lambda y: layer(y).weights_TK.square().sum(), x, use_reentrant=False).backward()
    assert int(layer.pending_counts.sum()) == 56
    layer(x, torch.arange(7).expand(4, 7) < 3)
    assert int(layer.pending_counts.sum()) == 56 + 4 * 3 * 2
    assert "pending_counts" not in layer.state_dict()


def test_scores_are_float32_under_autocast_and_counts_are_integers_in_any_dtype() -> None:
    layer = router().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = layer(tokens().bfloat16())
    assert routing.weights_TK.dtype == torch.float32
    assert router().bfloat16()(tokens().bfloat16()).weights_TK.dtype == torch.float32
    assert layer.half().pending_counts.dtype == torch.int64


def test_more_choices_than_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="top_k is 6, expected 1 to num_experts"):
        TopKRouter(D, E, 6)
