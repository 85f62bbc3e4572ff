"""`raytrain infer --resume DIR` alone goes on with what the interrupted command was given, from any folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jobs.__main__ import main

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


def resumed(place: Path, out: str) -> None:
    """The rest is computed by a command that is given the folder alone."""
    again = infer(place, "--resume", out)
    assert again.returncode == 0, again.stdout + again.stderr


def assert_answered(place: Path) -> None:
    found = answers(place)
    assert [row["name"] for row in found] == [f"row {number}" for number in range(70)]
    assert [row["prediction"] for row in found] == [1] + [0] * 69


@pytest.mark.long
def test_the_output_folder_alone_is_enough_and_other_answers_are_refused(tmp_path: Path) -> None:
    begun(tmp_path)
    other = infer(tmp_path, "--resume", "out", "infer.batch_size=7")
    assert other.returncode == 2 and "computed with batch_size 5" in other.stderr
    resumed(tmp_path, "out")
    assert_answered(tmp_path)
    complete = infer(tmp_path, "--resume", "out")
    assert complete.returncode == 0 and "is complete; nothing is left to compute" in complete.stdout


@pytest.mark.long
def test_it_is_enough_from_any_folder(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "other").mkdir()
    resumed(tmp_path / "other", str(tmp_path / "out"))
    assert_answered(tmp_path)


@pytest.mark.long
def test_variables_in_its_name_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path)
    monkeypatch.setenv("ANSWERS", str(tmp_path))
    resumed(tmp_path, "$ANSWERS/out")
    assert_answered(tmp_path)


def test_an_unknown_folder_is_named(user_folder: Path) -> None:
    none = CliRunner().invoke(main, ["infer", "--resume", "nowhere"])
    assert none.exit_code == 2 and "--resume: got nowhere" in none.stderr and not (user_folder / "nowhere").exists()
