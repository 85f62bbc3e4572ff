"""The mixture-of-experts builders, as the training loop uses them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from experts.config import ExpertsConfig
from experts.models import moe_gpt, moe_mlp
from raytrain.errors import InputError
from raytrain.trainable import GlobalStep, Trainable, labels_weight

SIZES = {"layers": 2, "heads": 2, "width": 16, "context": 12, "vocab_size": 11}


def committed(counts: torch.Tensor | None, *, skip: bool = False) -> GlobalStep:
    return GlobalStep(norm=torch.tensor(1.0), skip=torch.tensor(skip), counts=counts)


def language(*, seed: int = 0, **experts: object) -> Trainable:
    torch.manual_seed(seed)
    made = moe_gpt(**SIZES, experts=ExpertsConfig(**{"balance_weight": 0.2, "z_loss_weight": 0.1, **experts}))
    made.module.double()
    return made


def rows(*, seed: int = 0, classes: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 2, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(classes, (12,), generator=generator)}


def padded() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(11, (4, 12), generator=generator)
    labels = torch.randint(11, (4, 12), generator=generator)
    mask = torch.arange(12) < torch.tensor([12, 5, 9, 1])[:, None]
    labels[~mask] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask.long()}


def prompted() -> dict[str, torch.Tensor]:
    """`padded`, with a prompt in front of each row's labels; the last row is a prompt alone."""
    batch = padded()
    batch["labels"][torch.arange(12) < torch.tensor([4, 2, 8, 12])[:, None]] = -100
    return batch


