"""Bench `experts`: the gate, refused layouts, and that the compared implementations give the same results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experts.grouped import GroupedExperts
from jobs.bench.experts import TOLERANCE, LayerRunner, equal_tensors, join
from jobs.bench.harness.options import bench_verb
from raytrain.errors import InputError


@pytest.mark.parametrize(
    ("key", "names"),
    [("layouts=[2]", "layouts"), ("layouts=[0+2]", "layouts"), ("layouts=[1+9]", "layouts"), ("tokens=63", "tokens")],
)
def test_an_invalid_layout_is_refused(key: str, names: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        bench_verb("experts", [key], out=str(tmp_path / "x.json"), quick=True, as_json=False)
    assert refused.value.key == names


def test_the_gate_detects_different_tensors() -> None:
    ours = {"output": torch.ones(4), "gradient": torch.ones(2)}
    assert equal_tensors("same", ours, ours, tolerance=0.0).passed
    different = equal_tensors("different", {**ours, "gradient": torch.tensor([1.0, 1.1])}, ours, tolerance=1e-2)
    assert not different.passed and "of gradient" in different.detail
    assert not equal_tensors("less", {"output": torch.ones(4)}, ours, tolerance=1.0).passed
    assert not equal_tensors("nan", {**ours, "output": torch.full((4,), torch.nan)}, ours, tolerance=1.0).passed


def test_results_of_workers_are_joined_as_of_one_process() -> None:
    names = ("output", "gradient of the input", "gradient of router.weight")
    parts = [{name: torch.full((2, 3), float(rank)) for name in names} for rank in (1, 2)]
    parts[0]["gradient of experts.w1"] = torch.zeros(1)
    joined = join(parts)
    assert joined["output"].shape == (4, 3) and joined["gradient of router.weight"].tolist() == [[3.0] * 3] * 2
    assert set(joined) == {*names, "gradient of experts.w1"}


def test_a_balanced_router_loads_all_experts_equally_and_the_gate_detects_a_changed_expert() -> None:
    settings = {"workers": 0, "tokens": 256, "width": 16, "num_experts": 4, "top_k": 2, "seed": 3}
    alone = LayerRunner(settings, 0)
    assert sum(alone.counts) == 512 and max(alone.counts) < 1.1 * 128
    results = alone.results("fp32")
    assert equal_tensors("again", alone.results("fp32"), results, tolerance=0.0).passed
    assert isinstance(alone.layer.experts, GroupedExperts)
    with torch.no_grad():
        alone.layer.experts.w2[2] *= 1.01
    assert not equal_tensors("changed", alone.results("fp32"), results, tolerance=TOLERANCE["fp32"]).passed
