"""Bench `all` with small sizes: one table of claims, and the summary that `raytrain report` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jobs.__main__ import main
from jobs.bench.harness.options import bench_verb


def test_benches_run_now_and_an_existing_document_share_one_table(
    tmp_path: Path, bench_document: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "loop.json").write_text(json.dumps(bench_document()))
    keys = ["dir=parts", 'only=["loop","checkpoint","claims"]', "checkpoint.threads=1", "claims.rows=15"]
    assert bench_verb("all", keys, out="benchmarks.json", quick=True, as_json=False) == 1, "claims gets an invalid key"
    made = json.loads((tmp_path / "benchmarks.json").read_text())
    checks = {check["name"]: check for check in made["gate"]["checks"]}
    assert [checks[name]["passed"] for name in ("loop", "checkpoint", "claims")] == [True, True, False]
    assert "rows" in checks["claims"]["detail"] and "exit 2" in checks["claims"]["detail"]
    benches = made["values"]["benches"]
    assert set(benches) == {"loop", "checkpoint"} and benches["checkpoint"]["settings"]["threads"] == 1
    assert {row["bench"] for row in made["values"]["table"]} == {"loop", "checkpoint"}
    assert made["environment"]["versions"] and made["environment"]["cpu_model"] and made["environment"]["date"]
    printed = capsys.readouterr().out
    assert "| bench | claim | our figure, with its 95 % interval | verdict |" in printed
    assert "| checkpoint | " in printed


def report(path: Path) -> Result:
    return CliRunner().invoke(main, ["report", str(path)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """benchmarks.json of one bench with small sizes."""
    folder = tmp_path_factory.mktemp("summary")
    out = folder / "benchmarks.json"
    keys = [f"dir={folder / 'parts'}", 'only=["claims"]', "claims.threads=1", "claims.parts=[data,pinned]"]
    assert bench_verb("all", keys, out=str(out), quick=True, as_json=False) == 0
    return out


def numbers(text: str) -> set[float]:
    """All numbers with at least three decimals, which only measurements have."""
    return {float(found) for found in re.findall(r"\d+\.\d{3}\b", text)}


@pytest.mark.covers("SRC-09")
def test_a_summary_holds_every_ratio_and_only_figures_of_its_json(measured: Path) -> None:
    done = report(measured)
    page = measured.with_suffix(".md")
    assert done.exit_code == 0 and done.stdout.strip() == str(page), done.output
    text, document = page.read_text(), json.loads(measured.read_text())
    ratios = [ratio for bench in document["values"]["benches"].values() for ratio in bench["ratios"]]
    figures = {round(ratio[part], 3) for ratio in ratios for part in ("median", "low", "high")}
    claims = [claim for bench in document["values"]["benches"].values() for claim in bench["claims"]]
    told = numbers(" ".join(claim["evidence"] for claim in claims))
    assert len(ratios) == 4 and figures <= numbers(text) <= figures | told
    assert document["environment"]["date"] in text and document["environment"]["command"] in text
    assert "Small sizes" in text and "copies out of pinned memory" in text

    document["values"]["benches"]["claims"]["ratios"][0]["median"] = 987.654
    document["environment"]["cpu_model"] = "A CPU of another make"
    measured.write_text(json.dumps(document))
    assert report(measured).exit_code == 0
    assert "987.654" in page.read_text() and "A CPU of another make" in page.read_text()
