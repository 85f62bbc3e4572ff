"""Sharded parameters change where numbers are and nothing else."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import sharded
from gang import run_gang
from lab import GPT

MOE = {**GPT, "builder": "experts.models:moe_gpt"}
RECOMPUTED = {"loop": {"activation_checkpointing": True}}


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return run_gang(sharded.trained, "data_parallel", {}, world_size=2)[0]


@pytest.mark.covers("PAR-16", "FUT-06")
@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_train_as_data_parallel_does(whole: dict[str, Any], world_size: int) -> None:
    """Accumulation, windows that do not divide, a clip that is active at each step, a tied head, evaluation."""
    assert min(whole["norms"]) > 0.05 and len(whole["losses"]) == sharded.STEPS and len(whole["evals"]) == 3
    ranks = run_gang(sharded.trained, "fsdp", {}, world_size=world_size)
    assert sharded.close(whole, ranks[0]) < 1e-12
    for name in ("losses", "norms", "evals"):
        assert all(rank[name] == ranks[0][name] for rank in ranks), f"{name} differ between the workers"
    for name, total in whole["held"].items():
        shares = [rank["held"][name] for rank in ranks]
        assert sum(shares) == total, f"the shards hold other {name} than the whole"
        assert max(shares) < total / world_size * 1.1


def test_sharded_momentum_equals_replicated_momentum() -> None:
    """torch has no fused SGD for shards: the plain one of theirs follows the fused one of the whole."""
    sections = {"optim": {"name": "sgd", "lr": 0.1}}
    one = run_gang(sharded.trained, "data_parallel", sections, world_size=2)[0]
    ranks = run_gang(sharded.trained, "fsdp", sections, world_size=3)
    assert sharded.close(one, ranks[0]) < 1e-12
    assert sum(rank["held"]["moments"] for rank in ranks) == one["held"]["moments"] == one["held"]["weights"]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "experts"])
def test_muon_gathers_sharded_matrices_with_equal_results(model: dict[str, Any], world_size: int) -> None:
    """In float64, which it orthogonalises in itself; matrices of widths that three workers cannot share equally."""
    sections = {"model": model, "optim": {"name": "muon"}}
    one = run_gang(sharded.trained, "data_parallel", sections, world_size=2)[0]
    ranks = run_gang(sharded.trained, "fsdp", sections, world_size=world_size)
    assert sharded.close(one, ranks[0]) < 1e-12
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    shares = [rank["held"]["moments"] for rank in ranks]
    assert sum(shares) == one["held"]["moments"] and max(shares) < 0.75 * sum(shares)


def test_activation_checkpointing_and_a_single_worker_change_nothing(whole: dict[str, Any]) -> None:
    again = run_gang(sharded.trained, "fsdp", RECOMPUTED, world_size=2)[0]
    assert sharded.close(whole, again) < 1e-12
    alone = run_gang(sharded.trained, "fsdp", {}, world_size=1)[0]
    assert sharded.close(whole, alone) < 1e-12 and alone["own"]["own"] == alone["own"]["whole"]


@pytest.mark.parametrize("model", [{"builder": "sharded:odd"}, MOE], ids=["frozen, tied, unused", "experts"])
def test_other_models_train_as_data_parallel_does(model: dict[str, Any]) -> None:
    one = run_gang(sharded.trained, "data_parallel", {"model": model}, world_size=2)[0]
    other = run_gang(sharded.trained, "fsdp", {"model": model}, world_size=2)[0]
    assert sharded.close(one, other) < 1e-12


@pytest.mark.parametrize("precision", ["bf16", "fp16", {"dtype": "bf16", "fp32_layers": ["blocks.1.attention"]}])
def test_half_precision_follows_data_parallel_and_all_skip_together(precision: Any) -> None:
    one = run_gang(sharded.trained, "data_parallel", {"precision": precision}, world_size=2)[0]
    ranks = run_gang(sharded.trained, "fsdp", {"precision": precision}, world_size=2)
    assert max(abs(a - b) for a, b in zip(one["losses"], ranks[0]["losses"], strict=True)) < 0.02
    assert ranks[0]["losses"] == ranks[1]["losses"] and ranks[0]["norms"] == ranks[1]["norms"]
    assert ranks[0]["scales"] == one["scales"] and ranks[0]["skipped"] == one["skipped"]


@pytest.mark.parametrize("fault", ["gradient", "loss"])
def test_a_step_that_is_not_finite_on_one_worker_is_skipped_by_all_and_halves_the_scale_once(fault: str) -> None:
    whole = run_gang(sharded.not_finite, "data_parallel", "fp16", fault, world_size=2)[0]
    for rank in run_gang(sharded.not_finite, "fsdp", "fp16", fault, world_size=2):
        states = rank["states"]  # before step 1, after step 1, 2, ...
        assert states[3] == states[2], "shards or moments moved in the skipped step"
        assert len(set(states)) == len(states) - 1 and rank["outcome"] == "done"
        assert rank["scales"] == whole["scales"] == [2.0**16] * 2 + [2.0**15] * 4
        assert rank["skipped"] == whole["skipped"] == [0, 0, 1, 1, 1, 1]
        assert [math.isfinite(norm) for norm in rank["norms"]] == [True, True, False, True, True, True]


def test_meetings_inside_the_passes_count_as_communication() -> None:
    """In each pass what is outside the blocks comes together once, each of four blocks twice, and all five are summed;
    the last block may stay for its backward."""
    for rank in run_gang(sharded.waited, world_size=2):
        meetings = rank["communication"] // 1000.0
        assert rank["passes"] == 3 and 13 * 3 <= meetings <= 15 * 3


def test_a_worker_without_rows_reduces_norms_in_the_order_of_workers_with_activation_checkpointing() -> None:
    """Norms are brought together by themselves in bf16, and once more in a second forward; of three workers the last
    has no rows of an epoch's last window."""
    half = {"precision": "bf16"}
    plain, again = (run_gang(sharded.trained, "fsdp", {**half, **more}, world_size=3) for more in ({}, RECOMPUTED))
    assert again[0]["losses"] == pytest.approx(plain[0]["losses"], rel=1e-6)
    assert all(rank["losses"] == again[0]["losses"] for rank in again)


