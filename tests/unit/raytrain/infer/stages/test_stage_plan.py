"""Which stage holds which parts: balanced by bytes, filled, by hand; and what is wrong with a map."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest

from raytrain.errors import InputError
from raytrain.infer.stages.partition import (
    DecoderSizes,
    ModelPart,
    fewest_stages,
    inference_memory,
    mapped_stages,
    plan_stages,
    sizes_of_config,
)

GB = 10**9


def parts(*sizes: int, head: int = 30) -> list[ModelPart]:
    """An embedding, one block of each size, a norm and a head."""
    blocks = [ModelPart(f"model.layers.{number}", size, repeated=True) for number, size in enumerate(sizes)]
    first = ModelPart("model.embed", 40, modules=("model.embed", "model.positions"))
    return [first, *blocks, ModelPart("model.norm", 1), ModelPart("lm_head", head)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("sizes", [(10,) * 9, (5, 80, 5, 5, 60, 5, 90, 10), (100, 1, 1, 1, 100)])
def test_a_balanced_plan_holds_every_part_once_and_has_the_smallest_largest_stage(
    sizes: tuple[int, ...], stages: int
) -> None:
    model = parts(*sizes)
    plan = plan_stages(model, stages)
    assert plan.bounds[0] == 0 and plan.bounds[-1] == len(model) and list(plan.bounds) == sorted(set(plan.bounds))
    assert plan.stages == stages and sum(plan.bytes) == sum(part.bytes for part in model)
    each = [part.bytes for part in model]
    best = min(
        max(sum(each[a:b]) for a, b in pairwise([0, *cuts, len(model)]))
        for cuts in combinations(range(1, len(model)), stages - 1)
    )
    assert max(plan.bytes) == best


@pytest.mark.covers("PAR-08")
def test_auto_is_balanced_and_two_other_policies_are_offered() -> None:
    model = parts(*(100,) * 8)
    assert plan_stages(model, 4, policy="auto") == plan_stages(model, 4, policy="balanced")
    low = plan_stages(model, 4, policy="balanced_low_0")
    assert low.bounds[1] == 1 and low.bytes[0] == 40  # the embedding; the others share the rest
    assert max(low.bytes[1:]) - min(low.bytes[1:]) <= 100
    filled = plan_stages(model, 4, policy="sequential", limit=350)
    assert filled.bytes == [340, 300, 201, 30]
    assert filled.bytes[0] > plan_stages(model, 4, limit=350).bytes[0]


def test_the_fewest_stages_that_fit_are_taken_and_what_never_fits_is_refused() -> None:
    model = parts(*(100,) * 6)
    plan = fewest_stages(model, lambda stages: 230, most=8)
    assert plan.stages == 4 and max(plan.bytes) <= 230
    assert fewest_stages(model, lambda stages: 1000, most=8).stages == 2
    assert fewest_stages(model, lambda stages: 40 * stages, most=8).stages == 5  # less cache with each stage more
    with pytest.raises(InputError, match=r"the largest part model\.layers\.0 with 100 B") as refused:
        fewest_stages(model, lambda stages: 90, most=8)
    assert refused.value.key == "infer.stages"
    with pytest.raises(InputError, match="at most 9"):
        plan_stages(model, 10)


@pytest.mark.covers("PAR-07")
def test_a_map_of_the_original_gives_its_stages() -> None:
    """embed+0-10, 11-20, 21-30, 31-39, norm+head, over a model of 40 blocks."""
    model = parts(*(100,) * 40)
    plan = mapped_stages(model, ["embed, 0-10", "11-20", "layers.21-30", "model.layers.31-39, norm, lm_head"])
    assert plan.bounds == (0, 12, 22, 32, 43)
    assert sum(plan.bytes) == sum(part.bytes for part in model)
    assert mapped_stages(model, ["embed, model.positions, 0-38", "39", "norm, lm_head"]).bounds == (0, 40, 41, 43)


@pytest.mark.covers("PAR-07")
@pytest.mark.parametrize(
    ("lists", "said"),
    [
        (["embed, 0-1", "3, norm, lm_head"], ["no stage for model.layers.2"]),
        (["embed, 0-2", "2-3, norm, lm_head"], ["model.layers.2 in stages 0 and 1"]),
        (["embed, 0, 2", "1, 3, norm, lm_head"], ["model.layers.1 after model.layers.2"]),
        (["norm, lm_head, 2-3", "embed, 0-1"], ["model.layers.2 after lm_head"]),
        (["embed, 0-9", "norm, head"], ["no part 0-9", "no part head (like lm_head)", "no stage for"]),
        (["embed, 0-3, norm, lm_head", ""], ["nothing in stage 1"]),
        (["embed, 0-1, 1", "1, 3, norm, lm_haed"], ["1 in stages 0 and 0 and 1", "no stage for model.layers.2, lm_head",
                                                   "no part lm_haed (like lm_head)"]),
    ],
)  # fmt: skip
def test_everything_that_is_wrong_with_a_map_is_named_in_one_error(lists: list[str], said: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        mapped_stages(parts(*(100,) * 4), lists)
    assert refused.value.key == "infer.stage_map"
    assert all(text in refused.value.got for text in said), refused.value.got
    assert "model.embed, model.layers.0-3, model.norm, lm_head" in str(refused.value)


@pytest.mark.covers("MEM-15", "PERF-38")
def test_twenty_billion_parameters_in_bf16_need_about_42_gb() -> None:
    """The sizes of GPT-NeoX-20B: it fits 80 GB and does not fit 24 GB."""
    config = {
        "num_hidden_layers": 44, "hidden_size": 6144, "num_attention_heads": 64, "intermediate_size": 24576,
        "vocab_size": 50432, "max_position_embeddings": 2048,
    }  # fmt: skip
    sizes = sizes_of_config(config)
    assert sizes == DecoderSizes(44, 6144, 24576, 6144, 50432, 2048)
    parameters = 44 * 12 * 6144**2 + 2 * 50432 * 6144
    memory = inference_memory(2 * parameters, sizes, rows=1, tokens=640, value_bytes=2)
    assert 40 * GB < memory.weights < memory.total < 44 * GB and abs(memory.total - 42 * GB) < 0.03 * 42 * GB
    assert 24 * GB < memory.total < 80 * GB
    assert memory.cache == 2 * 44 * 6144 * 640 * 2
    grouped = sizes_of_config({**config, "num_key_value_heads": 8})
    assert grouped is not None and grouped.cached == 768
    assert inference_memory(7, None, rows=9, tokens=9, value_bytes=4).total == 7
