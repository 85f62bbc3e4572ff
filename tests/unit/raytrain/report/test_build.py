"""The report of a run: complete, escaped, self-contained, and there in whatever state the run is."""

from __future__ import annotations

import csv
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jobs.report import report_verb
from raytrain.errors import InputError
from raytrain.report.compare import compare_page, not_comparable
from raytrain.report.figures import outcome, summarise
from raytrain.report.page import build_report, report_page
from raytrain.report.records import read_records
from raytrain.runs.folder import RunFolder

VOID = {"meta", "br", "img"}
TIME = {"startup": 2.0, "data": 1.0, "compute": 5.0, "communication": 0.5, "save": 0.25, "other": 0.25}


def choice(value: Any, reason: str = "because") -> dict[str, Any]:
    return {"value": value, "reason": reason}


def files() -> dict[str, Any]:
    """A finished run of 20 steps in two epochs, logged at every second step, restarted once."""
    train = [
        {"kind": "train", "step": n, "epoch": (n - 1) // 10, "loss": 4.0 - 0.1 * n, "grad_norm": 1.0,
         "lr": 1e-3, "samples_per_s": 100.0, "tokens_per_s": 6400.0, "step_time_s": 0.25,
         "step_ms_p50": 240.0, "step_ms_p95": 300.0, "peak_memory_bytes": 2**20, "skipped_steps": 0}
        for n in range(2, 21, 2)
    ]  # fmt: skip
    evals = [{"kind": "eval", "step": n, "loss": 4.5 - 0.1 * n, "accuracy": n / 40} for n in (10, 20)]
    names = ("mode", "device", "strategy", "workers", "micro_batch_size", "accumulation", "effective_batch")
    values = ("cpu", "cpu", "data_parallel", 2, 4, 1, 8)
    choices = {name: choice(value) for name, value in zip(names, values, strict=True)}
    choices["precision"] = {"how": "measured", "bounds": ["bf16", "fp32"], "reason": "the faster one"}
    return {
        "job.yaml": "name: shown\n",
        "plan.json": {
            "choices": choices,
            "warnings": ["threads: one each"],
            "config": {"loop": {"compile": "off"}, "experts": {"num_experts": 4}, "optim": {"lr": 0.001}},
            "sources": {"optim.lr": "command line", "experts.num_experts": "file"},
        },
        "environment.json": {"host": "box", "cpu_model": "A CPU", "cores": 2, "gpus": [], "memory_bytes": 9},
        "preflight.json": [{"name": "disk", "status": "warn", "seen": "little space", "remedy": "free some"}],
        "memory_probe.json": {"precision": {"value": "bf16", "reason": "half the time"}},
        "metrics.jsonl": train + evals,
        "events.jsonl": [
            {"kind": "attempt", "time": 100.0, "attempt": 1, "from_step": 0},
            {"kind": "checkpoint", "time": 104.0, "step": 10, "stall_s": 0.004, "seconds": {"compute": 3.0}},
            {"kind": "attempt", "time": 107.0, "attempt": 2, "from_step": 10},
        ],
        "faults/0001-rank00001.json": {
            "attempt": 1, "time": 105.0, "error": "WorkerDied", "message": "signal 9",
            "traceback": "Traceback: here",
        },
        "sample.json": {"prompt": "To be", "text": "To be or not", "step": 20, "temperature": 0.8},
        "result.json": {"status": "done", "steps": 20, "final_loss": 2.0, "best_eval_loss": 2.5,
                        "best_step": 20, "wall_s": sum(TIME.values()), "time": TIME},
    }  # fmt: skip


def write(folder: Path, contents: dict[str, Any]) -> RunFolder:
    for name, content in contents.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".jsonl") and isinstance(content, list):
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return RunFolder.open(str(folder))


def summary_from_text(text: str) -> dict[str, str]:
    """The figures of a performance summary by name, each as text."""
    rows = (line.split(None, 1) for line in text.splitlines()[2:] if line.strip())
    return {row[0]: row[1].strip() if len(row) > 1 else "" for row in rows}


