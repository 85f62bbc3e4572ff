"""tune.png: throughput and memory by batch and precision, or whole runs; what is drawn is what is given."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from raytrain.report.plots import figure, png
from raytrain.report.sweep import MIB, batch_spec, whole_spec


def row(precision: str, size: int, speed: float | None, peak: int | None) -> dict[str, Any]:
    """One candidate of a decision's table."""
    low, high = (None, None) if speed is None else (0.9 * speed, 1.1 * speed)
    return {"precision": precision, "micro_batch_size": size, "rows_per_s": speed, "measured_peak": peak,
            "low": low, "high": high, "predicted_peak": (400 + size) * MIB}  # fmt: skip


TABLE = [
    row("fp32", 2, 100.0, 402 * MIB), row("fp32", 16, 300.0, 416 * MIB), row("bf16", 2, 90.0, None),
    row("bf16", 16, 500.0, 420 * MIB), row("bf16", 64, 505.0, None), row("bf16", 128, None, None),
]  # fmt: skip
SIZES = (2, 4, 8, 16, 64, 128)


@pytest.mark.covers("PERF-08")
def test_throughput_and_memory_are_drawn_by_batch_and_precision_with_the_knee_marked() -> None:
    spec = batch_spec(TABLE, sizes=SIZES, chosen=("bf16", 16), budget=450 * MIB, name="job")
    speed, memory = spec["panels"]
    assert [(line["label"], line["x"], line["y"]) for line in speed["series"]] == [
        ("fp32", [2, None, 16], [100.0, None, 300.0]), ("bf16", [2, None, 16, 64], [90.0, None, 500.0, 505.0]),
    ], "no line over 4 and 8, which nobody measured"  # fmt: skip
    assert speed["series"][0]["intervals"] == [(2, 90.0, 110.00000000000001), (16, 270.0, 330.0)]
    assert [(mark["x"], mark["y"]) for mark in speed["marks"]] == [(16, 500.0)]
    measured = {line["label"]: line["y"] for line in memory["series"]}
    assert measured["fp32 measured"] == [402.0, 416.0] and measured["bf16 measured"] == [420.0]
    assert measured["bf16 predicted"] == [402.0, 416.0, 464.0, 528.0]
    assert memory["limit"]["y"] == 450.0
    drawn = figure(spec)
    left, right = drawn.axes
    curves = [line for line in left.lines if line.get_label() in ("fp32", "bf16")]
    np.testing.assert_array_equal(np.array(curves[1].get_ydata(), dtype=float), [90.0, np.nan, 500.0, 505.0])
    assert [270.0, 330.0] in [list(line.get_ydata()) for line in left.lines], "its interval"
    assert left.get_xscale() == "log" and [tick.get_text() for tick in left.get_xticklabels()] == ["2", "16", "64"]
    assert "chosen" in [text.get_text() for text in left.texts]
    assert any(list(line.get_ydata()) == [450.0, 450.0] for line in right.lines)
    assert right.lines[0].get_linestyle() == "None", "measured peaks are points"
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0
    assert left.lines[0].get_color() == right.lines[0].get_color(), "a precision has one colour"
    assert imread(io.BytesIO(png(drawn))).shape[1] == 1800


def test_a_budget_far_above_is_mentioned_but_not_drawn() -> None:
    spec = batch_spec(TABLE, sizes=SIZES, chosen=("bf16", 16), budget=64 << 30, name="job")
    memory = spec["panels"][1]
    assert "limit" not in memory and "64 GiB" in memory["note"]
    assert "64 GiB" in figure(spec).axes[1].get_title(loc="left")


def test_runs_are_plotted_by_step_with_the_best_in_front() -> None:
    rows = [
        {"trial": 1, "values": {"optim.lr": 0.001}, "outcome": "ok", "eval_loss": 1.0},
        {"trial": 2, "values": {"optim.lr": 1e-9}, "outcome": "stopped", "eval_loss": 3.0},
        {"trial": 3, "values": {"optim.lr": 1e30}, "outcome": "error", "eval_loss": float("nan")},
    ]
    curves = {1: [(4, 2.0), (8, 1.0)], 2: [(4, 3.0)], 3: [(4, float("nan"))]}
    spec = whole_spec(rows, curves, best=1, metric="eval_loss", name="job")
    losses, trials = spec["panels"]
    assert [line["label"] for line in losses["series"]] == ["lr 1e-09, stopped early", "lr 0.001"]
    assert [line["faint"] for line in losses["series"]] == [True, False]
    assert [(line["x"], line["y"]) for line in trials["series"]] == [([1], [1.0]), ([2], [3.0])]
    assert figure(spec).axes[0].get_xlabel() == "step"
    assert spec["title"] == "job: 3 trials, trial 1 chosen"
    alone = whole_spec(rows[:1], curves, best=1, metric="eval_loss", name="job")
    assert alone["title"] == "job: 1 trial, trial 1 chosen"
