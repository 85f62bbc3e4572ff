"""Sizes by formula against the built model; none of it may need torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from experts.config import ExpertsConfig
from experts.sizes import EXPERT_BUILDERS, expert_facts
from raytrain.config.user_code import resolve
from raytrain.errors import InputError

LANGUAGE = {"layers": 2, "heads": 2, "width": 16, "context": 12}
SECTIONS = [
    {},
    {"num_experts": 7, "top_k": 3, "hidden": 10},
    {"activation": "swiglu", "shared_expert": True, "top_k": 1},
    {"activation": "relu", "bias": True, "shared_expert": True, "shared_hidden": 9, "shared_gate": True},
    {"activation": "swiglu", "bias": True, "hidden": [8, 24, 24, 40]},
]


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("layers", [1, 3])
def test_language_sizes_equal_the_built_model(section: dict[str, object], layers: int) -> None:
    from experts.models import moe_gpt

    experts, keys = ExpertsConfig(**section), LANGUAGE | {"layers": layers}
    facts = expert_facts("experts.models:moe_gpt", keys, {"vocab_size": 11}, experts)
    made = moe_gpt(**keys, vocab_size=11, experts=experts)
    assert facts.parameters == sum(p.numel() for p in made.module.parameters())
    assert facts.trainable_bytes == 4 * facts.parameters
    assert facts.flops_per_sample == made.flops_per_sample


@pytest.mark.parametrize("section", SECTIONS)
def test_row_sizes_equal_the_built_model(section: dict[str, object]) -> None:
    from experts.models import moe_mlp

    experts, known = ExpertsConfig(**section), {"num_features": 9, "num_classes": 4}
    facts = expert_facts("experts.models:moe_mlp", {"width": 12, "layers": 3}, known, experts)
    made = moe_mlp(width=12, layers=3, **known, experts=experts)
    assert facts.parameters == sum(p.numel() for p in made.module.parameters())
    assert facts.flops_per_sample == made.flops_per_sample


@pytest.mark.parametrize("section", SECTIONS)
def test_the_activation_estimate_is_close_to_the_bytes_that_autograd_saves(section: dict[str, object]) -> None:
    import torch

    from experts.models import moe_gpt

    experts, kept, alive = ExpertsConfig(**section), {}, []
    made = moe_gpt(**LANGUAGE, vocab_size=11, experts=experts)
    weights = {p.untyped_storage().data_ptr() for p in made.module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    ids = torch.randint(11, (8, 12))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made.loss(made.module, {"input_ids": ids, "labels": ids})
    facts = expert_facts("experts.models:moe_gpt", LANGUAGE, {"vocab_size": 11}, experts)
    assert sum(kept.values()) / 8 == pytest.approx(facts.activation_bytes_per_sample, rel=0.1)


@pytest.mark.parametrize("builder", EXPERT_BUILDERS)
def test_the_table_lists_the_parameters_of_the_builder(builder: str) -> None:
    parameters = inspect.signature(resolve(builder, "model.builder")).parameters
    known = EXPERT_BUILDERS[builder]
    assert {*known.required, *known.defaults, "experts"} == set(parameters)
    assert all(parameters[name].default is inspect.Parameter.empty for name in known.required)
    assert all(parameters[name].default == value for name, value in known.defaults.items())


def test_mistakes_are_found_by_the_plan_already() -> None:
    def facts(experts: ExpertsConfig | None = None, **keys: object) -> object:
        return expert_facts("experts.models:moe_gpt", keys, {"vocab_size": 11}, experts or ExpertsConfig())

    with pytest.raises(InputError, match=r"experts\.top_k: got 5"):
        facts(ExpertsConfig(num_experts=4, top_k=5), **LANGUAGE)
    rows = {"num_features": 9, "num_classes": 4}
    with pytest.raises(InputError, match=r"experts\.capacity_factor: got 1\.0, expected null"):
        expert_facts("experts.models:moe_mlp", {}, rows, ExpertsConfig(capacity_factor=1.0))
    with pytest.raises(InputError, match=r"model\.widht: .*did you mean model\.width\?"):
        facts(**LANGUAGE, widht=3)
    with pytest.raises(InputError, match=r"model\.width: got 15, expected a multiple of heads \(2\)"):
        facts(**LANGUAGE | {"width": 15})
    assert expert_facts("my.own:build", {}, {}, ExpertsConfig()) is None
    assert expert_facts("experts.models:moe_gpt", LANGUAGE, {}, ExpertsConfig()) is None


def test_sizes_need_no_torch() -> None:
    code = "import experts.sizes, raytrain.models.registry, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
