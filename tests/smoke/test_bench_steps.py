"""Benches of training steps and memory, run with small sizes in this process: their documents."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.bench.compute import compile as compile_bench
from jobs.bench.harness.command import bench_verb


def run_small(folder: Path, name: str, *keys: str) -> dict[str, Any]:
    """Runs a bench with small sizes in this process; returns its document. torch's threads must be restored."""
    out = folder / f"{name}.json"
    threads = torch.get_num_threads()
    code = bench_verb(name, [*keys, "threads=1"], out=str(out), quick=True, as_json=False)
    assert torch.get_num_threads() == threads
    document = json.loads(out.read_text())
    assert code == 0 and document["gate"]["passed"], document["gate"]
    check_consistent(document)
    return document


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`bench(name, *keys)` runs a bench with small sizes and returns its document."""
    return partial(run_small, tmp_path)


def check_consistent(document: dict[str, Any]) -> None:
    """Checks that ratios follow from the raw values, and that intervals contain their median."""
    assert document["quick"] and document["arms"] and document["ratios"]
    for arm in document["arms"].values():
        assert len(arm["values"]) == document["settings"]["blocks"]
        assert all(value > 0 for value in arm["values"]) and arm["low"] <= arm["median"] <= arm["high"]
    for ratio in document["ratios"]:
        assert len(ratio["values"]) == document["settings"]["blocks"]
        assert min(ratio["values"]) <= ratio["low"] <= ratio["median"] <= ratio["high"] <= max(ratio["values"])
        excludes = ratio["low"] > 1 or ratio["high"] < 1
        assert excludes == (ratio["verdict"] != "no difference shown")
    assert all(claim["verdict"] == "not measurable here" for claim in document["claims"])


@pytest.mark.covers("PERF-26", "PERF-27", "TEST-05")
def test_precision_compares_full_steps_and_the_bytes_saved_for_backward(bench: Callable[..., Any]) -> None:
    document = bench("precision")
    models = document["values"]["models"]
    assert set(models) == {"mlp 16", "mlp 32", "gpt"}
    names = [ratio["name"] for ratio in document["ratios"]]
    assert {f"{model}: fp32 / {half}" for model in models for half in ("bf16", "fp16")} <= set(names)
    (pair,) = [ratio for ratio in document["ratios"] if ratio["name"] == "mlp 16: fp32 / bf16"]
    fp32, bf16 = (document["arms"][f"mlp 16, {kind}"]["values"] for kind in ("fp32", "bf16"))
    assert pair["values"] == [a / b for a, b in zip(fp32, bf16, strict=True)] and 0 < pair["share"] <= 1
    checks = [check["name"] for check in document["gate"]["checks"]]
    assert "mlp 32: ours equals plain bf16" in checks and "mlp 32: ours equals plain fp32" in checks
    (gain,) = [ratio for ratio in document["ratios"] if "the plain loop's own gain" in ratio["name"]]
    assert gain["goal"] == {"at_least": 0.9, "at_most": None}
    for row in models.values():
        assert row["auto"]["value"] in ("fp32", "bf16") and row["auto"]["reason"]
        kept = row["saved_for_backward"]
        assert kept["bf16"]["per_row"] < 0.8 * kept["fp32"]["per_row"], "half the bytes, except for what stays fp32"
        assert kept["fp32"]["total"] > kept["fp32"]["per_row"]
    assert document["values"]["matrix_units"] in ("AMX", "AVX512-bf16", "neither")
    even = document["values"]["break_even_width"]
    assert even is None or 16 <= even <= 32


@pytest.mark.covers("MEM-13", "PERF-06")
def test_bf16_saves_at_least_half_the_bytes_for_backward_and_the_ratio_is_reported(bench: Callable[..., Any]) -> None:
    document = bench("precision", "widths=[32]", "blocks=1")
    ratios = document["values"]["saved_bytes_ratio"]
    for model, row in document["values"]["models"].items():
        kept = row["saved_for_backward"]
        assert ratios["per_row"][model] == kept["bf16"]["per_row"] / kept["fp32"]["per_row"]
        assert 0.5 <= ratios["per_row"][model] < 0.8, "a half is the bound, because some tensors stay fp32"
    assert sum("fewer bytes of activations" in claim["effect"] for claim in document["claims"]) == 2


def test_checkpoint_stalls_of_both_kinds_and_the_same_bytes(bench: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    document = bench("checkpoint", f"dir={tmp_path / 'disk'}")
    (name,) = document["values"]["models"]
    row = document["values"]["models"][name]
    # weights and two moments in fp32, and some metadata
    assert 12 * row["parameters"] <= row["checkpoint_bytes"] < 13 * row["parameters"] + 50_000
    assert row["staged_bytes"] >= 12 * row["parameters"]
    stalls = {kind: document["arms"][f"{name}, {kind}"]["median"] for kind in ("asynchronous", "synchronous")}
    assert row["asynchronous_over_synchronous"] == pytest.approx(stalls["asynchronous"] / stalls["synchronous"])
    (ratio,) = [ratio for ratio in document["ratios"] if "stall" in ratio["name"]]
    assert ratio["goal"]["at_most"] == 0.25 and ratio["met"] == (ratio["median"] <= 0.25)
    assert all(seconds > 0 for kind in row["write_s"].values() for seconds in kind)
    assert 0 < row["share_of_budget"] <= 1 and row["interval_steps"] >= 1
    assert not list((tmp_path / "disk").iterdir()), "the bench removes its checkpoints"


@pytest.mark.covers("PERF-07", "MEM-12", "TEST-04")
def test_accumulation_lowers_the_peak_of_the_same_step(bench: Callable[..., Any]) -> None:
    """Above a floor with torch and the workspaces of its libraries; also activation checkpointing, and bf16."""
    document = bench("memory", "rows=16", "accumulation=4")
    (small, large, again, half) = document["values"]["processes"]
    assert (again, half) == ("activation checkpointing", "bf16")
    (ratio, recomputed, _) = document["ratios"]
    assert recomputed["median"] < 0.95 and document["values"]["processes"][again][0]["losses"] == pytest.approx(
        document["values"]["processes"][large][0]["losses"], rel=1e-6
    )
    assert document["arms"][small]["unit"] == "bytes"
    # the logits and activations of a quarter of the rows; a third leaves room for what does not scale
    assert ratio["median"] < 0.5
    one, four = document["values"]["processes"][large][0], document["values"]["processes"][small][0]
    assert one["micro_batches"] == 1 and four["micro_batches"] == 4
    assert one["micro_batches"] * 16 == four["micro_batches"] * 4 == 16, "the effective batch is the same"
    assert four["peak"] > four["floor"] and one["peak"] > one["floor"]
    assert four["losses"] == pytest.approx(one["losses"], rel=1e-6) and math.isfinite(sum(four["losses"]))


BUILT, KEPT, NO_MASK = "written out, mask built", "written out, mask kept", "fused, no mask"


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One quick run of bench `attention`."""
    return run_small(tmp_path_factory.mktemp("attention"), "attention")


