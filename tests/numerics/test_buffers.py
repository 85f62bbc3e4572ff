"""Buffers that each worker changes: what is evaluated is what is saved, exported and resumed."""

from __future__ import annotations

from pathlib import Path

import buffers
import pytest
from gang import run_gang

from raytrain.checkpoint.reader import load
from raytrain.runs.folder import RunFolder


@pytest.mark.parametrize(
    ("name", "strategy", "every"),
    [
        ("normed", "data_parallel", 4),
        ("normed", "fsdp", 4),
        ("centred", "data_parallel", 4),
        ("late", "data_parallel", 5),
    ],
)
def test_evaluated_saved_exported_and_resumed_are_the_same(
    name: str, strategy: str, every: int, tmp_path: Path
) -> None:
    whole = run_gang(buffers.trained, name, str(tmp_path), None, every, strategy, world_size=2)
    assert whole[0]["evals"] == whole[1]["evals"] and sorted(whole[0]["evals"]) == [3, 6, 9, 12]
    assert whole[0]["buffers"] == whole[1]["buffers"]
    last = load(RunFolder(str(tmp_path)).checkpoint_dir(12)).parts["model"]
    for weights in (last, buffers.exported(tmp_path)):
        assert buffers.eval_loss(name, weights) == pytest.approx(whole[0]["evals"][12], abs=1e-6)
    again = run_gang(buffers.trained, name, str(tmp_path), every, every, strategy, world_size=2)
    for before, after in zip(whole, again, strict=True):
        for values in ("losses", "evals"):
            assert after[values] == {step: value for step, value in before[values].items() if step > every}, values
        assert after["buffers"] == before["buffers"] and after["optimizer"] == before["optimizer"]


def test_buffers_that_training_reads_do_not_depend_on_when_a_run_saves(tmp_path: Path) -> None:
    """They are sent after every step, as DDP does; those that never change are not."""
    often = run_gang(buffers.trained, "centred", str(tmp_path / "often"), None, 1, world_size=2)
    seldom = run_gang(buffers.trained, "centred", str(tmp_path / "seldom"), None, 100, world_size=2)
    assert often[0]["losses"] == seldom[0]["losses"] and often[0]["buffers"] == seldom[1]["buffers"]
    assert seldom[0]["sent"] == [["centre"]]


def test_statistics_of_batch_norms_are_sent_for_evaluations_and_saves_only(tmp_path: Path) -> None:
    (first, _) = run_gang(buffers.trained, "normed", str(tmp_path), None, 100, world_size=2)
    assert first["sent"] == []


@pytest.mark.parametrize("strategy", ["data_parallel", "fsdp"])
def test_synchronized_batch_norms_compute_what_one_worker_does_with_the_rows_of_both(strategy: str) -> None:
    (alone,) = run_gang(buffers.synchronized, "data_parallel", 16, 64, world_size=1)
    pair = run_gang(buffers.synchronized, strategy, 8, 64, world_size=2)
    for made in pair:
        for name in ("losses", "norms", "evals"):
            assert made[name] == pytest.approx(alone[name], rel=1e-11), name
        for name, value in alone["buffers"].items():
            assert made["buffers"][name] == pytest.approx(value, rel=1e-11), name


def test_a_worker_without_rows_takes_part_in_synchronized_batch_norms() -> None:
    """37 rows in batches of 16 and micro-batches of 4: the last batch has 5 rows, two micro-batches; three workers."""
    made = run_gang(buffers.synchronized, "data_parallel", 4, 37, world_size=3)
    assert made[0]["losses"] == made[1]["losses"] == made[2]["losses"]
    assert made[0]["buffers"] == made[1]["buffers"] == made[2]["buffers"]
