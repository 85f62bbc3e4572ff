"""The page of a search, through the verb `report`."""

from __future__ import annotations

import json
import re
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
PLOT = {
    "title": "mine: 2 trials, trial 1 chosen",
    "panels": [
        {"title": "evaluation loss", "x_label": "step", "kind": "line",
         "series": [{"label": "lr 0.1", "x": [10, 40], "y": [3.0, 1.5]}]},
        {"title": "rows per second", "x_label": "micro-batch size", "kind": "line", "doubling": True,
         "series": [{"label": "bf16", "x": [2, 4, 8], "y": [1.0, None, 3.0], "intervals": [[8, 0.0, 6.0]]}],
         "marks": [{"x": 8, "y": 3.0, "text": "chosen"}]},
        {"title": "lowest eval loss", "x_label": "trial", "kind": "dot",
         "series": [{"label": "", "x": [1, 2], "y": [1.5, 4]}]},
    ],
}  # fmt: skip
DONE = {"status": "done", "wall_s": 15.0, "best": RUNS[0], "reason": "lowest eval loss of 2 trials"}


def write(folder: Path, **files: Any) -> str:
    folder.mkdir()
    (folder / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RUNS))
    for name, content in files.items():
        path = folder / name.replace("_json", ".json").replace("_yaml", ".yaml")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
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
        "chosen: micro-batch size 8", "1 chosen ok 1.5000 40 12.0 s", "2 stopped 4.0000 8 3.0 s 9 <slow>",
        "optim: {lr: 0.1}", f"raytrain train --from-tune {sweep}",
    ):  # fmt: skip
        assert told in page.text, (told, page.text)
    assert page.tags.count("svg") == 3
    sizes = page.text.partition("Rows per second")[2].partition("Lowest eval loss")[0]
    assert "2 4 8" in sizes and "2.8" not in sizes, "sizes that double are labelled, and nothing between them"
    assert "line c1" not in html.partition("Lowest eval loss</span>")[2], "trials are not joined"


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
    text = Page(sweep_page("a/b", trials=RUNS, outcome=outcome, plot={}, best="")).text
    assert "precision.dtype bf16 faster" in text and "loop.micro_batch_size 8 fits" in text
    assert "precision micro-batch size rows per second 95 % interval bf16 8 31.50 30 to 32 chosen" in text


def test_series_of_one_hue_have_one_colour_and_a_size_that_was_not_measured_interrupts_the_line() -> None:
    speed = {"label": "bf16", "hue": "bf16", "x": [2, None, 8, 16], "y": [1.0, None, 3.0, 4.0],
             "intervals": [[2, 0.0, 2.0], [8, 2.0, 9.0]]}  # fmt: skip
    seen = {"label": "bf16 measured", "hue": "bf16", "kind": "dot", "x": [2], "y": [400.0]}
    guess = {"label": "bf16 predicted", "hue": "bf16", "faint": True, "x": [2, 16], "y": [390.0, 420.0]}
    panels = [
        {"title": "rows per second", "x_label": "n", "y_label": "rows/s", "doubling": True, "series": [speed]},
        {"title": "peak memory", "x_label": "n", "y_label": "MiB", "doubling": True, "series": [seen, guess],
         "limit": {"y": 450.0, "text": "memory budget"}, "note": "of one process"},
    ]  # fmt: skip
    html = sweep_page("a/b", trials=[], outcome={}, plot={"panels": panels}, best="")
    (line,) = re.findall(r'class="line c1" d="([^"]+)"', html)
    assert line.count("M") == 2 and line.count("h0") == 1
    (bars,) = re.findall(r'class="interval c1" d="([^"]+)"', html)
    assert bars.count("V") == 2
    memory = html[html.index("Peak memory, MiB") :]
    assert 'class="dot c1"' in memory and 'class="dashed c1"' in memory and "c2" not in memory
    assert "memory budget" in memory and "of one process" in memory and ">0</span>" in memory
