"""Keys of `experts.lifecycle` that contradict each other, or the rest of a job, are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from experts.config import ExpertsConfig
from experts.sizes import check_experts, first_experts
from jobs.job.spec import load_spec
from raytrain.errors import InputError

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
        mapping={"model": {"builder": "experts.models:moe_gpt"}, "data": {"source": "stdlib"}},
        overrides=[f"{MOST}=7"],
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