@pytest.mark.covers("ATTN-07", "FUT-09")
def test_fused_attention_needs_linear_memory_and_written_out_attention_quadratic(attention: dict[str, Any]) -> None:
    bytes_of = attention["values"]["peak_bytes"]
    assert bytes_of[NO_MASK]["shape"] == "linear" and bytes_of[BUILT]["shape"] == "quadratic"
    assert bytes_of[NO_MASK]["r2"]["linear"] > 0.999 < bytes_of[BUILT]["r2"]["quadratic"]
    assert bytes_of[BUILT]["bytes"][-1] > 8 * bytes_of[NO_MASK]["bytes"][-1]


@pytest.mark.covers("TEST-03", "PERF-24")
def test_attention_is_timed_with_built_masks_cached_masks_and_no_mask(attention: dict[str, Any]) -> None:
    document = attention
    assert {BUILT, KEPT, NO_MASK, "sliding window"} <= set(document["arms"])
    names = [ratio["name"] for ratio in document["ratios"]]
    assert f"{BUILT} / {KEPT}" in names and f"{BUILT} / {NO_MASK}" in names
    cache = document["values"]["mask_cache"]
    assert cache["entries"] == 1 == cache["misses"] and cache["hits"] > 1 and cache["bytes"] == 32 * 32
    assert any("masks saves at least 5%" in claim["effect"] for claim in document["claims"])


