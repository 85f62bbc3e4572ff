"""Our expert layer against transformers' own, with the same weights: outputs, gradients, and whole models both ways."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from experts.huggingface import export_layers, from_layout, load_layers, to_layout
from experts.layer import MoELayer
from raytrain.models.weights.stored import StoredTensors

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra `transformers`)")

D, E, K = 16, 5, 2
COMMON = {
    "hidden_size": D, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 23, "num_experts_per_tok": K,
}  # fmt: skip
QWEN2 = {"num_experts": E, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 14}
QWEN3 = {"num_experts": E, "moe_intermediate_size": 10, "head_dim": 8}
MODELS = {
    "mixtral": ("Mixtral", {"num_local_experts": E}),
    "qwen2_moe": ("Qwen2Moe", {**QWEN2, "norm_topk_prob": False}),
    "qwen2_moe, normed": ("Qwen2Moe", {**QWEN2, "norm_topk_prob": True}),
    "qwen3_moe": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True}),
    "qwen3_moe, not normed": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": False}),
}


def whole(name: str) -> Any:
    """A tiny model with weights large enough for every expert to matter."""
    stem, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{stem}Config")(**COMMON, **options)
    config._experts_implementation = "eager"  # a loop; their grouped product takes no float64 and no width of 10
    made = getattr(transformers, f"{stem}ForCausalLM")(config)
    for parameter in made.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.4)
    return made.eval()


def ours_of(name: str, state: dict[str, Tensor]) -> MoELayer:
    renormalize = MODELS[name][1].get("norm_topk_prob", True)
    return from_layout(state, layout(name), top_k=K, renormalize=renormalize)


def layout(name: str) -> Any:
    return name.split(",")[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_has_their_outputs_and_their_gradients(name: str) -> None:
    """In float64, where only their router's softmax in float32 keeps the two apart."""
    theirs = whole(name).double().model.layers[0].mlp
    ours = ours_of(name, theirs.state_dict())
    x = torch.randn(3, 11, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    upstream, inputs = torch.randn_like(x), [x.clone().requires_grad_(), x.clone().requires_grad_()]
    y, expected = ours(inputs[0])[0], theirs(inputs[1])
    assert expected.abs().mean() > 0.1
    assert (y - expected).abs().max() < 1e-6 * expected.abs().max()
    y.backward(upstream)
    expected.backward(upstream)
    slopes = copy.deepcopy(ours)  # gradients in the place of weights, so that they can be named as theirs
    for parameter, weight in zip(slopes.parameters(), ours.parameters(), strict=True):
        parameter.data = weight.grad
    found = to_layout(slopes, layout(name), fused=True) | {"x": inputs[0].grad}
    wanted = {n: p.grad for n, p in theirs.named_parameters()} | {"x": inputs[1].grad}
    assert found.keys() == wanted.keys()
    for part, value in wanted.items():
        assert value.abs().max() > 1e-3, part
        assert (found[part] - value).abs().max() < 1e-6 * value.abs().max(), part


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_full_model_is_read_from_library_files_and_written_back(name: str, tmp_path: Path) -> None:
    theirs, ids = whole(name), torch.arange(20).view(2, 10)
    theirs.save_pretrained(tmp_path / "theirs")
    layers = nn.ModuleList(ours_of(name, part.mlp.state_dict()) for part in whole(name).model.layers)
    for parameter in layers.parameters():
        nn.init.zeros_(parameter)
    assert load_layers(layers, StoredTensors(tmp_path / "theirs"), layout(name)) == (0, 1)
    x = torch.randn(2, 6, D)
    for ours, part in zip(layers.eval(), theirs.model.layers, strict=True):
        assert (ours(x)[0] - part.mlp(x)).abs().max() < 1e-5 * part.mlp(x).abs().max()

    # their own files again, with the weights of our layers in the place of theirs, and moved a little
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.mul_(1.25)
    stored = load_file(tmp_path / "theirs" / "model.safetensors")
    exported = export_layers(layers, layout(name))
    assert set(exported) <= set(stored)  # exactly the names that they wrote
    (tmp_path / "ours").mkdir()
    theirs.config.save_pretrained(tmp_path / "ours")
    save_file(stored | exported, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    again = type(theirs).from_pretrained(tmp_path / "ours", experts_implementation="eager").eval()
    for ours, part in zip(layers, again.model.layers, strict=True):
        assert (ours(x)[0] - part.mlp(x)).abs().max() < 1e-5 * part.mlp(x).abs().max()
    theirs.load_state_dict(theirs.state_dict() | export_layers(layers, layout(name), fused=True))
    assert torch.equal(again(input_ids=ids).logits, theirs(input_ids=ids).logits)
