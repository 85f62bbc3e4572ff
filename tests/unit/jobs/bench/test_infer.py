"""Bench `infer`: its arms give the same answers, and what it compares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.bench.harness.options import bench_verb
from raytrain.models.gpt import gpt


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the quick bench."""
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("bench") / "infer.json"
    assert bench_verb("infer", [], out=str(out), quick=True, as_json=False) == 0
    return json.loads(out.read_text())


@pytest.mark.covers("PERF-30")
def test_the_baseline_is_single_rows_one_after_another(document: dict[str, Any]) -> None:
    """The arm that batches are compared with, its seconds of every block and its tokens/s."""
    arm = "ours, batch 1"
    first = document["ratios"][0]
    assert (first["of"], first["to"]) == (arm, "ours, batch 4")
    single, batched = (document["arms"][name]["values"] for name in (arm, "ours, batch 4"))
    assert len(single) == document["settings"]["blocks"]
    assert [a / b for a, b in zip(single, batched, strict=True)] == pytest.approx(first["values"])
    assert document["values"]["tokens_per_s"][arm] > 0


@pytest.mark.covers("INF-01", "INF-02", "PERF-31")
def test_arms_of_generation_agree_and_are_compared(document: dict[str, Any]) -> None:
    """Single rows and batches of four of unequal length give equal tokens, and both rates are reported."""
    assert [ratio["name"] for ratio in document["ratios"]] == [
        "tokens/s, batch 4 / batch 1",
        *(f"tokens/s, ours / {name}, batch {rows}" for name in ("transformers",) for rows in (1, 4)),
    ]
    rates = document["values"]["tokens_per_s"]
    assert rates["ours, batch 1"] > 0 and rates["ours, batch 4"] > 0
    assert [check["name"] for check in document["gate"]["checks"]][:2] == [
        f"{name}, in a batch: the tokens of single rows" for name in ("ours", "transformers")
    ]
    assert all(check["passed"] for check in document["gate"]["checks"]) and len(document["gate"]["checks"]) == 2


def test_other_answers_fail_the_gate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from jobs.bench import infer

    def other(module: object, **_unused: object) -> object:
        return gpt(layers=1, heads=2, width=16, context=10, vocab_size=256).module.eval()

    monkeypatch.setattr(infer, "transformers_gpt2", other)
    monkeypatch.setattr(infer, "greedy_answers", lambda *_, **__: [[0] * 4] * 4)
    pytest.importorskip("transformers")
    out = tmp_path / "infer.json"
    assert bench_verb("infer", ['parts=["batches"]'], out=str(out), quick=True, as_json=False) == 1
    document = json.loads(out.read_text())
    assert document["ratios"] == [] and document["arms"] == {}, "nothing was timed"


@pytest.mark.long
@pytest.mark.covers("PERF-34")
def test_stages_are_compared_with_the_whole_model_one_batch_and_several_at_a_time(tmp_path: Path) -> None:
    """Two processes against one; a speed-up is claimed only by the ratio's interval, of which a quick run has none."""
    out = tmp_path / "stages.json"
    assert bench_verb("infer", ['parts=["stages"]'], out=str(out), quick=True, as_json=False) == 0
    found = json.loads(out.read_text())
    one, several = found["ratios"]
    assert [(ratio["of"], ratio["to"]) for ratio in (one, several)] == [
        ("whole model", "two stages, 1 in flight"), ("whole model", "two stages, 2 in flight")
    ]  # fmt: skip
    assert one["goal"] is None and several["goal"] is not None
    (check,) = found["gate"]["checks"]
    assert check["passed"] and check["name"] == "stages: the outputs of the whole model, bit for bit"
