"""The load of the experts in real runs, as their metrics report it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

LATE = 50
DET = """
import numpy as np
import torch


def dataset():
    draw = np.random.default_rng(0)
    x = draw.standard_normal((512, 12)).astype(np.float32)
    mix = np.random.default_rng(99).standard_normal((2, 12, 4))
    labels = (np.tanh(x @ mix[0]) + 0.5 * (x @ mix[1])).argmax(axis=1)
    return {"train": {"x": torch.from_numpy(x), "labels": torch.from_numpy(labels)}}
"""


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.covers("EXP-05")
@pytest.mark.timeout(200)
def test_a_job_keeps_the_busiest_expert_within_half_as_much_again_of_the_mean(
    train_shared: Callable[..., Path], tmp_path: Path, record_property: Any
) -> None:
    """With the default settings, with the balance loss alone, and for comparison without: means over the last steps."""
    (tmp_path / "balance_det.py").write_text(DET)
    peaks, losses = {}, {}
    for balance, weight in (("both", 0.01), ("loss", 0.1), ("none", 0.01)):
        job = {
            "name": f"balance-{balance}",
            "model": {"builder": "experts.models:moe_mlp", "width": 32, "num_features": 12, "num_classes": 4},
            "data": {"source": "balance_det:dataset", "eval_fraction": 0.0},
            "experts": {"num_experts": 8, "hidden": 32, "hosts": 0, "balance": balance, "balance_weight": weight},
            "optim": {"lr": 0.003},
            "precision": {"dtype": "fp32"},
            "loop": {"max_steps": 200, "global_batch_size": 64, "log_every": 1},
            "scale": {"workers": 1, "threads": 1},
            "telemetry": {"tensorboard": False},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        run = train_shared("job.yaml")
        rows = [row for row in rows_of(run / "metrics.jsonl") if row["kind"] == "train"]
        counts = [row["layers"] for row in rows_of(run / "experts.jsonl") if row["kind"] == "load"]
        assert all(sum(layer) == 2 * 64 for step in counts for layer in step), "two experts for each of 64 rows"
        counted = [fmean(max(layer) / fmean(layer) for layer in step) for step in counts]
        assert [row["load_imbalance"] for row in rows] == pytest.approx(counted)
        peaks[balance] = fmean(counted[-LATE:])
        losses[balance] = [row["loss"] for row in rows]
    record_property("busiest_over_mean", peaks)
    assert all(len(made) == 200 and fmean(made[-LATE:]) < 0.1 * made[0] for made in losses.values())
    assert max(peaks["both"], peaks["loss"]) <= 1.5 < peaks["none"], peaks