class Page(HTMLParser):
    """Reads a page strictly: every tag closed in order; keeps tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(run: RunFolder) -> Page:
    return Page(report_page(read_records(run)))


def assert_self_contained(page: Page, html: str) -> None:
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    for key, value in page.attributes:
        assert not key.startswith("on")
        assert key not in ("src", "srcset", "action") or value.startswith("data:")
        assert key != "href" or value.startswith(("#", "../"))
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in html


@pytest.mark.covers("TRB-15")
def test_the_copies_of_batches_are_figures_and_a_line_of_the_page(tmp_path: Path) -> None:
    counts = {"tensors": 40, "bytes": 8000, "pinned": 36, "non_blocking": 36, "pageable": 4, "other_device": 0}
    contents = files()
    for attempt, reason in ((1, "of the first attempt"), (2, "40 tensors of batches copied")):
        scale = {name: count * attempt // 2 for name, count in counts.items()}
        contents["events.jsonl"] += [
            {"kind": "transfers", "time": 110.0, "attempt": attempt, "reason": reason, **scale}
        ]
    run = write(tmp_path, contents)
    found = {name: value for name, value in summarise(read_records(run)).items() if name.startswith("batch_")}
    assert found == {
        "batch_tensors_copied": 40, "batch_bytes_copied": 8000, "batch_tensors_pinned": 36,
        "batch_tensors_non_blocking": 36, "batch_tensors_pageable": 4, "batch_tensors_other_device": 0,
    }  # fmt: skip
    assert "Batches 40 tensors of batches copied" in page_of(run).text
    assert "batch_tensors_copied" not in summarise(read_records(write(tmp_path / "running", files())))


def test_the_page_describes_the_run_in_one_file(tmp_path: Path):
    html = Path(build_report(write(tmp_path, files()))).read_text()
    page = Page(html)
    assert_self_contained(page, html)
    assert "svg" in page.tags
    for told in (
        "Done: 20 steps in 9.0 s.", "2 attempts", "Best eval loss 2.5000 step 20", "half the time",
        "resolved in the run", "optim.lr 0.001 command line", "experts.num_experts 4 file",
        "WorkerDied: signal 9", "Traceback: here", "To be or not", "step 20, temperature 0.8",
        "A CPU, 2 cores", "little space; free some", "threads: one each",
        "startup 2.0 s 22.2%", "total 9.0 s", "name: shown", "training waited 4 ms",
    ):  # fmt: skip
        assert told in page.text, told


@pytest.mark.covers("VIS-06")
def test_summary_text_and_json_have_the_same_fields_and_values(tmp_path: Path):
    build_report(write(tmp_path, files()))
    twin = json.loads((tmp_path / "report/performance_summary.json").read_text())
    text = summary_from_text((tmp_path / "report/performance_summary.txt").read_text())
    assert list(text) == list(twin)
    for name, value in twin.items():
        shown = text[name]
        assert shown == value if isinstance(value, str) else (None if shown == "-" else json.loads(shown)) == value
    expected = {
        "status": "done", "mode": "cpu", "devices": "2 x cpu (A CPU)", "strategy": "data_parallel",
        "precision": "bf16", "micro_batch": 4, "accumulation": 1, "effective_batch": 8, "experts_first": 4,
        "experts_last": 4, "compile": "off", "steps": 20, "epochs": 2, "attempts": 2, "wall_s": 9,
        "compute_s": 5, "startup_s": 2, "tokens_per_s_median": 6400, "samples_per_s_median": 100, "step_ms_p50": 240,
        "samples_per_s_run": 17.7778, "tokens_per_s_run": 1137.78,
        "step_ms_p95": 300, "final_loss": 2, "best_eval_loss": 2.5, "best_eval_step": 20, "accuracy": 0.5,
        "peak_memory_bytes": 2**20,
    }  # fmt: skip
    assert {name: twin[name] for name in expected} == expected


def test_rates_of_the_whole_run_count_the_shorter_last_batch_of_an_epoch(tmp_path: Path):
    """Two epochs of 75 rows in ten steps of 8, and one more step: 158 samples in 9 seconds."""
    contents = files()
    contents["plan.json"]["choices"]["steps_per_epoch"] = choice(10)
    contents["plan.json"]["data_facts"] = {"train_rows": 75}
    contents["result.json"]["steps"] = 21
    summary = summarise(read_records(write(tmp_path, contents)))
    assert summary["samples_per_s_run"] == 17.5556 and summary["tokens_per_s_run"] == 1123.56


def test_the_first_loss_is_that_of_step_1(tmp_path: Path):
    contents = files()
    assert summarise(read_records(write(tmp_path / "a", contents)))["first_loss"] is None, "rows begin at step 2"
    contents["metrics.jsonl"].insert(0, {**contents["metrics.jsonl"][0], "step": 1, "loss": 4.5})
    assert summarise(read_records(write(tmp_path / "b", contents)))["first_loss"] == 4.5


@pytest.mark.covers("COMP-05", "TRB-33")
def test_the_summary_states_the_result_of_compilation(tmp_path: Path):
    contents = files()
    parts = [{"name": "blocks.0", "achieved": "compiled", "seconds": 8.0, "graph_breaks": 2, "recompiles": 1},
             {"name": "head", "achieved": "eager", "seconds": 0.5, "reason": "MemoryError"}]  # fmt: skip
    early = {"kind": "compile", "step": 1, "requested": "default", "achieved": "0 of 2 parts", "parts": []}
    last = {"kind": "compile", "step": 7, "requested": "default", "achieved": "1 of 2 parts", "seconds": 8.5,
            "graphs": 3, "graph_breaks": 2, "recompiles": 1, "reasons": ["MemoryError"], "parts": parts}  # fmt: skip
    eager = {"kind": "eager_step", "seconds": 2.0, "micro_batch": 4, "passes": 5}
    contents["events.jsonl"] += [early, last, eager]
    contents["plan.json"]["config"]["loop"]["compile"] = "default"
    build_report(write(tmp_path, contents))
    text = summary_from_text((tmp_path / "report" / "performance_summary.txt").read_text())
    assert text["compile"] == "default" and text["compile_achieved"] == "1 of 2 parts"
    assert (text["compile_seconds"], text["compile_graph_breaks"], text["compile_recompiles"]) == ("8.5", "2", "1")
    assert json.loads(text["compile_parts"]) == {"blocks.0": "compiled", "head": "eager"}
    assert text["compile_reasons"] == "MemoryError"
    assert (text["compile_took"], text["eager_step"]) == ("8.5 s of 9.0 s", "2.0 s")
    assert (text["compiled_step"], text["compiled_over_eager"]) == ("0.24 s", "0.12 times")
    assert text["compile_pays_after"] == "step 5"


@pytest.mark.covers("VIS-12")
def test_history_has_one_row_for_each_epoch(tmp_path: Path):
    build_report(write(tmp_path, files()))
    with (tmp_path / "report/history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert [(row["first_step"], row["last_step"]) for row in rows] == [("1", "10"), ("11", "20")]
    assert [float(row["eval_loss"]) for row in rows] == [3.5, 2.5]
    assert [float(row["epoch_time_s"]) for row in rows] == [2.5, 2.5]
    assert float(rows[1]["train_loss"]) == pytest.approx(2.4)


def hostile(value: Any) -> Any:
    """Every text of a record replaced by one that tries to leave its place."""
    if isinstance(value, dict):
        return {key: seen if key in ("kind", "status") else hostile(seen) for key, seen in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return "'\"></pre></span><script>alert(1)</script>&\x00\ud800" if isinstance(value, str) else value


def test_no_text_of_a_record_becomes_markup(tmp_path: Path):
    contents = {name: hostile(content) for name, content in files().items() if name != "job.yaml"}
    contents["job.yaml"] = "x: </pre><script>alert(2)</script>\n"
    contents["events.jsonl"].append({"kind": "<b onclick=x>odd</b>", "<img src=x>": "field", "time": "<i>"})
    contents["events.jsonl"].append({"kind": "odd", "message": "told", "<img src=y>": "<img src=z>"})
    contents["plan.json"]["config"]["<script>"] = {"<b>": "<i>"}
    run = write(tmp_path / "<b>run&'\"", contents)
    html = Path(build_report(run)).read_text()
    page = Page(html)
    assert_self_contained(page, html)
    assert "<script>alert(1)</script>" in page.text and "<b>run&'\"" in page.text
    assert "script" not in page.tags and "img" not in page.tags


def test_a_run_that_failed_before_the_plan(tmp_path: Path):
    run = write(tmp_path, {"job.yaml": "name: x\n", "result.json": {"status": "failed", "reason": "OutOfMemory: no"}})
    page = Page(Path(build_report(run)).read_text())
    assert "Failed after step 0: OutOfMemory: no" in page.text
    assert "Lower loop.micro_batch_size" in page.text
    assert "Curves" not in page.text and "The plan and its reasons" not in page.text
    assert json.loads((tmp_path / "report/performance_summary.json").read_text())["status"] == "failed"
    assert (tmp_path / "report/history.csv").read_text().count("\n") == 1


def test_an_empty_folder_of_a_run_that_was_lost_at_once(tmp_path: Path):
    assert "Still running or lost" in page_of(write(tmp_path, {"job.yaml": ""})).text


def test_torn_and_broken_files_are_named_and_the_rest_is_shown(tmp_path: Path):
    contents = files()
    lines = [json.dumps(row) for row in contents["metrics.jsonl"]]
    contents["metrics.jsonl"] = "\n".join([*lines[:3], '{"kind": "train", "st', *lines[3:], '{"kind": "tr'])
    contents |= {"result.json": '{"status": ', "plan.json": "[]", "environment.json": "null"}
    page = page_of(write(tmp_path, contents))
    assert "metrics.jsonl: 2 broken lines left out" in page.text
    assert "result.json: " in page.text and "Still running or lost" in page.text
    assert len(read_records(RunFolder.open(str(tmp_path))).train) == 10


def test_a_running_run_is_reported_as_running_despite_an_older_result(tmp_path: Path):
    run = RunFolder.create(str(tmp_path), "live")
    assert outcome(read_records(run)).status == "running"
    assert "Still running" in page_of(run).text


def test_events_of_one_kind_in_a_row_are_drawn_together(tmp_path: Path):
    contents = files()
    contents["events.jsonl"] += [{"kind": "checkpoint", "time": 120.0 + n, "step": 10 + n} for n in range(1, 7)]
    assert "checkpoint 6 times, steps 11 to 16" in page_of(write(tmp_path, contents)).text


def test_report_of_several_runs_compares_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The page lies beside the runs, not in one of them."""
    other = files()
    other["result.json"] |= {"best_eval_loss": 1.25, "best_step": 10}
    for row in other["metrics.jsonl"]:
        row["loss"] /= 2
        if row["kind"] == "train":
            row["step_time_s"] *= 2
            row["step_ms_p50"] *= 2
            row["step_ms_p95"] *= 2
    other["plan.json"]["config"]["optim"]["lr"] = 0.004
    paths = [write(tmp_path / "a", files()).path, write(tmp_path / "b", other).path]
    assert report_verb(paths) == 0
    html = (tmp_path / "comparisons/a-b.html").read_text()
    page = Page(html)
    assert_self_contained(page, html)
    assert "What differs in their jobs Key a b optim.lr 0.001 0.004 Key figures" in page.text, page.text[:400]
    assert '<a href="../a/report/report.html">a</a>' in html
    assert "best eval loss 2.5000 1.2500 -50%" in page.text and "step time (p50) 0.24 s 0.48 s +100%" in page.text
    assert '<span class="badge good">-50%</span>' in html and '<span class="badge error">+100%</span>' in html
    assert "wall time 9.0 s 9.0 s" in page.text and "tokens per second (median) 6,400 6,400" in page.text
    assert "not comparable" not in page.text
    assert capsys.readouterr().out.split() == [
        f"{paths[0]}/report/report.html", f"{paths[1]}/report/report.html", f"{tmp_path}/comparisons/a-b.html"
    ]  # fmt: skip


