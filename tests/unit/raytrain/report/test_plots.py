"""training_metrics.png: what is drawn is what is on record."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from raytrain.report.figures import training_spec
from raytrain.report.page import build_report
from raytrain.report.plots import figure, png
from raytrain.report.records import RunRecords
from raytrain.runs.folder import RunFolder

TRAIN = [
    {"kind": "train", "step": n, "epoch": (n - 1) // 5, "loss": 3.0 / n, "grad_norm": 1.0 + n, "step_time_s": 0.01 * n}
    for n in range(1, 11)
]
EVALS: list[dict[str, Any]] = [
    {"kind": "eval", "step": 5, "loss": 0.7123456789012345, "accuracy": 0.25},
    {"kind": "eval", "step": 10, "loss": 0.5, "accuracy": 0.5},
]


@pytest.mark.covers("VIS-02")
def test_png_decodes_and_its_three_axes_hold_the_recorded_values(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TRAIN + EVALS))
    build_report(RunFolder.open(str(tmp_path)))
    pixels = imread(io.BytesIO((tmp_path / "report/training_metrics.png").read_bytes()))
    assert pixels.shape[0] > 300 and pixels.shape[1] > 1000 and pixels.std() > 0
    spec = json.loads((tmp_path / "report/training_metrics.json").read_text())
    loss, accuracy, epoch = figure(spec).axes
    assert [axes.get_title(loc="left") for axes in (loss, accuracy, epoch)] == ["Loss", "Accuracy", "Epoch time"]
    train, evaluated = loss.lines
    assert list(train.get_ydata()) == [row["loss"] for row in TRAIN]
    assert list(train.get_xdata()) == [row["step"] for row in TRAIN]
    assert list(evaluated.get_ydata()) == [row["loss"] for row in EVALS]
    assert list(accuracy.lines[0].get_ydata()) == [row["accuracy"] for row in EVALS]
    heights = [bar.get_height() for bar in epoch.patches]
    assert heights == pytest.approx([sum(r["step_time_s"] for r in TRAIN if r["epoch"] == e) for e in (0, 1)])


def test_gradient_norm_stands_in_for_accuracy_and_steps_for_a_single_epoch():
    rows = [{**row, "epoch": 0} for row in TRAIN]
    spec = training_spec(RunRecords(name="run", path="run", train=rows))
    assert [panel["title"] for panel in spec["panels"]] == ["Loss", "Gradient norm", "Step time"]
    assert spec["panels"][1]["series"][0]["y"] == [row["grad_norm"] for row in TRAIN]


def test_non_finite_values_are_skipped():
    rows = [TRAIN[0], {**TRAIN[1], "loss": "nan"}, TRAIN[2]]
    spec = training_spec(RunRecords(name="run", path="run", train=rows))
    assert spec["panels"][0]["series"][0]["x"] == [1.0, 3.0]


def test_a_run_without_rows_has_a_plot_with_a_note():
    drawn = figure(training_spec(RunRecords(name="a $run_{", path="run")))
    assert [axes.texts[0].get_text() for axes in drawn.axes] == ["no data"] * 3
    assert png(drawn).startswith(b"\x89PNG")
