"""Benches `data` and `clone` with --quick: both arms run, the parts add up, and the figures are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.bench.data.data_arms import PARTS, Annotations, Perceptron, Seconds, clone_and_copy, order_of, resident
from jobs.bench.harness.command import bench_verb

CPU = torch.device("cpu")


def document(name: str, folder: Path, *keys: str) -> dict[str, Any]:
    out = folder / f"{name}.json"
    assert bench_verb(name, ["threads=1", *keys], out=str(out), quick=True, as_json=False) == 0
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One quick run of bench `data`."""
    return document("data", tmp_path_factory.mktemp("data"))


@pytest.mark.covers("PERF-10", "PERF-14", "PERF-16")
@pytest.mark.timeout(120)
def test_resident_rows_and_clone_and_copy_are_timed_by_parts(kept: dict[str, Any]) -> None:
    assert kept["gate"]["passed"] and len(kept["gate"]["checks"]) == 4
    assert set(kept["arms"]) == {"clone and copy", "resident"}
    parts = kept["values"]["parts_s"]
    for name in ("clone and copy", "resident"):
        assert set(parts[name]) == {"preparation", *PARTS, "total"}
        assert sum(parts[name][part] for part in ("preparation", *PARTS)) == pytest.approx(parts[name]["total"])
    assert parts["resident"]["conversion"] == parts["resident"]["clone"] == parts["clone and copy"]["preparation"] == 0
    assert any("one-time cost" in claim["effect"] for claim in kept["claims"])


@pytest.mark.covers("PERF-17", "PERF-18")
@pytest.mark.timeout(120)
def test_the_first_and_the_later_epochs_are_reported_separately(kept: dict[str, Any]) -> None:
    names = [ratio["name"] for ratio in kept["ratios"]]
    assert names == ["all epochs", "first epoch, preparation included", "first epoch, preparation apart",
                     "every later epoch"]  # fmt: skip
    assert kept["ratios"][0]["goal"]["at_least"] == 4.2 and 0 < kept["ratios"][0]["share"] < 1


@pytest.mark.covers("PERF-15", "PERF-20", "PERF-21")
@pytest.mark.timeout(120)
def test_the_busy_share_of_each_epoch_is_reported(kept: dict[str, Any]) -> None:
    busy = kept["values"]["busy_share_by_epoch"]
    assert len(busy["resident"]) == len(busy["clone and copy"]) == 3
    assert sum(busy["resident"]) > sum(busy["clone and copy"]), "the model computes for a larger part of each epoch"


@pytest.mark.covers("PERF-03", "PERF-05")
@pytest.mark.timeout(120)
def test_the_gain_over_the_reference_is_one_ratio_of_totals_and_one_pair_of_busy_shares(kept: dict[str, Any]) -> None:
    old, new = (kept["arms"][name]["values"] for name in ("clone and copy", "resident"))
    total = kept["ratios"][0]
    assert total["values"] == [a / b for a, b in zip(old, new, strict=True)] and total["low"] <= total["median"]
    busy = {name: sum(shares) / len(shares) for name, shares in kept["values"]["busy_share_by_epoch"].items()}
    (claim,) = [claim for claim in kept["claims"] if "fraction of time that the model computes" in claim["effect"]]
    assert claim["evidence"].startswith(f"from {busy['clone and copy']:.0%} to {busy['resident']:.0%} of an epoch")


@pytest.mark.covers("PERF-11", "PERF-12", "PERF-28")
@pytest.mark.timeout(120)
def test_clones_moves_and_a_loader_process_are_measured(tmp_path: Path) -> None:
    found = document("clone", tmp_path, "transform_ms=1.0")
    assert found["gate"]["passed"] and len(found["gate"]["checks"]) == 3
    assert [ratio["name"] for ratio in found["ratios"]] == [
        "cloned / not cloned", "always moved / device checked first", "0 processes / 1 process that reads"
    ]  # fmt: skip
    values = found["values"]
    assert values["microseconds_per_tensor"]["checked"] > 0 and values["microseconds_per_tensor"]["moved"] > 0
    hidden = values["hidden_share_of_reading"]
    assert len(hidden["values"]) == 2 and hidden["process_start_s"] > 0 and len(found["claims"]) == 3
    assert {name: len(blocks) for name, blocks in hidden["seconds_of_blocks"].items()} == {
        "0 processes": 2, "1 process": 2
    }  # fmt: skip


@pytest.mark.covers("PERF-19")
def test_the_total_of_an_arm_is_the_sum_of_its_parts_and_rows_are_converted_once() -> None:
    data, order = Annotations(30, 8, seed=1), order_of(30, 8, 4, seed=1)
    model = Perceptron(8, 4, seed=0, device=CPU)
    old = clone_and_copy(data, order, model, device=CPU)
    assert data.converted == 30 * 4 and len(model.losses) == 16 and len(old.epochs) == 4
    other = Perceptron(8, 4, seed=0, device=CPU)
    data.converted = 0
    new = resident(data, other, batch=8, epochs=4, seed=1, device=CPU)
    assert 30 <= data.converted < 40 and torch.equal(torch.stack(model.losses), torch.stack(other.losses))
    for seconds in (old, new):
        assert seconds.total == pytest.approx(seconds.preparation + sum(sum(e.values()) for e in seconds.epochs))
    shares = Seconds()
    shares.begin_epoch()
    shares.epochs[0] |= {"compute": 3.0, "conversion": 1.0}
    assert shares.busy() == [0.75]