def test_what_auto_chose_differently_is_among_the_differences_and_a_longer_run_is_not_worse(tmp_path: Path):
    other = files()
    other["memory_probe.json"]["precision"]["value"] = "fp32"
    other["plan.json"]["config"]["tune"] = {"found": {"signature": "0bfb"}}
    other["result.json"] |= {"steps": 40, "wall_s": 90.0}
    runs = [read_records(write(tmp_path / name, contents)) for name, contents in (("a", files()), ("b", other))]
    text = Page(compare_page(runs)).text
    assert "What differs in their jobs Key a b precision chosen bf16 fp32 Key figures" in text, text[:300]
    assert "wall time 9.0 s 1 min 30 s tokens per second (median)" in text, text
    assert "final loss 2.0000 2.0000" in text and "strategy" not in text, "what is the same and no result is left out"
    assert "0bfb" not in text


def test_runs_of_one_job_differ_in_nothing(tmp_path: Path):
    runs = [read_records(write(tmp_path / name, files())) for name in ("a", "b")]
    assert "Nothing: all keys have the same values." in compare_page(runs)


def test_runs_of_other_vocabularies_or_splits_are_said_not_to_be_comparable(tmp_path: Path):
    runs = []
    for name, vocab, held, source in (("a", 256, 10, "x"), ("b", 65, 10, "x"), ("c", 256, 20, "y")):
        contents = files()
        contents["plan.json"]["data_facts"] = {"train_rows": 90, "eval_rows": held, "vocab_size": vocab}
        contents["plan.json"]["config"] |= {"data": {"source": source}, "seed": 1}
        contents["plan.json"]["sources"] |= {"data.source": "file", "seed": "file"}
        runs.append(write(tmp_path / name, contents))
    records = [read_records(run) for run in runs]
    names = ["a", "b", "c"]
    (vocabulary,) = not_comparable(records[:2], names[:2])
    assert vocabulary[0].startswith("Different vocabularies") and "a 256, b 65" in vocabulary[1]
    (split,) = not_comparable([records[0], records[2]], ["a", "c"])
    assert split[0].startswith("Different evaluation data") and "a 10, c 20" in split[1] and "data.source" in split[1]
    assert not_comparable([records[0], records[0]], ["a", "a"]) == []
    assert "Different vocabularies" in Page(compare_page(records)).text


def test_a_language_model_has_a_perplexity(tmp_path: Path):
    contents = files()
    contents["plan.json"]["data_facts"] = {"train_rows": 90, "eval_rows": 10, "vocab_size": 256}
    summary = summarise(read_records(write(tmp_path / "a", contents)))
    assert summary["perplexity"] == pytest.approx(math.exp(2.5), rel=1e-5)
    assert summarise(read_records(write(tmp_path / "b", files())))["perplexity"] is None


def test_report_without_a_path_uses_the_newest_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create("runs", "one")
    run.write_text(run.job, "name: one\n")
    assert report_verb([]) == 0 and report_verb(["latest"]) == 0
    assert (Path(run.path) / "report/report.html").exists()


def test_a_folder_that_is_not_a_run_is_refused_and_not_changed(tmp_path: Path):
    write(tmp_path / "run", files())
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("mine")
    for path in ("other", "nowhere"):
        with pytest.raises(InputError) as caught:
            report_verb([str(tmp_path / "run"), str(tmp_path / path)])
        assert caught.value.exit_code == 2 and path in str(caught.value)
    assert [entry.name for entry in (tmp_path / "other").iterdir()] == ["notes.txt"]
    assert not (tmp_path / "run/report").exists()
