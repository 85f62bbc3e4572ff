"""`raytrain infer --resume DIR` alone goes on with what the interrupted command was given, from any folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STOPS = """
import os
import torch

class Doubles(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(2.0))
    def forward(self, x):
        if x[0, 0] >= 40 and not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            raise KeyboardInterrupt
        return x * self.w

def build():
    return Doubles()
"""
KEYS = ["infer.input=in.jsonl", "infer.output=out", "infer.unit_rows=10", "infer.batch_size=5", "infer.keep=[name]"]


def infer(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs", "infer", *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200)


def begun(place: Path) -> None:
    (place / "stops.py").write_text(STOPS)
    rows = [{"x": [float(number), 1.0], "name": f"row {number}"} for number in range(70)]
    (place / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = infer(place, "stops:build", *KEYS)
    assert first.returncode == 130 and "infer --resume out` continues" in first.stdout, first.stdout + first.stderr
    assert len(list((place / "out/parts").iterdir())) == 4
    (place / "go").touch()


def answers(place: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return parquet.read_table(place / "out/predictions.parquet").to_pylist()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_output_folder_alone_is_enough(tmp_path: Path, elsewhere: bool) -> None:
    begun(tmp_path)
    begin = tmp_path / "other" if elsewhere else tmp_path
    begin.mkdir(exist_ok=True)
    again = infer(begin, "--resume", str(tmp_path / "out") if elsewhere else "out")
    assert again.returncode == 0, again.stdout + again.stderr
    found = answers(tmp_path)
    assert [row["name"] for row in found] == [f"row {number}" for number in range(70)]
    assert [row["prediction"] for row in found] == [1] + [0] * 69
    complete = infer(begin, "--resume", str(tmp_path / "out"))
    assert complete.returncode == 0 and "is complete; nothing is left to compute" in complete.stdout


def test_other_answers_are_still_refused_and_an_unknown_folder_is_named(tmp_path: Path) -> None:
    begun(tmp_path)
    other = infer(tmp_path, "--resume", "out", "infer.batch_size=7")
    assert other.returncode == 2 and "computed with batch_size 5" in other.stderr
    none = infer(tmp_path, "--resume", "nowhere")
    assert none.returncode == 2 and "--resume: got nowhere" in none.stderr and not (tmp_path / "nowhere").exists()
