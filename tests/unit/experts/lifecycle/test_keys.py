"""Keys of `experts.lifecycle` that contradict each other, or the rest of a job, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from experts.config import ExpertsConfig
from experts.models import moe_mlp
from experts.router import TopKRouter
from experts.sizes import check_experts, first_experts
from jobs.job.spec import load_spec
from raytrain.config.sections import OptimConfig
from raytrain.errors import InputError
from raytrain.trainable import Trainable

MOST = "experts.lifecycle.max_experts"


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["experts.lifecycle.birth.uncertainty=0.5"], MOST, "null with other keys"),
        ([f"{MOST}=3", "experts.num_experts=4"], MOST, "at least experts.num_experts, 4"),
        ([f"{MOST}=8", "experts.num_experts=4", "experts.lifecycle.min_experts=5"], "min_experts", "at most"),
        ([f"{MOST}=8", "experts.lifecycle.min_experts=1"], "min_experts", "at least experts.top_k, 2"),
        ([f"{MOST}=8", "experts.hidden=[8, 8, 8]"], "experts.hidden", "one width"),
        ([f"{MOST}=8", "experts.replicas=1", "experts.hosts=2"], "experts.replicas", "expected 0"),
        ([f"{MOST}=8", "scale.strategy=fsdp"], MOST, "a part of every expert"),
        ([f"{MOST}=8", "model.builder=raytrain.models.mlp:mlp"], MOST, "a model of experts.models:moe_gpt"),
        ([f"{MOST}=8", "model.builder=mine:build"], MOST, "a model of experts.models:moe_gpt"),
        ([f"{MOST}=8", "experts.lifecycle.birth.uncertainty=1.5"], "birth.uncertainty", ">= 0 and <= 1"),
        ([f"{MOST}=8", "experts.lifecycle.birth.cooldown=5"], "birth.cooldown", "cooldown_steps"),
    ],
)
def test_a_contradiction_names_the_key(overrides: list[str], key: str, words: str) -> None:
    mapping: dict[str, Any] = {"model": {"builder": "experts.models:moe_gpt"}, "data": {"source": "stdlib"}}
    with pytest.raises(InputError) as caught:
        load_spec(mapping=mapping, overrides=overrides)
    assert caught.value.key.endswith(key) and words in str(caught.value)


def test_a_layer_has_room_for_all_and_starts_with_some() -> None:
    section = load_spec(
        mapping={"model": {"builder": "experts.models:moe_gpt"}, "data": {"source": "stdlib"}}, overrides=[f"{MOST}=7"]
    ).spec.experts
    assert (check_experts(section), first_experts(section), section.least_living) == (7, 4, 2)
    with pytest.raises(InputError, match=r"at least experts\.num_experts, 4"):
        check_experts(
            load_spec(
                mapping={"model": {"builder": "experts.models:moe_gpt"}, "data": {"source": "stdlib"}},
                overrides=[f"{MOST}=3"],
            ).spec.experts
        )
    assert check_experts(ExpertsConfig()) == 4 and not ExpertsConfig().lifecycle.enabled


def grown(living: int, layers: int, *, open_E: list[int]) -> Trainable:
    """A new model whose last layer has these experts open, as weights that are loaded may say."""
    section = ExpertsConfig(num_experts=living, top_k=1, hosts=0, lifecycle={"max_experts": 6})  # type: ignore[arg-type]
    made = moe_mlp(width=8, layers=layers, num_features=4, num_classes=3, experts=section)
    router = [part for part in made.module.modules() if isinstance(part, TopKRouter)][-1]
    state = made.module.state_dict()
    name = next(name for name, part in made.module.named_modules() if part is router)
    made.module.load_state_dict({**state, f"{name}.open_E": torch.tensor([one in open_E for one in range(6)])})
    return made


@pytest.mark.parametrize(("living", "layers"), [(3, 1), (2, 2)])
def test_weights_of_a_run_whose_experts_changed_are_refused(living: int, layers: int) -> None:
    own = list(range(living))
    for open_E in ([*own, 4], own[:-1], [*own[1:], living]):
        made = grown(living, layers, open_E=open_E)
        assert made.optimizers is not None
        with pytest.raises(InputError) as caught:
            made.optimizers(made.module, OptimConfig())
        assert caught.value.key == "model.init_from"
        assert f"layer {layers - 1} has experts in slots {open_E}" in str(caught.value) and f"{own}" in str(
            caught.value
        )
    same = grown(living, layers, open_E=own)
    assert same.optimizers is not None and same.optimizers(same.module, OptimConfig())
