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


@pytest.mark.covers("EXP-05")
@pytest.mark.timeout(200)
def test_a_job_keeps_the_busiest_expert_within_half_as_much_again_of_the_mean(
    train_shared: Callable[..., Path], tmp_path: Path, record_property: Any
) -> None:
    """With the default settings, and for comparison without any balancing: means over the last steps."""
    (tmp_path / "balance_det.py").write_text(DET)
    peaks, losses = {}, {}
    for balance in ("both", "none"):
        job = {
            "name": f"balance-{balance}",
            "model": {"builder": "experts.models:moe_mlp", "width": 32, "num_features": 12, "num_classes": 4},
            "data": {"source": "balance_det:dataset", "eval_fraction": 0.0},
            "experts": {"num_experts": 8, "hidden": 32, "hosts": 0, "balance": balance},
            "optim": {"lr": 0.003},
            "precision": {"dtype": "fp32"},
            "loop": {"max_steps": 200, "global_batch_size": 64, "log_every": 1},
            "scale": {"workers": 1, "threads": 1},
            "telemetry": {"tensorboard": False},
        }
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        lines = (train_shared("job.yaml") / "metrics.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
        peaks[balance] = fmean(row["load_imbalance"] for row in rows[-LATE:])
        losses[balance] = [row["loss"] for row in rows]
    record_property("busiest_over_mean", peaks)
    assert all(len(made) == 200 and fmean(made[-LATE:]) < 0.1 * made[0] for made in losses.values())
    assert peaks["both"] <= 1.5 < peaks["none"], peaks
