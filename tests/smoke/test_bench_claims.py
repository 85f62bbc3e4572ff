"""Bench `claims` with small sizes: what each part measures, and its document."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from jobs.bench.claims_data import PARTS
from jobs.bench.harness.options import bench_verb

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`part(name)` is the document of a quick run of one part, which is made once."""
    made: dict[str, dict[str, Any]] = {}
    folder = tmp_path_factory.mktemp("claims")

    def document(name: str) -> dict[str, Any]:
        if name not in made:
            out, threads = folder / f"{name}.json", torch.get_num_threads()
            assert bench_verb("claims", [f"parts=[{name}]", "threads=1"], out=str(out), quick=True, as_json=False) == 0
            assert torch.get_num_threads() == threads
            made[name] = json.loads(out.read_text())
            check_consistent(made[name])
        return made[name]

    return document


def check_consistent(document: dict[str, Any]) -> None:
    """Intervals contain their median, ratios are judged by their intervals, and small sizes claim nothing."""
    assert document["quick"] and document["ratios"] and document["gate"]["passed"]
    for arm in document["arms"].values():
        assert len(arm["values"]) == document["settings"]["blocks"]
        assert all(value > 0 for value in arm["values"]) and arm["low"] <= arm["median"] <= arm["high"]
    for ratio in document["ratios"]:
        assert min(ratio["values"]) <= ratio["low"] <= ratio["median"] <= ratio["high"] <= max(ratio["values"])
        excludes = ratio["low"] > 1 or ratio["high"] < 1
        assert excludes == (ratio["verdict"] != "no difference shown")
    assert all(claim["verdict"] == "not measurable here" for claim in document["claims"])


# -- precision ------------------------------------------------------------------------------------


@pytest.mark.covers("PERF-26", "TEST-05")
def test_full_steps_in_each_precision_are_timed_in_turn_and_have_the_losses_of_fp32(
    part: Callable[[str], dict[str, Any]],
) -> None:
    document = part("precision")
    names = [ratio["name"] for ratio in document["ratios"]]
    models = ("mlp 16", "mlp 32", "gpt")
    assert {f"{model}: fp32 / {half}" for model in models for half in ("bf16", "fp16")} <= set(names)
    (pair,) = [ratio for ratio in document["ratios"] if ratio["name"] == "mlp 16: fp32 / bf16"]
    fp32, bf16 = (document["arms"][f"mlp 16, {kind}"]["values"] for kind in ("fp32", "bf16"))
    assert pair["values"] == [a / b for a, b in zip(fp32, bf16, strict=True)]
    checks = [check["name"] for check in document["gate"]["checks"]]
    assert checks == [f"{model}: the loss in {half} is that of fp32" for model in models for half in ("bf16", "fp16")]
    (speed,) = [claim for claim in document["claims"] if "1.5 times as fast" in claim["effect"]]
    assert any(units in speed["evidence"] for units in ("AMX", "AVX512-bf16", "neither"))


@pytest.mark.covers("MEM-13", "PERF-06", "PERF-27")
def test_bf16_saves_at_least_half_the_bytes_for_backward_and_the_ratio_is_reported(
    part: Callable[[str], dict[str, Any]],
) -> None:
    document = part("precision")
    ratios = document["values"]["saved_for_backward, bf16 / fp32"]
    assert set(ratios) == {"mlp 16", "mlp 32", "gpt"}
    for row in ratios.values():
        assert 0.5 <= row["per_row"] < 0.8, "a half is the bound, because some tensors stay fp32"
        assert row["total"] > row["per_row"], "copies of weights included"
    assert sum("fewer bytes of activations" in claim["effect"] for claim in document["claims"]) == 2


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.covers("PERF-07", "MEM-12", "TEST-04")
def test_accumulation_and_recomputation_lower_the_peak_of_the_same_step(part: Callable[[str], dict[str, Any]]) -> None:
    """Above a floor with torch and the workspaces of its libraries; also in bf16."""
    document = part("memory")
    small, recomputed, half = document["ratios"]
    assert (small["of"], small["to"]) == ("4 x 4 rows", "1 x 16 rows"), "the effective batch is the same"
    assert (recomputed["of"], half["of"]) == ("checkpointing", "bf16")
    # the logits and activations of a quarter of the rows; a third leaves room for what does not scale
    assert small["median"] < 0.5 and recomputed["median"] < 0.95
    for held in document["values"]["bytes_above_the_floor"].values():
        assert len(held) == document["settings"]["repeats"] and all(value > 0 for value in held)
    same = {check["name"]: check for check in document["gate"]["checks"]}
    for name in ("4 x 4 rows", "checkpointing"):
        assert same[f"{name}: the same steps"]["detail"].startswith("4 losses")


# -- attention ------------------------------------------------------------------------------------

BUILT, KEPT, NO_MASK = "written out, mask built", "written out, mask kept", "fused, no mask"


@pytest.mark.covers("ATTN-07", "FUT-09")
def test_fused_attention_needs_linear_memory_and_written_out_attention_quadratic(
    part: Callable[[str], dict[str, Any]],
) -> None:
    bytes_of = part("attention")["values"]["peak_bytes_by_length"]
    assert bytes_of[NO_MASK]["shape"] == "linear" and bytes_of[BUILT]["shape"] == "quadratic"
    assert bytes_of[NO_MASK]["r2"]["linear"] > 0.999 < bytes_of[BUILT]["r2"]["quadratic"]
    assert bytes_of[BUILT]["bytes"][-1] > 8 * bytes_of[NO_MASK]["bytes"][-1]