def gradients(made: Trainable, batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The gradients of the step as the loop forms it: means weighted by each micro-batch's share."""
    made.module.zero_grad()
    weights = [labels_weight(batch) for batch in batches]
    for batch, weight in zip(batches, weights, strict=True):
        if not weight:  # the loop does not run it
            continue
        out = made.loss(made.module, batch)
        ((out.loss + out.aux) * weight / sum(weights)).backward()
    return {name: p.grad.clone() for name, p in made.module.named_parameters()}


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("batch", [padded(), prompted()], ids=["padded", "prompted"])
@pytest.mark.parametrize("capacity", [None, 0.5])
def test_language_model_gradients_do_not_depend_on_the_split(
    capacity: float | None, batch: dict[str, torch.Tensor]
) -> None:
    made = language(capacity_factor=capacity)
    whole, counts = gradients(made, [batch]), made.counts()
    made.commit(committed(None))
    ragged = [{name: value[rows][:, :longest] for name, value in batch.items()} for rows, longest in
              (([0], 12), ([1], 5), ([3], 1), ([2], 9))]  # fmt: skip
    assert difference(whole, gradients(made, ragged)) < 1e-12
    assert torch.equal(made.counts(), counts)


def test_row_model_gradients_do_not_depend_on_the_split() -> None:
    torch.manual_seed(0)
    made = moe_mlp(width=10, num_features=8, num_classes=3, experts=ExpertsConfig(balance_weight=0.2))
    made.module.double()
    batch = rows()
    made.loss(made.module, batch)
    made.commit(committed(made.counts()))  # from here the balance loss has shares to multiply with
    whole = gradients(made, [batch])
    parts = [{name: value[cut] for name, value in batch.items()} for cut in (slice(0, 5), slice(5, 12))]
    assert difference(whole, gradients(made, parts)) < 1e-12


def test_the_auxiliary_loss_is_separate_in_training_and_absent_in_evaluation() -> None:
    made, batch = language(), padded()
    out = made.loss(made.module, batch)
    assert out.aux.item() > 0 and out.metrics == {}
    made.module.eval()
    evaluated = made.loss(made.module, batch)
    assert evaluated.aux is None
    assert torch.allclose(evaluated.loss, out.loss, atol=1e-12)
    logits = made.module(batch["input_ids"])["logits"]
    kept = batch["labels"] != -100
    hits = (logits.argmax(-1) == batch["labels"])[kept].double().mean()
    assert float(evaluated.metrics["accuracy"]) == pytest.approx(float(hits))


SELECTIVE = {"capacity_factor": 0.5, "temperature": 0.3}
"""Settings of the router that change the outputs of a model."""


def test_logits_do_not_depend_on_labels_and_are_the_same_in_training_evaluation_and_generation() -> None:
    made, batch = language(**SELECTIVE), prompted()
    module, ids, mask = made.module, batch["input_ids"], batch["attention_mask"]
    module.train()
    trained = module(ids, attention_mask=mask)["logits"]
    assert (trained - language(capacity_factor=0.5).module(ids, attention_mask=mask)["logits"]).abs().max() > 1e-4
    assert (trained - language(temperature=0.3).module(ids, attention_mask=mask)["logits"]).abs().max() > 1e-4
    loss = made.loss(module, batch).loss
    module.eval()
    evaluated = module(ids, batch["labels"], mask)
    assert torch.equal(evaluated["logits"], trained)
    assert torch.equal(evaluated["loss"], loss)
    for row, length in enumerate(mask.sum(1).tolist()):
        for stop in range(1, length + 1):  # one token after the other, as in generation: without mask and labels
            generated = module(ids[[row], :stop])["logits"][0, -1]
            assert (generated - trained[row, stop - 1]).abs().max() < 1e-12, (row, stop)


def test_visible_tokens_are_counted_whether_they_have_a_label_or_not_and_padding_is_not() -> None:
    made, batch = language(**SELECTIVE), prompted()
    made.loss(made.module, batch)
    some = made.counts()
    made.commit(committed(None))
    full = torch.where(batch["attention_mask"] > 0, batch["input_ids"], -100)
    full[3] = -100  # as in `prompted`: a row without any label
    made.loss(made.module, batch | {"labels": full})
    assert torch.equal(made.counts(), some)
    visible = int(batch["attention_mask"][:3].sum())
    assert [int(part[:-1].sum()) for part in some.split(5)] == [2 * visible, 2 * visible]
    assert all(int(part[-1]) > 0 for part in some.split(5)), "nothing was dropped"
    made.commit(committed(some))
    parts = some.split(5)
    metrics = made.log_metrics()
    peaks = [float(part[:-1].max() / part[:-1].double().mean()) for part in parts]
    assert float(metrics["load_imbalance"]) == pytest.approx(sum(peaks) / 2)
    assert float(metrics["dropped_fraction"]) == sum(int(part[-1]) for part in parts) / (4 * visible)


def test_rows_without_a_class_are_part_of_no_loss_and_not_counted() -> None:
    torch.manual_seed(0)
    made = moe_mlp(width=10, num_features=8, num_classes=3, experts=ExpertsConfig(balance_weight=0.2))
    made.module.double()
    batch = rows()
    batch["labels"][[0, 1, 2, 7]] = -100
    made.loss(made.module, batch)
    made.commit(committed(made.counts()))
    whole, counts = gradients(made, [batch]), made.counts()
    assert [int(part[:-1].sum()) for part in counts.split(5)] == [2 * 8, 2 * 8]
    made.commit(committed(None))
    parts = [{name: value[cut] for name, value in batch.items()} for cut in (slice(0, 3), slice(3, 5), slice(5, 12))]
    assert difference(whole, gradients(made, parts)) < 1e-12
    assert torch.equal(made.counts(), counts)


def test_language_model_is_causal() -> None:
    made = language(capacity_factor=0.7)
    made.module.eval()
    ids = padded()["input_ids"]
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    a, b = made.module(ids)["logits"], made.module(changed)["logits"]
    # the experts see other row counts, so the last bits of their products may differ
    assert (a - b)[:, :7].abs().max() < 1e-12
    assert (a - b)[:, 7:].abs().max() > 1e-3


def test_counts_metrics_and_bias_go_through_the_trainable() -> None:
    made, batch = language(num_experts=5), padded()
    made.loss(made.module, batch)
    counts = made.counts()
    valid = int((batch["labels"] != -100).sum())
    assert [int(part.sum()) for part in counts.split(6)] == [2 * valid, 2 * valid]
    before = {name: value.clone() for name, value in made.module.state_dict().items() if name.endswith("bias_E")}
    assert len(before) == 2 and made.log_metrics() == {}
    made.commit(committed(counts))
    assert not made.counts().any()
    assert all(made.module.state_dict()[name].any() for name in before)
    assert set(made.log_metrics()) == {"load_imbalance", "dropped_fraction"}


def test_checkpointed_blocks_give_the_same_gradients_and_counts() -> None:
    made, batch = language(), padded()
    plain, counts = gradients(made, [batch]), made.counts()
    made.commit(committed(None))
    for block in getattr(made.module, made.blocks):
        block.forward = lambda *inputs, run=block.forward: checkpoint(run, *inputs, use_reentrant=False)
    assert difference(plain, gradients(made, [batch])) < 1e-12
    assert torch.equal(made.counts(), counts)


def test_both_models_learn() -> None:
    torch.manual_seed(0)
    experts = ExpertsConfig(num_experts=4, top_k=1)
    cases = [(moe_mlp(width=16, num_features=8, num_classes=3, experts=experts), rows())]
    cases += [(moe_gpt(**SIZES, experts=experts), padded())]
    for made, batch in cases:
        made.module.double()
        optimizer = torch.optim.AdamW(made.module.parameters(), lr=0.01)
        losses = []
        for _ in range(40):
            optimizer.zero_grad()
            out = made.loss(made.module, batch)
            (out.loss + out.aux).backward()
            optimizer.step()
            made.commit(committed(made.counts()))
            losses.append(out.loss.item())
        assert losses[-1] < 0.5 * losses[0]


def test_the_section_sets_the_shared_expert_and_the_hidden_width() -> None:
    made = moe_gpt(**SIZES, experts=ExpertsConfig(num_experts=3, hidden=20, shared_expert=True, activation="swiglu"))
    layer = made.module.blocks[0].feed_forward
    assert layer.experts.w1.shape == (3, 20, 16)
    assert layer.shared.w3.shape == (20, 16) and layer.shared.gate is None
    assert moe_gpt(**SIZES, experts=ExpertsConfig()).module.blocks[0].feed_forward.experts.w1.shape == (4, 64, 16)
    section = {"hidden": [8, 20, 8], "bias": True, "shared_expert": True, "shared_gate": True}
    layer = moe_gpt(**SIZES, experts=ExpertsConfig(**section)).module.blocks[0].feed_forward
    assert layer.router.num_experts == 3 and layer.experts.hidden_E == (8, 20, 8)
    assert layer.shared.b1.shape == (20,) and layer.shared.gate.weight.shape == (1, 16)
    made = moe_gpt(**SIZES, experts=ExpertsConfig(shared_expert=True, shared_hidden=5))
    assert made.module.blocks[0].feed_forward.shared.w1.shape == (5, 16)


def test_the_models_build_and_run_under_autocast_and_on_the_meta_device() -> None:
    made = moe_gpt(**SIZES, experts=ExpertsConfig(shared_expert=True))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = made.loss(made.module, padded())
    (out.loss + out.aux).backward()
    assert out.loss.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in made.module.parameters())
    with torch.device("meta"):
        assert moe_gpt(**SIZES, experts=ExpertsConfig()).module.positions.is_meta


def test_mistakes_name_their_key() -> None:
    with pytest.raises(InputError, match=r"experts\.top_k: got 5, expected at most experts\.num_experts, 4"):
        moe_gpt(**SIZES, experts=ExpertsConfig(top_k=5))
    with pytest.raises(InputError, match=r"experts\.capacity_factor: got 1\.25, expected null"):
        moe_mlp(num_features=8, num_classes=3, experts=ExpertsConfig(capacity_factor=1.25))
    with pytest.raises(ValueError, match="num_features"):
        moe_mlp(experts=ExpertsConfig())
    with pytest.raises(
        InputError, match=r"data\.source: got batches with the keys \['attention_mask', 'input_ids', 'labels'\]"
    ):
        made = moe_mlp(num_features=8, num_classes=3, experts=ExpertsConfig())
        made.loss(made.module, padded())
