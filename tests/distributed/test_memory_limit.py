"""`cluster.memory_limit` on CPU workers: allocations beyond it fail, in the set-up and in a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.runs.folder import RunFolder

CODE = """
import os
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, row_mib, setup_mib):
        super().__init__()
        self.l, self.row_mib = nn.Linear(4, 3), row_mib
        if setup_mib and "RANK" in os.environ:  # on a worker
            self.kept = torch.ones(setup_mib << 18)
    def forward(self, x, labels=None):
        if self.row_mib and x.device.type != "meta":
            torch.ones(len(x) * (self.row_mib << 18))
        return {"logits": self.l(x)} | ({} if labels is None else {"loss": F.cross_entropy(self.l(x), labels)})

def build(row_mib=0, setup_mib=0):
    return Net(row_mib, setup_mib)

def data():
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return {"train": {"x": x, "labels": x[:, :3].argmax(1)}}
"""
JOB = {
    "data": {"source": "limited:data"}, "precision": {"dtype": "fp32"}, "scale": {"workers": 1, "threads": 1},
    "loop": {"max_steps": 2, "global_batch_size": 8, "micro_batch_size": 8}, "cluster": {"memory_limit": 1_900_000_000},
}  # fmt: skip
# Beside the 600 MiB of a worker's own, 800 MiB of rows are well below the limit and 1,600 MiB well above it.


def trained(place: Path, **model: int) -> tuple[RunFolder, subprocess.CompletedProcess[str]]:
    (place / "limited.py").write_text(CODE)
    (place / "job.yaml").write_text(json.dumps({**JOB, "model": {"builder": "limited:build", **model}}))
    command = [sys.executable, "-m", "jobs", "train", "job.yaml"]
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=280)
    return RunFolder.open(str(place / "runs/latest")), ended


@pytest.mark.parametrize(("row_mib", "fits"), [(200, 4), (400, 2)])
def test_a_step_beyond_the_limit_of_a_cpu_worker_is_retried_in_halves(tmp_path: Path, row_mib: int, fits: int) -> None:
    run, ended = trained(tmp_path, row_mib=row_mib)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    retries = [row["micro_batch_size"] for row in run.read_rows(run.events) if row["kind"] == "out_of_memory"]
    assert retries[-1] == fits and run.read_json(run.result)["steps"] == 2


def test_memory_that_runs_out_in_the_set_up_is_named_as_such(tmp_path: Path) -> None:
    _, ended = trained(tmp_path, setup_mib=1600)
    assert ended.returncode == 1 and "The run failed: memory ran out" in ended.stdout, ended.stdout + ended.stderr
    assert "cluster.memory_limit" in ended.stdout and "Correct the code" not in ended.stdout
