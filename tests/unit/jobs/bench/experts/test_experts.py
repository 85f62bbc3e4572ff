"""Bench `experts`, small: the gate, the layouts, and that what it compares are different ways to the same numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from experts.routing.grouped import GroupedExperts
from jobs.bench.experts.experts import TOLERANCE, equal_tensors, join
from jobs.bench.experts.experts_layers import Case, InProcess, build_layers, even_out
from jobs.bench.harness.command import bench_verb
from raytrain.errors import InputError

ALONE = {"in process, 2 thread(s)", "in process, 1 thread(s)"}


@pytest.mark.covers("TEST-08")
def test_every_layout_and_way_is_gated_and_timed_in_turn(tmp_path: Path) -> None:
    out = tmp_path / "experts.json"
    assert bench_verb("experts", [], out=str(out), quick=True, as_json=False) == 0
    document = json.loads(out.read_text())
    checks = {check["name"]: check["passed"] for check in document["gate"]["checks"]}
    assert len(checks) == 11 and all(checks.values())
    for dtype in ("fp32", "bf16"):
        large, small = (document["values"]["exchange"][f"{dtype} {size}"] for size in ("64 x 16", "32 x 8"))
        assert set(large["layouts"]) == ALONE | {"1 + 2", "2 colocated"} and set(small["layouts"]) == ALONE | {"1 + 2"}
        for layout in large["layouts"].values():
            assert layout["ms"] > 0 and layout["cpu_s"] > 0
        assert 0 < large["layouts"]["1 + 2"]["share_of_transport"] < 1
        assert len(document["arms"][f"{dtype} 64 x 16, 1 + 2"]["values"]) == 3
        assert len(document["arms"][f"{dtype} 32 x 8, 1 + 2"]["values"]) == 2
        ratios = {ratio["name"]: ratio for ratio in document["ratios"]}
        calm = ratios[f"{dtype} 64 x 16: 1 + 2 / in process, 2 thread(s)"]
        assert calm["goal"] == {"at_least": None, "at_most": 1.25}
        assert len(calm["values"]) == len(large["calm_rounds"]) >= 1
        two, one = (f"{dtype} 64 x 16, {name}" for name in ("2 colocated", "in process, 1 thread(s)"))
        pair = ratios[f"{dtype} 64 x 16: 2 colocated / in process, 1 thread(s)"]
        arms = zip(document["arms"][two]["values"], document["arms"][one]["values"], strict=True)
        assert set(pair["values"]) <= {a / b for a, b in arms}, "two workers over one, measured in the same rounds"
        for name in ("sorted", "masks", "loop", "grouped"):
            assert len(document["arms"][f"{dtype} 64 x 16, {name}"]["values"]) == 3
    assert document["values"]["inflight"].keys() == {"one in flight", "two in flight"}
    assert len(document["arms"]["a training step, two in flight"]["values"]) == 3
    assert all(claim["verdict"] == "not measurable here" for claim in document["claims"])


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
