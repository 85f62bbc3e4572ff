"""The page of a search, through the verb `report`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from jobs.report import report_verb
from raytrain.report.sweep import sweep_page
from tests.unit.raytrain.report.test_build import Page, assert_self_contained

RUNS = [
    {"trial": 1, "outcome": "ok", "values": {"optim.lr": 0.1}, "eval_loss": 1.5, "steps": 40, "wall_s": 12.0},
    {"trial": 2, "outcome": "stopped", "values": {"optim.lr": 9.0}, "eval_loss": 4.0, "steps": 8, "wall_s": 3.0,
     "reason": "<slow>"},
]  # fmt: skip
PLOT = {"title": "mine: 2 trials, trial 1 chosen", "panels": []}
DONE = {"status": "done", "wall_s": 15.0, "best": RUNS[0], "reason": "lowest eval loss of 2 trials"}


def write(folder: Path, **files: Any) -> str:
    folder.mkdir()
    (folder / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RUNS))
    for name, content in files.items():
        path = folder / name.replace("_json", ".json").replace("_yaml", ".yaml")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "tune.png").write_bytes(b"pixels")
    return str(folder)


def test_a_search_has_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write(tmp_path / "mine-tune", tune_json=DONE, tune_plot_json=PLOT, best_yaml="optim: {lr: 0.1}\n")
    assert report_verb([sweep]) == 0
    assert capsys.readouterr().out.strip() == f"{sweep}/report/report.html"
    html = (tmp_path / "mine-tune/report/report.html").read_text()
    page = Page(html)
    assert_self_contained(page, html)
    for told in (
        "done mine: 2 trials, trial 1 chosen", "optim.lr 0.1 lowest eval loss of 2 trials",
        "1 chosen ok 1.5000 40 12.0 s", "2 stopped 4.0000 8 3.0 s 9 <slow>",
        "optim: {lr: 0.1}", f"raytrain train --from-tune {sweep}",
    ):  # fmt: skip
        assert told in page.text, (told, page.text)
    assert f"data:image/png;base64,{base64.b64encode(b'pixels').decode()}" in html


def test_a_search_that_was_interrupted_has_a_page_of_its_trials(tmp_path: Path) -> None:
    sweep = write(tmp_path / "half")
    assert report_verb([sweep]) == 0
    text = Page((tmp_path / "half/report/report.html").read_text()).text
    assert "not finished 2 trials" in text and "2 stopped 4.0000 8 3.0 s 9 <slow>" in text and "best.yaml" not in text


def test_a_batch_search_lists_the_sizes_it_measured() -> None:
    table = [{"precision": "bf16", "micro_batch_size": 8, "rows_per_s": 31.5, "low": 30.0, "high": 32.0}]
    decision = {"table": table, "precision": {"reason": "faster"}, "micro_batch_size": {"reason": "fits"}}
    outcome = {
        "status": "done",
        "decision": decision,
        "values": {"precision.dtype": "bf16", "loop.micro_batch_size": 8},
    }
    text = Page(sweep_page("a/b", trials=RUNS, outcome=outcome)).text
    assert "precision.dtype bf16 faster" in text and "loop.micro_batch_size 8 fits" in text
    assert "precision micro batch size rows per second least most bf16 chosen 8 31.50 30 32" in text
