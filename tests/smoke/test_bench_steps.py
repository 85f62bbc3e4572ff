"""Benches of checkpoints and of the search, run with small sizes in this process: their documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.bench.harness.options import bench_verb


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


def test_checkpoint_stalls_of_both_kinds_and_the_same_bytes(bench: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    document = bench("checkpoint", f"dir={tmp_path / 'disk'}")
    (name,) = document["values"]["models"]
    row = document["values"]["models"][name]
    # weights and two moments in fp32, and some metadata
    assert 12 * row["parameters"] <= row["checkpoint_bytes"] < 13 * row["parameters"] + 50_000
    assert row["staged_bytes"] >= 12 * row["parameters"]
    (ratio,) = [ratio for ratio in document["ratios"] if "stall" in ratio["name"]]
    assert ratio["goal"]["at_most"] == 0.25 and ratio["met"] == (ratio["median"] <= 0.25)
    assert all(seconds > 0 for kind in row["write_s"].values() for seconds in kind)
    assert not list((tmp_path / "disk").iterdir()), "the bench removes its checkpoints"


def test_the_search_is_compared_with_the_grid(bench: Callable[..., Any]) -> None:
    document = bench("tune")
    sizes = [1, 2, 4, 8, 16]
    for name in ("gpt 32", "gpt 16"):
        row = document["values"][name]
        assert sorted(row["grid_rows_per_s"]) == sorted(f"{p} x {size}" for p in ("fp32", "bf16") for size in sizes)
        assert row["grid_best"] == max(row["grid_rows_per_s"], key=row["grid_rows_per_s"].get)
        assert len(row["chosen"]) == 2 and all(decision["complete"] for decision in row["decisions"])
        for measurements in row["measurements"]:
            assert len({str(one["candidate"]) for one in measurements}) <= 12
    (ceiling,) = document["values"]["ceilings"]
    assert ceiling["fits"] == 2 and ceiling["chosen"] <= 2 and ceiling["measured_peak"] <= ceiling["budget"]
    goals = {ratio["name"].partition(": ")[2]: ratio["goal"] for ratio in document["ratios"]}
    assert goals["time of the search / of the grid"]["at_most"] == 0.25
    assert goals["throughput at the choice / at the grid's best"]["at_least"] == 0.95
