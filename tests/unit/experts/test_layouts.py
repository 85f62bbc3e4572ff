"""Names and shapes of other projects' expert weights: read, written, and refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from experts.config import ExpertsConfig
from experts.grouped import SharedExpert
from experts.huggingface import export_layers, from_layout, load_layers, to_layout
from experts.layer import MoELayer
from experts.models import moe_layer
from raytrain.errors import InputError
from raytrain.models.weights.stored import StoredTensors

E, D, F = 3, 8, 5
SECTIONS = {
    "mixtral": {},
    "qwen2_moe": {"shared_expert": True, "shared_gate": True, "shared_hidden": 6, "renormalize": False},
    "qwen3_moe": {"renormalize": False},
}


def layer(layout: str = "mixtral", **section: object) -> MoELayer:
    options = {"num_experts": E, "hidden": F, "activation": "swiglu", **SECTIONS[layout], **section}
    return moe_layer(D, ExpertsConfig(**options), residual_scale=1.0)


def model(layout: str = "mixtral", layers: int = 2) -> nn.ModuleList:
    return nn.ModuleList(layer(layout) for _ in range(layers))


def outputs(made: MoELayer) -> Tensor:
    return made.eval()(torch.randn(2, 6, D, generator=torch.Generator().manual_seed(1)))[0]


@pytest.mark.parametrize("layout", list(SECTIONS))
@pytest.mark.parametrize("fused", [False, True])
def test_a_saved_and_loaded_layer_computes_the_same(layout: str, fused: bool) -> None:
    made = layer(layout)
    state = to_layout(made, layout, prefix="deep.", fused=fused)
    assert len({value.untyped_storage().data_ptr() for value in state.values()}) == len(state)  # as save_file wants it
    renormalize = made.router.renormalize
    again = from_layout(state | {"other": torch.ones(1)}, layout, top_k=2, renormalize=renormalize, prefix="deep.")
    assert torch.equal(outputs(made), outputs(again))
    assert all(parameter.requires_grad and parameter.is_contiguous() for parameter in again.parameters())
    before = outputs(again)
    for value in state.values():
        value.zero_()
    assert torch.equal(outputs(again), before)  # no storage is shared with the tensors that were read


def test_a_temperature_becomes_part_of_the_router_weights() -> None:
    made = layer(temperature=0.5)
    state = to_layout(made, "mixtral")
    plain = from_layout(state, "mixtral", top_k=2, renormalize=True)
    assert torch.allclose(outputs(plain), outputs(made), atol=1e-7)
    again = from_layout(state, "mixtral", top_k=2, renormalize=True, temperature=0.5)
    assert torch.equal(outputs(again), outputs(made))
    other = nn.ModuleList([layer(temperature=0.5)])
    load_layers(other, export_layers(nn.ModuleList([made]), "mixtral"), "mixtral")
    assert torch.equal(outputs(other[0]), outputs(made))  # type: ignore[arg-type]


def test_the_names_are_those_of_the_files() -> None:
    names = {name: tuple(value.shape) for name, value in export_layers(model(), "mixtral", numbers=[1, 3]).items()}
    stem = "model.layers.3.block_sparse_moe."
    assert names[f"{stem}gate.weight"] == (E, D)
    assert names[f"{stem}experts.2.w1.weight"] == names[f"{stem}experts.2.w3.weight"] == (F, D)
    assert names[f"{stem}experts.2.w2.weight"] == (D, F)
    assert len(names) == 2 * (1 + 3 * E)
    assert not any(name.startswith("model.layers.0.") for name in names)
    qwen = to_layout(layer("qwen2_moe"), "qwen2_moe", prefix="mlp.")
    assert {"mlp.experts.0.gate_proj.weight", "mlp.shared_expert.up_proj.weight"} < set(qwen)
    assert qwen["mlp.shared_expert_gate.weight"].shape == (1, D)
    fused = export_layers(model("qwen3_moe"), "qwen3_moe", fused=True)
    assert fused["model.layers.0.mlp.experts.gate_up_proj"].shape == (E, 2 * F, D)
    assert len(fused) == 2 * 3


@pytest.mark.parametrize("layout", list(SECTIONS))
def test_the_layers_of_a_full_model_map_to_ours_in_order(layout: str) -> None:
    source, target = model(layout, 3), model(layout, 3).double()
    target[1].router.bias_E[0] = 5.0
    # layer 0 is dense, as in models whose first layers have no experts; ten comes after nine
    state = export_layers(source, layout, numbers=[2, 9, 10]) | {"model.layers.0.mlp.gate_proj.weight": torch.ones(1)}
    shuffled = dict(sorted(state.items(), key=lambda item: item[0][::-1]))
    assert load_layers(target, shuffled, layout) == (2, 9, 10)
    for ours, theirs in zip(target, source, strict=True):
        assert ours.router.weight.dtype == torch.float64
        assert torch.equal(outputs(ours.float()), outputs(theirs))


@pytest.mark.parametrize("fused", [False, True])
def test_more_than_ten_experts_and_layers_keep_their_numbers(fused: bool) -> None:
    """In the order of names, 10 and 11 come before 2; each expert and each layer differs from the others."""
    numbers = [0, 1, 2, 9, 10, 11, 12, 20]
    made = nn.ModuleList(layer(num_experts=12) for _ in numbers)
    state = export_layers(made, "qwen3_moe", numbers=numbers, fused=fused)
    fresh = nn.ModuleList(layer(num_experts=12) for _ in numbers)
    assert load_layers(fresh, dict(sorted(state.items())), "qwen3_moe") == tuple(numbers)
    for name, value in made.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name


def test_a_stored_model_is_read_from_its_folder(tmp_path: Path) -> None:
    state = export_layers(model(), "mixtral")
    parts = {"a.safetensors": dict(list(state.items())[::2]), "b.safetensors": dict(list(state.items())[1::2])}
    for name, part in parts.items():
        save_file(part, tmp_path / name)
    stored = StoredTensors(tmp_path)
    assert set(stored) == set(state) and len(stored) == len(state)
    assert all(torch.equal(stored[name], value) for name, value in state.items())
    assert set(StoredTensors(tmp_path / "a.safetensors")) == set(parts["a.safetensors"])
    assert load_layers(model(), stored, "mixtral") == (0, 1)

    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert len(StoredTensors(tmp_path)) == len(state)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(InputError, match=r"no b\.safetensors in .*, expected every file that .*index\.json names"):
        StoredTensors(tmp_path)
    save_file(parts["a.safetensors"], tmp_path / "b.safetensors")
    with pytest.raises(
        InputError, match=r"weight in a\.safetensors and in b\.safetensors of .*, expected each tensor in one"
    ):
        StoredTensors(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=r"b\.safetensors: .*expected a safetensors file"):
        StoredTensors(tmp_path)
    with pytest.raises(InputError, match=r"nothing at .*nowhere"):
        StoredTensors(tmp_path / "nowhere")


def dropped(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda state: state.pop(f"model.layers.1.{name}")


def added(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Tensor]], object]:
    return lambda state: state.update({f"model.layers.1.{name}": torch.zeros(shape, dtype=dtype)})


MOE = "block_sparse_moe"
BROKEN = {
    "a missing expert": (dropped(f"{MOE}.experts.2.w3.weight"), r"experts\.2\.w3\.weight: got no such tensor"),
    "a missing first expert": (dropped(f"{MOE}.experts.0.w1.weight"), r"experts\.0\.w1\.weight: got no such tensor"),
    "a missing router": (dropped(f"{MOE}.gate.weight"), r"gate\.weight: got no such tensor, expected .*router"),
    "one expert too many": (added(f"{MOE}.experts.3.w1.weight", F, D), r"experts\.3\.w1\.weight: got a tensor that"),
    "a doubled expert": (added(f"{MOE}.experts.01.w1.weight", F, D), r"01\.w1.*got a tensor that.*experts once"),
    "experts singly and fused": (
        added(f"{MOE}.experts.gate_up_proj", E, 2 * F, D),
        r"0\.w1.*got a tensor that .*fused",
    ),
    "a layer twice": (added("mlp.experts.gate_up_proj", E, 2 * F, D), r"mlp\.experts.* got layer 1 twice"),
    "another width": (added(f"{MOE}.experts.1.w2.weight", D, F + 1), r"w2\.weight: got 8 x 6 .*expected 8 x 5"),
    "a vector": (added(f"{MOE}.experts.0.w1.weight", D), r"experts\.0\.w1\.weight: got 8 of torch.float32"),
    "whole numbers": (added(f"{MOE}.experts.0.w1.weight", F, D, dtype=torch.int8), r"got 5 x 8 of torch.int8"),
    "another router": (added(f"{MOE}.gate.weight", E + 1, D), r"gate\.weight: got 4 x 8"),
    "what has no place": (added(f"{MOE}.experts.0.w1.weight_scale", 1), r"weight_scale: got a tensor that"),
    "one layer more": (added(f"{MOE}.gate.weight", E, D), r"layers\.\*: got 3 layers .*, numbers 0, 1, 7"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_refused_by_the_tensors_name(name: str) -> None:
    spoil, says = BROKEN[name]
    state = export_layers(model(), "mixtral")
    if name == "one layer more":
        state["model.layers.7.block_sparse_moe.gate.weight"] = torch.zeros(E, D)
    spoil(state)
    with pytest.raises(InputError, match=says):
        load_layers(model(), state, "mixtral")


def test_a_single_layer_with_sizes_that_do_not_fit_each_other_is_refused() -> None:
    state = to_layout(layer(), "mixtral")
    with pytest.raises(InputError, match=r"experts\.2\.w2\.weight: got 8 x 4 "):
        from_layout(state | {"experts.2.w2.weight": torch.zeros(D, 4)}, "mixtral", top_k=2, renormalize=True)
    fused = to_layout(layer(), "mixtral", fused=True) | {"experts.gate_up_proj": torch.zeros(E, 2 * F + 1, D)}
    with pytest.raises(InputError, match=r"gate_up_proj: got 3 x 11 x 8 .*expected 3 x 10 x 8"):
        from_layout(fused, "mixtral", top_k=2, renormalize=True)
    with pytest.raises(InputError, match=r"renormalize: got false, expected true, as Mixtral"):
        from_layout(state, "mixtral", top_k=2, renormalize=False)
    with pytest.raises(ValueError, match="top_k is 4"):
        from_layout(state, "mixtral", top_k=4, renormalize=True)
    with pytest.raises(InputError, match=r"layout: got 'mistral', expected one of mixtral, qwen2_moe, qwen3_moe"):
        from_layout(state, "mistral", top_k=2, renormalize=True)


@pytest.mark.parametrize(
    ("layout", "section", "says"),
    [
        ("mixtral", {"activation": "gelu"}, r"experts\.activation: got gelu, expected swiglu"),
        ("mixtral", {"bias": True}, r"experts\.bias: got true"),
        ("mixtral", {"score": "sigmoid"}, r"experts\.score: got sigmoid"),
        ("mixtral", {"renormalize": False}, r"experts\.renormalize: got false"),
        ("mixtral", {"hidden": [5, 5, 6]}, r"experts\.hidden"),
        ("qwen3_moe", {"shared_expert": True}, r"experts\.shared_expert: got true, expected false"),
        ("qwen2_moe", {"shared_gate": False}, r"experts\.shared_gate: got false, expected true"),
    ],
)
def test_an_option_that_a_layout_does_not_support_is_refused(
    layout: str, section: dict[str, object], says: str
) -> None:
    made = layer(layout, **section)
    with pytest.raises(InputError, match=says):
        to_layout(made, layout)
    with pytest.raises(InputError, match=says):
        load_layers(made, export_layers(model(layout, 1), layout), layout)


def test_a_shared_expert_of_another_kind_is_refused() -> None:
    made = layer("qwen2_moe")
    made.shared = SharedExpert(D, 6, activation="relu", gate=True)
    with pytest.raises(InputError, match=r"experts\.shared_expert: .*a SwiGLU without biases in the layout qwen2_moe"):
        to_layout(made, "qwen2_moe")


def test_a_bias_that_decides_who_is_chosen_does_not_get_lost_unseen() -> None:
    made = layer()
    made.router.bias_E[1] = 0.5
    with pytest.raises(InputError, match=r"experts\.balance: .*set router\.bias_E to zero"):
        to_layout(made, "mixtral")
    made.router.bias_E.zero_()
    assert len(to_layout(made, "mixtral")) == 1 + 3 * E
