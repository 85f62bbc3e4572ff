"""Measurements as written summaries, and copies to a GPU where there is none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from jobs.__main__ import main
from jobs.bench.harness.command import bench_verb


def report(path: Path) -> Result:
    return CliRunner().invoke(main, ["report", str(path)])


def numbers(text: str) -> set[float]:
    """Every decimal number with at least three decimals, such as only a measurement has."""
    return {float(found) for found in re.findall(r"\d+\.\d{3}\b", text)}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """benchmarks.json of two real, small benches."""
    folder = tmp_path_factory.mktemp("summary")
    out = folder / "benchmarks.json"
    keys = [f"dir={folder / 'parts'}", 'only=["data","pinned"]', "data.threads=1"]
    assert bench_verb("all", keys, out=str(out), quick=True, as_json=False) == 0
    return out


@pytest.mark.covers("SRC-09")
def test_a_summary_holds_every_ratio_and_no_figure_that_is_not_in_its_json(measured: Path) -> None:
    done = report(measured)
    page = measured.with_suffix(".md")
    assert done.exit_code == 0 and done.stdout.strip() == str(page), done.output
    text, document = page.read_text(), json.loads(measured.read_text())
    ratios = [ratio for bench in document["values"]["benches"].values() for ratio in bench["ratios"]]
    figures = {round(ratio[part], 3) for ratio in ratios for part in ("median", "low", "high")}
    assert len(ratios) == 4 and numbers(text.partition("## Every ratio")[2]) == figures
    assert document["environment"]["date"] in text and document["environment"]["command"] in text
    assert "Small sizes" in text and "| pinned |" in text

    document["values"]["benches"]["data"]["ratios"][0]["median"] = 987.654
    document["environment"]["cpu_model"] = "A CPU of another make"
    measured.write_text(json.dumps(document))
    assert report(measured).exit_code == 0
    assert "987.654" in page.read_text() and "A CPU of another make" in page.read_text()


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
