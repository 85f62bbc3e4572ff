"""The built-in dense models: their mathematics, their sizes by formula, their mistakes."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.config.user_code import resolve
from raytrain.errors import InputError
from raytrain.models.cnn import cnn
from raytrain.models.gpt import Head, gpt
from raytrain.models.mlp import mlp
from raytrain.models.sizes import DENSE_BUILDERS, SizeError, model_facts
from raytrain.trainable import Trainable

SIZES = {"layers": 2, "heads": 2, "width": 16, "context": 12, "vocab_size": 11}
IMAGE = {"num_features": 140, "num_classes": 3, "image_shape": (10, 14)}
BUILDS: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    ("raytrain.models.gpt:gpt", gpt, SIZES, {}),
    ("raytrain.models.gpt:gpt", gpt, {**SIZES, "layers": 1, "heads": 4, "dropout": 0.1}, {}),
    ("raytrain.models.gpt:gpt", gpt, {**SIZES, "width": 24, "context": 5, "vocab_size": 40}, {}),
    ("raytrain.models.mlp:mlp", mlp, {}, {"num_features": 140, "num_classes": 3}),
    ("raytrain.models.mlp:mlp", mlp, {"hidden": 5, "num_features": 140}, {}),
    ("raytrain.models.mlp:mlp", mlp, {"hidden": [], "num_features": 140}, {"num_classes": 3}),
    ("raytrain.models.cnn:cnn", cnn, {}, {"image_shape": (10, 14), "num_classes": 3}),
    ("raytrain.models.cnn:cnn", cnn, {"channels": [4, 6, 8], "num_classes": 2}, {"image_shape": (2, 10, 14)}),
]


def language(B: int = 3, S: int = 12) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(11, (B, S), generator=generator) for name in ("input_ids", "labels")}


def pixels(n: int = 40) -> dict[str, Tensor]:
    """Images whose class is the brightest of three vertical bands."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(3, (n,), generator=generator)
    x = torch.randint(100, (n, 10, 14), generator=generator, dtype=torch.uint8)
    for band in range(3):
        x[labels == band, :, 4 * band : 4 * band + 5] += 150
    return {"x": x, "labels": labels}


def reference(module: torch.nn.Module, ids: Tensor) -> Tensor:
    """The same GPT written out: explicit mask, one head at a time."""
    x = module.tokens.weight[ids] + module.positions[: ids.shape[1]]
    S, D = x.shape[1:]
    later = torch.ones(S, S, dtype=torch.bool).triu(1)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return weight * centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    for block in module.blocks:
        q, k, v = (norm(x, block.norm_attention.weight) @ block.attention.qkv.weight.T).split(D, dim=-1)
        heads = []
        for part in range(2):
            cut = slice(part * D // 2, (part + 1) * D // 2)
            scores = q[..., cut] @ k[..., cut].transpose(1, 2) / math.sqrt(D // 2)
            heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[..., cut])
        x = x + torch.cat(heads, -1) @ block.attention.out.weight.T
        loader = block.feed_forward
        x = x + F.gelu(norm(x, block.norm_feed_forward.weight) @ loader.up.weight.T) @ loader.out.weight.T
    return norm(x, module.norm.weight) @ module.tokens.weight.T


def test_gpt_equals_the_model_written_out() -> None:
    torch.manual_seed(0)
    made, batch = gpt(**SIZES), language()
    made.module.double()
    for norm in [m for m in made.module.modules() if isinstance(m, torch.nn.LayerNorm)]:
        torch.nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    expected = reference(made.module, batch["input_ids"])
    assert (made.module(batch["input_ids"])["logits"] - expected).abs().max() < 1e-12
    picked = expected.log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1))
    assert abs(made.loss(made.module, batch).loss + picked.mean()) < 1e-12


def test_gpt_sees_no_later_token() -> None:
    made, ids = gpt(**SIZES), language()["input_ids"]
    made.module.double()
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 11
    a, b = made.module(ids)["logits"], made.module(changed)["logits"]
    assert (a - b)[:, :7].abs().max() < 1e-12
    assert (a - b)[:, 7:].abs().max() > 1e-3


def test_gpt_excludes_ignored_labels_from_loss_and_accuracy() -> None:
    made, batch = gpt(**SIZES), language()
    made.module.double().eval()
    short = {name: value[:, :5] for name, value in batch.items()}
    batch["labels"][:, 5:] = -100
    full, cut = made.loss(made.module, batch), made.loss(made.module, short)
    assert abs(full.loss - cut.loss) < 1e-12
    assert full.metrics["accuracy"] == cut.metrics["accuracy"]


def test_gpt_in_training_returns_the_loss_alone() -> None:
    made, batch = gpt(**SIZES), language()
    assert set(made.module(**batch)) == {"loss"}
    assert made.loss(made.module, batch).metrics == {}
    assert set(made.module.eval()(**batch)) == {"loss", "logits"}


