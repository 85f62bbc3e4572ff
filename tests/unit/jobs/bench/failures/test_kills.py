"""Bench `kills` counts what it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from jobs.bench.failures import kills
from jobs.bench.failures.kills import KillsOptions
from raytrain.runs.folder import RunFolder

OPTIONS = KillsOptions.model_validate({"kills": 3, "values": 1000})


def test_a_checkpoint_counts_if_it_is_exact_and_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kills._kill_saves(OPTIONS, RunFolder(str(tmp_path / "good")))[0] == 3
    monkeypatch.setattr(torch, "full", lambda size, value: torch.zeros(size))
    assert kills._kill_saves(OPTIONS, RunFolder(str(tmp_path / "wrong")))[0] == 0
