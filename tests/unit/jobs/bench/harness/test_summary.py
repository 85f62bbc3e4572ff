"""Summaries of invalid files, and the document of a bench that needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from jobs.__main__ import main
from jobs.bench.harness.options import bench_verb


def report(path: Path) -> Result:
    return CliRunner().invoke(main, ["report", str(path)])


def test_a_file_that_is_not_a_bench_document_is_refused(tmp_path: Path) -> None:
    written = {"list.json": "[]", "half.json": '{"bench": "data", "values": {}}', "text.json": "no JSON"}
    for name, text in written.items():
        (tmp_path / name).write_text(text)
    for name in [*written, "missing.json"]:
        refused = report(tmp_path / name)
        assert refused.exit_code == 2 and name in refused.stderr and "raytrain bench" in refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)


@pytest.mark.covers("PERF-13")
def test_without_a_gpu_pinned_memory_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "pinned.json"
    assert bench_verb("claims", ["parts=[pinned]"], out=str(out), quick=False, as_json=False) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    (claim,) = document["claims"]
    assert claim["verdict"] == "not measurable here" and "no GPU" in claim["evidence"]
    assert document["ratios"] == [] and document["arms"] == {}, "not a ratio of 1.0 either"