def test_gpt_has_no_biases_ties_its_head_and_every_weight_has_a_gradient() -> None:
    made = gpt(**SIZES)
    names = [name for name, _ in made.module.named_parameters()]
    assert not [name for name in names if "bias" in name or name.startswith("head")]
    assert made.module.head.weight is made.module.tokens.weight
    made.loss(made.module, language()).loss.backward()
    assert all(bool(p.grad.any()) for p in made.module.parameters())
    assert isinstance(getattr(made.module, made.blocks), torch.nn.ModuleList)


def test_gpt_starts_with_small_weights_and_smaller_residual_ones() -> None:
    torch.manual_seed(0)
    made = gpt(layers=8, heads=2, width=64, context=16, vocab_size=64)
    block = made.module.blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for writer in (block.attention.out, block.feed_forward.out):
        assert writer.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    ids = torch.arange(17).unsqueeze(0)
    first = made.loss(made.module, {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}).loss
    assert first.item() == pytest.approx(math.log(64), rel=0.1)


def test_gpt_dropout_is_off_in_evaluation() -> None:
    torch.manual_seed(0)
    made, batch = gpt(**SIZES, dropout=0.5), language()
    assert made.loss(made.module, batch).loss != made.loss(made.module, batch).loss
    made.module.eval()
    assert made.loss(made.module, batch).loss == made.loss(made.module, batch).loss


@pytest.mark.parametrize("kind", [mlp, cnn])
def test_image_models_learn_and_accept_bytes_and_floats(kind: Any) -> None:
    torch.manual_seed(0)
    facts = {name: IMAGE[name] for name in inspect.signature(kind).parameters if name in IMAGE}
    made, batch = kind(**facts), pixels()
    optimizer = torch.optim.AdamW(made.module.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        made.loss(made.module, batch).loss.backward()
        optimizer.step()
    made.module.eval()
    out = made.loss(made.module, batch)
    assert out.metrics["accuracy"].item() == 1.0
    as_floats = made.loss(made.module, {**batch, "x": batch["x"].double().flatten(1) / 255})
    assert torch.allclose(as_floats.loss, out.loss, rtol=1e-5)


def test_numbers_are_regressed_by_mean_squared_error() -> None:
    made = mlp(num_features=4)
    made.module.double().eval()
    generator = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(9, 4, generator=generator), "labels": torch.randn(9, generator=generator)}
    out = made.loss(made.module, batch)
    error = made.module(batch["x"])[:, 0] - batch["labels"]
    assert abs(out.loss - error.square().mean()) < 1e-14
    assert out.metrics == {}


@pytest.mark.parametrize(("builder", "function", "keys", "source"), BUILDS)
def test_sizes_by_formula_equal_the_built_model(
    builder: str, function: Any, keys: dict[str, Any], source: dict[str, Any]
) -> None:
    made: Trainable = function(**keys, **source)
    facts = model_facts(builder, keys, source)
    assert facts.parameters == sum(p.numel() for p in made.module.parameters())
    assert facts.trainable_bytes == 4 * facts.parameters
    assert facts.flops_per_sample == made.flops_per_sample


@pytest.mark.parametrize(("builder", "function", "keys", "source"), BUILDS[:4] + BUILDS[6:])
def test_the_activation_estimate_is_close_to_the_bytes_that_autograd_saves(
    builder: str, function: Any, keys: dict[str, Any], source: dict[str, Any]
) -> None:
    made: Trainable = function(**keys, **source)
    kept, alive, B = {}, [], 8
    shape = source.get("image_shape") or (140,)
    batch = {"x": torch.randint(255, (B, *shape), dtype=torch.uint8), "labels": torch.randint(2, (B,))}
    if function is gpt:
        batch = {name: torch.randint(11, (B, keys["context"])) for name in ("input_ids", "labels")}
    outside = {t.untyped_storage().data_ptr() for t in [*made.module.parameters(), *batch.values()]}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made.loss(made.module, batch)
    estimate = model_facts(builder, keys, source).activation_bytes_per_sample
    assert sum(kept.values()) / B == pytest.approx(estimate, rel=0.15)


@pytest.mark.parametrize("builder", DENSE_BUILDERS)
def test_the_table_lists_the_parameters_of_the_builder(builder: str) -> None:
    parameters = inspect.signature(resolve(builder, "model.builder")).parameters
    known = DENSE_BUILDERS[builder]
    assert {*known.required, *known.defaults} == set(parameters)
    assert all(parameters[name].default is inspect.Parameter.empty for name in known.required)
    assert all(parameters[name].default == value for name, value in known.defaults.items())


def test_facts_wait_for_the_source() -> None:
    keys = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    assert model_facts("raytrain.models.gpt:gpt", keys, {}) is None
    assert model_facts("raytrain.models.gpt:gpt", keys, {"vocab_size": 11}).parameters > 0
    assert model_facts("raytrain.models.cnn:cnn", {}, {"num_classes": 3}) is None
    assert model_facts("my.own:build", {"anything": 1}, {}) is None