@pytest.mark.covers("TEST-03", "PERF-24")
def test_attention_is_timed_with_built_masks_cached_masks_and_no_mask(part: Callable[[str], dict[str, Any]]) -> None:
    document = part("attention")
    assert {BUILT, KEPT, NO_MASK, "sliding window"} <= set(document["arms"])
    names = [ratio["name"] for ratio in document["ratios"]]
    assert f"{BUILT} / {KEPT}" in names and f"{BUILT} / {NO_MASK}" in names
    cache = document["values"]["mask_cache"]
    assert cache["entries"] == 1 == cache["misses"] and cache["hits"] > 1 and cache["bytes"] == 32 * 32
    assert any("masks saves at least 5%" in claim["effect"] for claim in document["claims"])


# -- compiled code --------------------------------------------------------------------------------


@pytest.mark.covers("TEST-02", "PERF-29", "TRB-19")
def test_compiled_and_eager_steps_are_timed_in_turn_and_the_compilation_separately(
    part: Callable[[str], dict[str, Any]],
) -> None:
    """In all three modes."""
    document = part("compile")
    modes = ("default", "reduce-overhead", "max-autotune")
    assert set(document["arms"]) == {"eager", *modes, "defaults", "optim.fused false", "reference"}
    assert document["values"]["skipped"] == {}
    for mode in modes:
        assert document["values"][mode]["achieved"] == "1 of 1 parts"
        (claim,) = [one for one in document["claims"] if one["effect"] == f"torch.compile ({mode}) makes steps faster"]
        assert ("as its CUDA graphs need a GPU" in claim["evidence"]) == (mode == "reduce-overhead")
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


# -- data -----------------------------------------------------------------------------------------


@pytest.mark.covers("PERF-10", "PERF-14", "PERF-16")
def test_resident_rows_and_clone_and_copy_are_timed_by_parts(part: Callable[[str], dict[str, Any]]) -> None:
    document = part("data")
    assert len(document["gate"]["checks"]) == 4
    parts = document["values"]["parts_s"]
    assert set(parts) == {"clone and copy", "resident"}
    for name in ("clone and copy", "resident"):
        assert set(parts[name]) == {"preparation", *PARTS, "total"}
        assert sum(parts[name][one] for one in ("preparation", *PARTS)) == pytest.approx(parts[name]["total"])
    assert parts["resident"]["conversion"] == parts["resident"]["clone"] == parts["clone and copy"]["preparation"] == 0
    assert any("one-time cost" in claim["effect"] for claim in document["claims"])


@pytest.mark.covers("PERF-17", "PERF-18")
def test_the_first_and_the_later_epochs_are_reported_separately(part: Callable[[str], dict[str, Any]]) -> None:
    ratios = part("data")["ratios"]
    assert [ratio["name"] for ratio in ratios] == [
        "all epochs", "first epoch, preparation included", "first epoch, preparation apart", "every later epoch"
    ]  # fmt: skip
    assert ratios[0]["goal"]["at_least"] == 4.2
    pairs = zip(ratios[1]["values"], ratios[2]["values"], strict=True)
    assert all(included < apart for included, apart in pairs), "only ours has a preparation"


@pytest.mark.covers("PERF-15", "PERF-20", "PERF-21")
def test_the_busy_share_of_each_epoch_is_reported(part: Callable[[str], dict[str, Any]]) -> None:
    busy = part("data")["values"]["busy_share_by_epoch"]
    assert len(busy["resident"]) == len(busy["clone and copy"]) == 3
    assert sum(busy["resident"]) > sum(busy["clone and copy"]), "the model computes for a larger part of each epoch"


@pytest.mark.covers("PERF-03", "PERF-05")
def test_the_gain_over_the_reference_is_one_ratio_of_totals_and_one_pair_of_busy_shares(
    part: Callable[[str], dict[str, Any]],
) -> None:
    document = part("data")
    old, new = (document["values"]["seconds_of_all_epochs"][name] for name in ("clone and copy", "resident"))
    total = document["ratios"][0]
    assert total["values"] == [a / b for a, b in zip(old, new, strict=True)] and total["low"] <= total["median"]
    busy = {name: sum(shares) / len(shares) for name, shares in document["values"]["busy_share_by_epoch"].items()}
    (claim,) = [claim for claim in document["claims"] if "fraction of time that the model computes" in claim["effect"]]
    assert claim["evidence"].startswith(f"from {busy['clone and copy']:.0%} to {busy['resident']:.0%} of an epoch")


@pytest.mark.covers("PERF-11", "PERF-12")
def test_clones_and_redundant_moves_change_no_loss_and_are_timed(part: Callable[[str], dict[str, Any]]) -> None:
    document = part("habits")
    assert [ratio["name"] for ratio in document["ratios"]] == [
        "cloned / not cloned", "always moved / device checked first"
    ]  # fmt: skip
    assert len(document["gate"]["checks"]) == 2 and len(document["claims"]) == 2


@pytest.mark.covers("PERF-28")
def test_a_loader_process_reads_the_same_rows_and_what_it_hides_is_reported(
    part: Callable[[str], dict[str, Any]],
) -> None:
    document = part("loader")
    (check,) = document["gate"]["checks"]
    steps = document["settings"]["load_batches"] * (1 + document["settings"]["blocks"]) + 2
    assert check["name"] == "one process reads the same rows" and check["detail"].startswith(f"{steps} losses")
    hidden = document["values"]["hidden_share_of_reading"]
    zero, one = (document["arms"][f"data set read in {name}"]["values"] for name in ("0 processes", "1 process"))
    assert hidden["values"] == [(a - b) / hidden["reading_s"] for a, b in zip(zero, one, strict=True)]
    assert len(document["claims"]) == 1
