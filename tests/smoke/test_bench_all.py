"""Bench `all` with small sizes: one table of claims, and the summary that `raytrain report` writes of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jobs.__main__ import main
from jobs.bench.harness.command import bench_verb


def document(*, quick: bool = False, passed: bool = True) -> dict[str, Any]:
    least, most = {"at_least": 1.2, "at_most": None}, {"at_least": None, "at_most": 1.0}
    ratios = [ratio("a / b", met=True, goal=least), ratio("c / d", met=False, goal=most),
              ratio("no goal", met=False, goal=None)]  # fmt: skip
    claims = [{"effect": "it is\nfaster | better", "verdict": "not reproduced", "evidence": "1.01"}]
    return {
        "quick": quick, "gate": {"passed": passed, "checks": [{"name": "equal", "passed": passed}]},
        "ratios": ratios if passed else [], "claims": claims if passed else [],
        "environment": {"date": "2026-11-22T08:00:00+00:00", "cpu_model": "A CPU"},
    }  # fmt: skip


def ratio(name: str, *, met: bool, goal: dict[str, Any] | None) -> dict[str, Any]:
    return {"name": name, "median": 1.5, "low": 1.25, "high": 2.0, "values": [1.0] * 7, "goal": goal, "met": met}


def test_small_benches_one_of_them_made_before_end_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "loop.json").write_text(json.dumps(document()))
    keys = ["dir=parts", 'only=["loop","checkpoint","memory"]', "checkpoint.threads=1", "memory.rows=15"]
    assert bench_verb("all", keys, out=None, quick=True, as_json=False) == 1, "memory was asked for something wrong"
    made = json.loads((tmp_path / "benchmarks.json").read_text())
    checks = {check["name"]: check for check in made["gate"]["checks"]}
    assert [checks[name]["passed"] for name in ("loop", "checkpoint", "memory")] == [True, True, False]
    assert "rows" in checks["memory"]["detail"] and "exit 2" in checks["memory"]["detail"]
    benches = made["values"]["benches"]
    assert set(benches) == {"loop", "checkpoint"} and benches["checkpoint"]["settings"]["threads"] == 1
    assert {row["bench"] for row in made["values"]["table"]} == {"loop", "checkpoint"}
    assert made["environment"]["versions"] and made["environment"]["cpu_model"] and made["environment"]["date"]
    said = capsys.readouterr().out
    assert "| bench | claim | our figure, with its 95 % interval | verdict |" in said
    assert "| checkpoint | " in said and "2026-11-22" in said


def report(path: Path) -> Result:
    return CliRunner().invoke(main, ["report", str(path)])


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """benchmarks.json of two real, small benches."""
    folder = tmp_path_factory.mktemp("summary")
    out = folder / "benchmarks.json"
    keys = [f"dir={folder / 'parts'}", 'only=["data","pinned"]', "data.threads=1"]
    assert bench_verb("all", keys, out=str(out), quick=True, as_json=False) == 0
    return out


def numbers(text: str) -> set[float]:
    """Every decimal number with at least three decimals, such as only a measurement has."""
    return {float(found) for found in re.findall(r"\d+\.\d{3}\b", text)}


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