@pytest.mark.parametrize(
    ("function", "keys", "key"),
    [
        (gpt, {**SIZES, "width": 15}, "width"),
        (gpt, {**SIZES, "layers": 0}, "layers"),
        (gpt, {**SIZES, "heads": "2"}, "heads"),
        (gpt, {**SIZES, "context": True}, "context"),
        (gpt, {**SIZES, "dropout": 1.0}, "dropout"),
        (gpt, {**SIZES, "dropout": "none"}, "dropout"),
        (mlp, {"hidden": [4, 0], "num_features": 3}, "hidden"),
        (mlp, {"hidden": "many", "num_features": 3}, "hidden"),
        (mlp, {}, "num_features"),
        (cnn, {"image_shape": [28]}, "image_shape"),
        (cnn, {}, "image_shape"),
        (cnn, {"image_shape": [28, 28], "channels": [4] * 5}, "channels"),
        (cnn, {"image_shape": [28, 28], "num_classes": -1}, "num_classes"),
    ],
)
def test_experts_that_cannot_be_built_are_refused_by_key(function: Any, keys: dict[str, Any], key: str) -> None:
    with pytest.raises(SizeError) as caught:
        function(**keys)
    assert caught.value.key == key
    builder = f"{function.__module__}:{function.__name__}"
    if all(name in keys for name in ("num_features", "image_shape") if name == key):
        with pytest.raises(InputError) as planned:
            model_facts(builder, keys, {"num_features": 3, "vocab_size": 11})
        assert planned.value.key == f"model.{key}"


@pytest.mark.parametrize(
    ("builder", "keys", "key"),
    [
        ("raytrain.models.gpt:gpt", {**SIZES, "vocab_size": None, "layers": "abc"}, "model.layers"),
        ("raytrain.models.gpt:gpt", {**SIZES, "vocab_size": None, "window": 0}, "model.window"),
        ("raytrain.models.mlp:mlp", {"hidden": [0]}, "model.hidden"),
        ("raytrain.models.cnn:cnn", {"channels": [8] * 9, "dropout": 2}, "model.dropout"),
    ],
)
def test_the_plan_refuses_a_wrong_key_before_the_data_tells_the_others(
    builder: str, keys: dict[str, Any], key: str
) -> None:
    with pytest.raises(InputError) as caught:
        model_facts(builder, keys, {})
    assert caught.value.key == key
    right = {"gpt": {**SIZES, "vocab_size": None}, "mlp": {}, "cnn": {"channels": [8] * 9}}
    assert model_facts(builder, right[builder.rpartition(":")[2]], {}) is None


def test_data_of_another_kind_is_an_input_error() -> None:
    made = mlp(num_features=4)
    with pytest.raises(InputError, match=r"data\.source: got batches with the keys \['input_ids'"):
        made.loss(made.module, language())
    with pytest.raises(InputError, match=r"model\.num_classes: got one output and whole-number labels"):
        made.loss(made.module, {"x": torch.zeros(2, 4), "labels": torch.tensor([0, 1])})
    long = gpt(**{**SIZES, "context": 6})
    with pytest.raises(ValueError, match="12 tokens is longer than the context of 6"):
        long.module(language()["input_ids"])


@pytest.mark.parametrize(("builder", "function", "keys", "source"), BUILDS)
def test_every_builder_works_on_the_meta_device(
    builder: str, function: Any, keys: dict[str, Any], source: dict[str, Any]
) -> None:
    with torch.device("meta"):
        made = function(**keys, **source)
    assert all(parameter.is_meta for parameter in made.module.parameters())


@pytest.mark.parametrize(("vocabulary", "padded"), [(37, 64), (64, 64), (100, 128)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_padded_head_of_a_gpu_has_the_loss_and_the_gradients_of_the_given_vocabulary(
    vocabulary: int, padded: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    made = gpt(layers=1, heads=1, width=8, context=6, vocab_size=vocabulary)
    module, ids = made.module.to(torch.float64), torch.randint(vocabulary, (3, 7))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:].clone()}
    batch["labels"][0, :2] = -100
    columns: list[int] = []
    found: list[list[Tensor]] = []
    module.get_submodule("head").register_forward_hook(lambda *given: columns.append(given[-1].shape[-1]))
    half = dtype is torch.bfloat16
    module.float() if half else module.double()
    for pads in (False, True):
        monkeypatch.setattr(Head, "pads", pads)
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            loss = made.loss(module.train(), batch).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
        assert module(input_ids=ids[:, :-1])["logits"].shape[-1] == vocabulary
        assert torch.isfinite(module.eval()(**batch)["logits"]).all()
    assert columns == [vocabulary] * 3 + [padded, padded, vocabulary], "in training only"
    torch.testing.assert_close(*found, rtol=1e-2 if half else 1e-12, atol=1e-4 if half else 1e-12)
    assert module.state_dict()["head.weight"].shape == (vocabulary, 8)
    assert all(torch.isfinite(one).all() for one in found[1])
