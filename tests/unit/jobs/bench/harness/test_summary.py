"""Summaries of files that are no measurement, and copies to a GPU where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from jobs.__main__ import main
from jobs.bench.harness.command import bench_verb


def report(path: Path) -> Result:
    return CliRunner().invoke(main, ["report", str(path)])


def test_what_is_no_measurement_is_refused_by_its_name(tmp_path: Path) -> None:
    written = {"list.json": "[]", "half.json": '{"bench": "data", "values": {}}', "text.json": "no JSON"}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    for name in [*written, "missing.json"]:
        refused = report(tmp_path / name)
        assert refused.exit_code == 2 and name in refused.stderr and "raytrain bench" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)


@pytest.mark.covers("PERF-13")
def test_without_a_gpu_pinned_copies_have_no_figure_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "pinned.json"
    assert bench_verb("pinned", [], out=str(out), quick=False, as_json=False) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    (claim,) = document["claims"]
    assert claim["verdict"] == "not measurable here" and "no GPU" in claim["evidence"]
    assert document["ratios"] == [] and document["arms"] == {}, "and none that says 1.0"