@pytest.mark.parametrize("sections", [{}, RECOMPUTED], ids=["", "recomputed"])
def test_at_most_one_block_is_together_beyond_the_shards(sections: dict[str, Any]) -> None:
    model = {**GPT, "layers": 5}
    for rank in run_gang(sharded.together, {"model": model, **sections}, world_size=2):
        assert rank["blocks"] == 5 and rank["looks"] > 100
        most, groups = rank["most"]
        assert groups == 2, "one block, and what is outside the blocks"
        assert rank["largest_block"] < most <= rank["largest_block"] + rank["outside"] + 64 * 20, "padding aside"
        assert rank["after"] == (0, 0)
        assert rank["largest_block"] / 2 < rank["gradients"] <= rank["largest_block"] + rank["outside"]
        assert set(rank["outside_names"]) == {"positions", "tokens.weight", "norm.weight"}


def test_a_sharded_checkpoint_resumes_in_any_strategy(tmp_path: Path) -> None:
    """Bit-identical at the same world size; otherwise equal numbers, sharded and replicated."""
    unbroken = run_gang(sharded.saved, "fsdp", str(tmp_path / "whole"), 99, False, world_size=2)
    losses = unbroken[0]["losses"]
    for first, world_size, others in (
        ("fsdp", 2, [("fsdp", 2), ("fsdp", 3), ("data_parallel", 1)]),
        ("data_parallel", 2, [("fsdp", 3)]),
    ):
        begun = tmp_path / first
        run_gang(sharded.saved, first, str(begun), 4, False, world_size=world_size)
        files = {path.name for path in (begun / "checkpoints" / "step_00000004").iterdir()}
        rows = {"model.rank00001.safetensors", "optimizer.rank00001.safetensors"}
        assert "COMPLETE" in files and (rows <= files) == (first == "fsdp")
        for strategy, workers in others:
            path = tmp_path / f"{first} {strategy} {workers}"
            shutil.copytree(begun, path)
            ranks = run_gang(sharded.saved, strategy, str(path), 99, True, world_size=workers)
            went_on = ranks[0]["from"]
            assert went_on >= 4 and len(ranks[0]["losses"]) == sharded.STEPS - went_on
            gaps = [abs(a - b) for a, b in zip(losses[went_on:], ranks[0]["losses"], strict=True)]
            assert max(gaps) < 1e-12
            if (first, strategy, workers) == ("fsdp", "fsdp", 2):
                assert max(gaps) == 0.0 and [r["state"] for r in ranks] == [r["state"] for r in unbroken]


def test_rows_that_cannot_be_written_are_reported_and_prevent_the_checkpoint(tmp_path: Path) -> None:
    first, second = run_gang(sharded.unwritable, str(tmp_path), world_size=2)
    assert first.startswith("RunError: rank 1: ") and "No space left" in first and "No space left" in second
    assert list((tmp_path / "checkpoints").iterdir()) == []