@pytest.mark.covers("TEST-02", "PERF-29", "TRB-19")
def test_compiled_and_eager_steps_are_timed_in_turn_and_the_compilation_separately(bench: Callable[..., Any]) -> None:
    """In all three modes, one of which may be worth setting."""
    document = bench("compile")
    modes = ("default", "reduce-overhead", "max-autotune")
    assert set(document["arms"]) == {"eager", *modes, "defaults", "optim.fused false", "reference"}
    assert document["values"]["skipped"] == {}
    for mode in modes:
        assert document["values"][mode]["achieved"] == "1 of 1 parts"
        (claim,) = [one for one in document["claims"] if one["effect"] == f"torch.compile ({mode}) makes steps faster"]
        assert ("as its CUDA graphs need a GPU" in claim["evidence"]) == (mode == "reduce-overhead")
    ratios = {ratio["to"]: ratio for ratio in document["ratios"][:3]}
    faster = {mode: ratios[mode]["median"] for mode in modes if ratios[mode]["low"] > 1}
    best = document["values"]["worth_setting"]
    assert best == max(faster, key=lambda mode: faster[mode], default=None)
    status = document["values"]["default"]
    assert status["achieved"] == "1 of 1 parts" and status["seconds"] > 0 and status["graph_breaks"] == 0
    assert status["pays_from_step"] is None or status["pays_from_step"] >= 1
    (claim,) = [claim for claim in document["claims"] if claim["effect"].startswith("torch.compile (default)")]
    pays = status["pays_from_step"]
    assert ("no break-even" if pays is None else f"break-even at step {pays}") in claim["evidence"], claim
    ratio, _, _, *others = document["ratios"]
    assert [other["name"] for other in others] == [
        "reference / every default", "optimizer without / with fused kernels",
    ]  # fmt: skip
    pairs = zip(document["arms"]["eager"]["values"], document["arms"]["default"]["values"], strict=True)
    assert ratio["values"] == [a / b for a, b in pairs]


@pytest.mark.covers("TRB-32")
def test_a_mode_that_does_not_compile_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arm:
        """Instead of a session, whose parts are compiled or not."""

        losses = (1.0, 0.5)

        def __init__(self, mode: str) -> None:
            works = {"parts": [{}], "achieved": "1 of 1 parts", "reasons": [], "seconds": 3.0}
            fails = {**works, "achieved": "0 of 1 parts", "reasons": ["no such kernel"]}
            status = {**(fails if mode == "max-autotune" else works), "graph_breaks": 0, "recompiles": 0}
            compiled = None if mode == "off" else SimpleNamespace(status=lambda: status)
            self.session = SimpleNamespace(switches=SimpleNamespace(compiled=compiled))
            self.seconds = {"off": 2.0}.get(mode, 1.0)

        def run(self, steps: int) -> float:
            return self.seconds * steps

    monkeypatch.setattr(compile_bench, "_arm", lambda options, compile="off", **_: Arm(compile))
    found = compile_bench.run(
        compile_bench.CompileOptions.model_validate({"reference": False}), quick=False, say=lambda _: None
    )
    assert found.passed and set(found.arms) == {"eager", "default", "reduce-overhead"}
    assert found.values["skipped"] == {"max-autotune": "no such kernel"}
    (skipped,) = [claim for claim in found.claims if "max-autotune" in claim.effect]
    assert skipped.verdict == "not measurable here" and "skipped" in skipped.evidence
    assert found.values["default"]["pays_from_step"] == 3 and found.values["worth_setting"] == "default"
    assert found.lines()[-1] == "loop.compile=default is the fastest, 2.00 times off, from step 3 on"


def test_the_search_is_compared_with_the_grid_and_with_doubling(bench: Callable[..., Any]) -> None:
    document = bench("tune")
    sizes = [1, 2, 4, 8, 16]
    for name in ("gpt 32", "gpt 16"):
        row = document["values"][name]
        assert sorted(row["grid_rows_per_s"]) == sorted(f"{p} x {size}" for p in ("fp32", "bf16") for size in sizes)
        assert row["grid_best"] == max(row["grid_rows_per_s"], key=row["grid_rows_per_s"].get)
        for one in row["searches"]:
            assert one["decision"]["complete"]
            assert len({str(m["candidate"]) for m in one["measurements"]}) <= 12
    (ceiling,) = document["values"]["ceilings"]
    assert ceiling["fits"] == 2 and ceiling["chosen"] <= 2 and ceiling["measured_peak"] <= ceiling["budget"]
    goals = {ratio["name"].partition(": ")[2]: ratio["goal"] for ratio in document["ratios"]}
    assert goals["time of the search / of the grid"]["at_most"] == 0.25
    assert goals["time of the search in fp32 / of doubling"]["at_most"] == 0.4
    assert goals["throughput at the choice / at the grid's best"]["at_least"] == 0.95
