"""Two workers do the steps of one, each with half of the rows, at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from raytrain.runs.folder import RunFolder

pytestmark = pytest.mark.daily

CODE = """
import os, time
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F

class Meets(nn.Module):
    '''Its passes end when those of the other workers have begun; a note for each: rows, and workers that it met.'''

    def __init__(self, notes):
        super().__init__()
        self.l, self.notes, self.passes = nn.Linear(4, 3), Path(notes), 0

    def forward(self, x, labels):
        rank, workers = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", 1))
        if rank >= 0 and self.training:
            self.passes += 1
            (self.notes / f"{self.passes}-{rank}").touch()
            ends, met = time.monotonic() + 20, 0
            while met < workers and time.monotonic() < ends:
                met = len(list(self.notes.glob(f"{self.passes}-?")))
            with (self.notes / f"rank{rank}").open("a") as file:
                print(len(x), met, file=file)
        return {"loss": F.cross_entropy(self.l(x), labels)}

def data():
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    return {"train": {"x": x, "labels": x[:, :3].argmax(1)}}
"""
STEPS, ROWS = 6, 16


def trained(place: Path, workers: int) -> tuple[list[float], dict[str, Counter[str]]]:
    """The losses of a run, and how often each worker's passes had which rows and met how many workers."""
    notes = place / f"notes{workers}"
    notes.mkdir()
    (place / "meeting.py").write_text(CODE)
    job = {
        "name": f"of{workers}", "model": {"builder": "meeting:Meets", "notes": str(notes)},
        "data": {"source": "meeting:data", "eval_fraction": 0.0}, "precision": {"dtype": "fp32"},
        "loop": {"max_steps": STEPS, "global_batch_size": ROWS, "micro_batch_size": ROWS // workers, "log_every": 1},
        "scale": {"workers": workers, "threads": 1},
    }  # fmt: skip
    (place / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "jobs", "train", "job.yaml"]
    ended = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = RunFolder.open(str(place / "runs/latest"))
    losses = [row["loss"] for row in run.read_rows(run.metrics) if row["kind"] == "train"]
    return losses, {path.name: Counter(path.read_text().splitlines()) for path in notes.glob("rank*")}


@pytest.mark.timeout(450)
@pytest.mark.covers("VER-15")
def test_two_workers_take_the_steps_of_one_each_on_half_of_the_rows_at_the_same_time(tmp_path: Path) -> None:
    """So what takes one worker 16 rows of time takes two of them 8."""
    alone, by_one = trained(tmp_path, 1)
    together, by_two = trained(tmp_path, 2)
    assert by_one == {"rank0": {f"{ROWS} 1": STEPS}}
    assert by_two == {f"rank{rank}": {f"{ROWS // 2} 2": STEPS} for rank in (0, 1)}
    assert len(alone) == STEPS and together == pytest.approx(alone, rel=1e-6), "and it is the same work"
