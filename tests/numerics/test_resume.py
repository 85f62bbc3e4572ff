"""ARCHITECTURE.md, 3: a killed run resumes as if it had not been interrupted.

Every attempt runs in new processes. There are three workers, since with two the order of a sum cannot matter.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import lives
import pytest
from gang import run_gang

from raytrain.runs.folder import RunFolder

pytestmark = pytest.mark.daily

EVERY, STEPS, ROWS, STEPS_PER_EPOCH = 3, 24, 70, 6
PRECISIONS = ["fp32", "bf16", "fp16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Precision -> each rank's whole life, on three workers; fp16's loss overflows once, on rank 1."""
    orders = [
        {
            "run": str(folder / name),
            "precision": name,
            "every": EVERY,
            "overflow_at": 2 if name == "fp16" else None,
            "overflow_rank": 1,
        }
        for name in PRECISIONS
    ]
    ranks = run_gang(lives.lives, orders, world_size=3)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(PRECISIONS)}


def after(made: dict[str, Any], name: str, step: int) -> dict[int, Any]:
    """Entries of the steps after `step`."""
    return {at: value for at, value in made[name].items() if at > step}


def assert_goes_on(resumed: dict[str, Any], whole: dict[str, Any], *, step: int) -> None:
    """Every number after `step`, and the state at the end, are those of the unbroken life."""
    assert resumed["from_step"] == step and resumed["outcome"] == "done"
    for name in ("losses", "norms", "evals", "scales", "rows"):
        assert resumed[name] == after(whole, name, step), name
    assert resumed["digest"] == whole["digest"]
    assert resumed["generators"] == whole["generators"]


@pytest.mark.covers("DATA-22")
def test_three_workers_killed_between_two_micro_batches_resume_bit_for_bit(
    unbroken: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    run = str(folder / "killed")
    life = {"run": run, "precision": "fp32", "every": EVERY}
    run_gang(lives.life, {**life, "kill_at": 11}, world_size=3, killed=True)
    steps = sorted(int(entry.name[5:]) for entry in RunFolder(run).store.entries("checkpoints"))
    assert steps and max(steps) <= 10, "it lived longer than it should"
    resumed = run_gang(lives.life, {**life, "resume": "newest"}, world_size=3)
    step = resumed[0]["from_step"]
    assert step in (6, 9, 10), "the last writes may not have ended when the processes died"
    for rank, made in enumerate(resumed):
        assert_goes_on(made, unbroken["fp32"][rank], step=step)
    assert len({tuple(made["rows"][12]) for made in resumed}) == 3, "the ranks trained on the same rows"


@pytest.mark.covers("PREC-06")
def test_each_precision_resumes_and_only_fp16_has_a_scaler(
    unbroken: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    """In the middle of an epoch, three workers, new processes."""
    orders = [{"run": str(folder / name), "precision": name, "resume": 9} for name in PRECISIONS]
    ranks = run_gang(lives.lives, orders, world_size=3)
    for index, name in enumerate(PRECISIONS):
        for rank, made in enumerate(life[index] for life in ranks):
            assert_goes_on(made, unbroken[name][rank], step=9)
            assert ("scaler" in made["parts"]) == (name == "fp16")
            assert (set(made["scales"].values()) == {None}) == (name != "fp16")
    assert ranks[0][2]["parts"]["scaler"] == ["good_steps", "scale"]
    assert ranks[0][2]["from_scale"] == 2.0**15, "the halved scale was not restored"


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_worker_resumes_bit_for_bit_with_dropout(folder: Path, optimizer: str) -> None:
    life = {"run": str(folder / f"one-{optimizer}"), "precision": "fp32", "every": 5, "optimizer": optimizer}
    (whole,) = run_gang(lives.life, life, world_size=1)
    for step in (5, 15):
        (resumed,) = run_gang(lives.life, {**life, "resume": step, "every": None}, world_size=1)
        assert_goes_on(resumed, whole, step=step)
    assert len(set(whole["losses"].values())) == STEPS


def test_at_another_world_size_every_row_is_seen_once_in_each_epoch(
    unbroken: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    fewer = run_gang(lives.life, {"run": str(folder / "fp32"), "precision": "fp32", "resume": 9}, world_size=2)
    assert [made["from_step"] for made in fewer] == [9, 9]
    seen = {step: Counter() for step in range(1, STEPS + 1)}
    for made in unbroken["fp32"]:
        for step in range(1, 10):
            seen[step].update(made["rows"].get(step, []))
    for made in fewer:
        for step, rows in made["rows"].items():
            assert step > 9
            seen[step].update(rows)
    for epoch in range(STEPS // STEPS_PER_EPOCH):
        total: Counter[int] = Counter()
        for step in range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1):
            total += seen[step]
        assert total == Counter(range(ROWS)), f"epoch {epoch}"
    # the same windows as before, so the losses are near, but not the same dropout
    assert fewer[0]["losses"][10] == pytest.approx(unbroken["fp32"][0]["losses"][10], rel=0.1)
