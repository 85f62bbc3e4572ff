"""Bench `experts`: the gate, refused layouts, and that the compared implementations give the same results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experts.grouped import GroupedExperts
from jobs.bench.experts import ALONE, REMOTE, TOLERANCE, ExpertsOptions, LayerRunner, _measure, equal_arrays, joined
from jobs.bench.harness.measuring import BenchMeasurement
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


def test_the_gate_detects_different_arrays() -> None:
    ours = {"output": np.ones(4), "gradient": np.ones(2)}
    assert equal_arrays("same", ours, ours, tolerance=0.0).passed
    different = equal_arrays("different", {**ours, "gradient": np.array([1.0, 1.1])}, ours, tolerance=1e-2)
    assert not different.passed and "gradient 0.1;" in different.detail
    assert not equal_arrays("nan", {**ours, "output": np.full(4, np.nan)}, ours, tolerance=1.0).passed


def test_results_of_workers_are_joined_as_of_one_process() -> None:
    answers = [{"rank": rank, "results": {"output": np.full((2, 3), float(rank))}} for rank in (1, 0)]
    assert joined(answers)["output"][:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]


class TimedArm:
    """Instead of the processes of a layout: a pass takes so many seconds, by the threads that are asked for."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds

    def ask_all(self, *, dtype: str, results: bool) -> list[dict[str, Any]]:
        return [{"rank": 0, "results": {name: np.ones((2, 2)) for name in ("output", "gradient")}}]

    def ask(self, *, steps: int = 1, dtype: str = "", threads: int = 1) -> dict[str, float]:
        return {"seconds": steps * self.seconds[f"of_{threads}"]}


def test_every_layout_is_timed_by_its_own_processes() -> None:
    options = ExpertsOptions(blocks=3, threads=2, block_s=1.0)
    arms = {ALONE: TimedArm(of_1=0.5, of_2=0.25), REMOTE: TimedArm(of_1=0.2)}
    found = BenchMeasurement("experts", False, {}, values={"exchange": {}})
    assert _measure(options, found, arms, dtype="fp32")  # type: ignore[arg-type]
    wanted = {"in process, 2 thread(s)": 0.25, "in process, 1 thread(s)": 0.5, "1 + 2": 0.2}
    assert found.arms == {f"fp32, {name}": [pytest.approx(seconds)] * 3 for name, seconds in wanted.items()}
    shown = found.values["exchange"]["fp32"]["ms"]
    assert shown == pytest.approx({name: 1e3 * seconds for name, seconds in wanted.items()})
    assert [ratio.median for ratio in found.ratios if ratio.met] == [pytest.approx(0.8)], "of two threads"
    assert [claim.verdict for claim in found.claims] == ["reproduced"]


def test_a_balanced_router_loads_all_experts_equally_and_the_gate_detects_a_changed_expert() -> None:
    section = {"num_experts": 4, "top_k": 2, "balance": "bias"}
    settings = {"workers": 0, "tokens": 256, "width": 16, "experts": section, "seed": 3}
    alone = LayerRunner(settings, 0)
    assert sum(alone.counts) == 512 and max(alone.counts) < 1.1 * 128

    def results() -> Any:
        return alone.run_block({"steps": 1, "dtype": "fp32", "results": True})["results"]

    first = results()
    assert set(first) == {"output", "gradient"} and equal_arrays("again", results(), first, tolerance=0.0).passed
    assert isinstance(alone.layer.experts, GroupedExperts)
    with torch.no_grad():
        alone.layer.experts.w2[2] *= 1.01
    assert not equal_arrays("changed", results(), first, tolerance=TOLERANCE["fp32"]).passed
