"""Bench `experts`: the gate, the layouts it refuses, and that the ways it compares give the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experts.routing.grouped import GroupedExperts
from jobs.bench.experts.experts import TOLERANCE, equal_tensors, join
from jobs.bench.experts.experts_layers import Case, InProcess, build_layers, even_out
from jobs.bench.harness.command import bench_verb
from raytrain.errors import InputError


@pytest.mark.parametrize(
    ("key", "names"),
    [("layouts=[2]", "layouts"), ("layouts=[0+2]", "layouts"), ("layouts=[1+9]", "layouts"), ("tokens=63", "tokens")],
)
def test_a_layout_that_is_none_is_refused(key: str, names: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        bench_verb("experts", [key], out=str(tmp_path / "x.json"), quick=True, as_json=False)
    assert refused.value.key == names


def test_the_gate_tells_tensors_apart() -> None:
    ours = {"output": torch.ones(4), "gradient": torch.ones(2)}
    assert equal_tensors("same", ours, ours, tolerance=0.0).passed
    apart = equal_tensors("apart", {**ours, "gradient": torch.tensor([1.0, 1.1])}, ours, tolerance=1e-2)
    assert not apart.passed and "of gradient" in apart.detail
    assert not equal_tensors("less", {"output": torch.ones(4)}, ours, tolerance=1.0).passed
    assert not equal_tensors("nan", {**ours, "output": torch.full((4,), torch.nan)}, ours, tolerance=1.0).passed


def test_workers_parts_are_joined_as_one_process_would_have_them() -> None:
    names = ("output", "gradient of the input", "gradient of router.weight")
    parts = [{name: torch.full((2, 3), float(rank)) for name in names} for rank in (1, 2)]
    parts[0]["gradient of experts.w1"] = torch.zeros(1)
    whole = join(parts)
    assert whole["output"].shape == (4, 3) and whole["gradient of router.weight"].tolist() == [[3.0] * 3] * 2
    assert set(whole) == {*names, "gradient of experts.w1"}


def test_masks_are_another_way_and_an_evened_router_loads_all_experts_alike() -> None:
    """One token sent elsewhere is seen by the gate."""
    case = Case(256, 16, "fp32")
    alone = InProcess([16], num_experts=4, top_k=2, seed=3)
    alone.prepare(case)
    assert sum(alone.counts) == 512 and max(alone.counts) < 1.1 * 128
    sorted_way, masks = alone.results("sorted"), alone.results("masks")
    assert equal_tensors("masks", sorted_way, masks, tolerance=TOLERANCE["fp32"]).passed
    assert isinstance(alone.layer.experts, GroupedExperts)
    with torch.no_grad():
        alone.layer.experts.w2[2] *= 1.01
    assert not equal_tensors("changed", alone.results("sorted"), masks, tolerance=TOLERANCE["fp32"]).passed


def test_a_layer_of_one_width_has_the_same_weights_whatever_others_are_built() -> None:
    sizes = {"num_experts": 4, "top_k": 2, "seed": 3}
    (alone,), (_, beside) = build_layers([16], **sizes), build_layers([8, 16], **sizes)
    assert all(torch.equal(a, b) for a, b in zip(alone.parameters(), beside.parameters(), strict=True))
    assert even_out(alone, torch.randn(64, 16)) != [0] * 4
