"""Batch inference on Ray Data's actors: the answers of one process, also when a worker is killed in the middle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

ROWS, UNIT = 400, 20
GUEST = '''
import os
import signal
from pathlib import Path

import torch
from torch import nn


class Fragile(nn.Module):
    """Sums of products; its process is killed at the 200th row, the first time that a marker can be made."""

    def __init__(self, marker):
        super().__init__()
        self.scale, self.marker = nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3)), marker

    def forward(self, x):
        if self.marker and (x[:, 3] == 200).any():
            try:
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return (x / 100).sin() @ self.scale


def build(marker=None):
    return Fragile(marker)
'''


@pytest.mark.timeout(300)
def test_a_killed_worker_costs_its_unit_and_changes_no_answer(run_cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text(GUEST)
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    x[:, 3] = np.arange(ROWS)
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 4)}
    parquet.write_table(pa.table(columns), tmp_path / "in.parquet", row_group_size=30)
    common = ("infer", "fragile:build", "infer.input=in.parquet", f"infer.unit_rows={UNIT}", "infer.batch_size=7",
              "scale.threads=1")  # fmt: skip
    alone = run_cli(*common, "infer.output=one", cwd=tmp_path)
    assert alone.code == 0, alone.text
    both = run_cli(*common, "infer.output=two", "scale.workers=2", f"model.marker={tmp_path / 'killed'}", cwd=tmp_path,
                   timeout=240)  # fmt: skip
    assert both.code == 0, both.text
    assert (tmp_path / "killed").exists()
    first, second = ((tmp_path / name / "predictions.parquet").read_bytes() for name in ("one", "two"))
    assert first == second
    summary = json.loads((tmp_path / "two/summary.json").read_text())
    workers = summary["workers"]
    assert len(workers) >= 2 and sum(worker["units"] for worker in workers) == ROWS // UNIT
    timing = parquet.read_table(tmp_path / "two/timing.parquet")
    assert len(set(timing["worker"].to_pylist())) == len(workers)
    assert min(worker["load_s"] for worker in workers) > 0
