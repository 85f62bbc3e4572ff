"""Paths as they are printed: relative below the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.preflight import JOB_ENVIRONMENT
from jobs.job.facts import path_from_here, text_from_here


def test_a_path_below_the_current_folder_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    assert path_from_here(f"{here}/runs/a") == "runs/a"
    assert path_from_here(f"{here}/..runs/a") == "..runs/a", "a name that begins with dots"
    for other in (f"{tmp_path}/runs/a", str(tmp_path), "s3://bucket/runs/a", "runs/a", "not written: no room"):
        assert path_from_here(other) == other
    run = f"{here}/runs/a"
    text = f"`--resume {run}` and {run}/logs, not {run}-2; in {run}."
    assert text_from_here(text, run) == f"`--resume runs/a` and runs/a/logs, not {run}-2; in runs/a."
    monkeypatch.setenv(JOB_ENVIRONMENT, "{}")
    assert path_from_here(run) == run, "a submitted job's folder is on the cluster"


def test_a_deleted_folder_has_nothing_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert path_from_here("/runs/a") == "/runs/a"
    monkeypatch.chdir(tmp_path)
