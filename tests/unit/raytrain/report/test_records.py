"""What readers make of records: outcome, history, account of time, settled plan, and the charts of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.wording import plain_number, seconds, size
from raytrain.report.charts import Curve, chart, smoothed, ticks
from raytrain.report.figures import history, outcome, time_account
from raytrain.report.records import RunRecords, number, percentile, read_records
from raytrain.runs.folder import RunFolder


def write(folder: Path, contents: dict[str, Any]) -> RunFolder:
    for name, content in contents.items():
        rows = content if name.endswith(".jsonl") else [content]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return RunFolder.open(str(folder))


def test_an_epoch_without_a_logged_step_keeps_its_row():
    train = [{"step": step, "epoch": epoch, "loss": 1.0} for step, epoch in ((5, 0), (10, 0), (35, 3))]
    rows = history(RunRecords(name="run", path="run", train=train, evals=[{"step": 20, "loss": 2.0}]))
    assert [row["epoch"] for row in rows] == [0, 1, 2, 3]
    assert [row["train_loss"] for row in rows] == [1.0, None, None, 1.0]
    assert rows[0]["eval_loss"] == 2.0 and rows[3]["last_step"] == 35


def test_the_figures_of_an_epoch_are_of_its_last_row_its_mean_or_its_largest():
    train = [
        {"step": 10 * n, "epoch": n // 4, "loss": 9.0 - n, "lr": 0.1 / n, "peak_memory_bytes": 100 * (5 - n) ** 2}
        for n in range(1, 8)
    ]
    first, second = history(RunRecords(name="run", path="run", train=train))
    assert (first["lr"], first["last_train_loss"], first["train_loss"]) == (0.1 / 3, 6.0, 7.0)
    assert (second["lr"], second["last_train_loss"], second["train_loss"]) == (0.1 / 7, 2.0, 3.5)
    assert (first["peak_memory_bytes"], second["peak_memory_bytes"]) == (1600, 400)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ({"status": "interrupted", "steps": 7}, "Interrupted after step 7; it can be resumed."),
        ({"status": "done", "steps": 7, "wall_s": 61, "reason": "7 steps"}, "Done: 7 steps in 1 min 01 s."),
        (
            {"status": "done", "steps": 7, "wall_s": 61, "reason": "no gain in 3 evaluations"},
            "Done: 7 steps in 1 min 01 s (no gain in 3 evaluations).",
        ),
        ({"status": "failed", "steps": 7}, "Failed after step 7: no cause was recorded"),
    ],
)
def test_the_outcome_in_one_sentence(tmp_path: Path, result: dict[str, Any], sentence: str):
    assert outcome(read_records(write(tmp_path, {"result.json": result}))).sentence == sentence


def test_a_decision_of_the_run_replaces_the_plan_and_the_newest_counts(tmp_path: Path):
    waiting = {"how": "measured", "bounds": [1, 2], "reason": "later"}
    names = ("precision", "checkpoint_every", "memory")
    decisions = [("precision", "bf16", None), ("checkpoint_every", 40, None), ("recovery", "raise_precision", "fp32")]
    events = [
        {"kind": "decision", "time": 110.0, "what": what, "value": value, "precision": precision, "reason": "so"}
        for what, value, precision in decisions
    ]
    probe = {"precision": {"value": "fp16", "reason": "measured"}}
    plan = {"choices": dict.fromkeys(names, waiting)}
    records = read_records(write(tmp_path, {"plan.json": plan, "events.jsonl": events, "memory_probe.json": probe}))
    assert [records.planned(name) for name in names] == ["fp32", 40, None]
    assert [(line.deferred, line.settled) for line in records.plan] == [(False, True), (False, True), (True, False)]


def test_gpus_that_could_not_be_used_are_read_from_the_plan(tmp_path: Path):
    run = write(tmp_path, {"plan.json": {"inventory": {"unusable": ["GPU 0 cannot be read"]}}})
    assert read_records(run).unusable == ["GPU 0 cannot be read"]
    assert read_records(write(tmp_path, {"plan.json": {}})).unusable == []


def test_faults_stand_once_and_when_they_happened(tmp_path: Path):
    fault = {"rank": 1, "error": "ValueError", "message": "bad"}
    events = [
        {"kind": "attempt", "attempt": 1, "time": 10.0},
        {"kind": "attempt", "attempt": 2, "time": 30.0},
        {"kind": "fault", "attempt": 2, "failed_attempt": 1, "failed_at": 20.0, "time": 31.0, **fault},
    ]
    (tmp_path / "faults").mkdir()
    files = {
        "faults/0001-rank00001.json": {"attempt": 1, "time": 20.0, **fault},
        "faults/0002-rank00001.json": {"attempt": 2, "time": 40.0, **fault},
    }
    records = read_records(write(tmp_path, {"events.jsonl": events, **files}))
    assert [(row["kind"], row["attempt"], row["time"]) for row in records.events] == [
        ("attempt", 1, 10.0), ("fault", 1, 20.0), ("attempt", 2, 30.0), ("fault", 2, 40.0)
    ]  # fmt: skip


def test_a_fault_has_the_start_and_the_place_that_its_attempt_recorded(tmp_path: Path):
    fault = {"kind": "fault", "attempt": 2, "rank": 1, "from_step": 0, "error": "WorkerDied", "node": "31ab"}
    ranks = [{"node": "10.0.0.1", "pid": 5}, {"node": "10.0.0.2", "pid": 6}]
    begun = {"kind": "attempt", "attempt": 2, "from_step": 276, "ranks": ranks}
    other = {**fault, "attempt": 3}
    run = write(tmp_path, {"events.jsonl": [begun, fault, other]})
    seen = read_records(run).of_kind("fault")
    assert seen == [{**fault, "from_step": 276, "node": "10.0.0.2", "pid": 6}, other]


def test_a_duplicate_row_counts_once(tmp_path: Path):
    rows = [{"kind": "train", "step": step, "loss": loss} for step, loss in ((2, 2.0), (1, 3.0), (2, 1.0))]
    records = read_records(write(tmp_path, {"metrics.jsonl": rows}))
    assert [(row["step"], row["loss"]) for row in records.train] == [(1, 3.0), (2, 1.0)]


def test_the_time_breakdown_states_the_unaccounted_time():
    result = {"wall_s": 12.0, "time": {"compute": 8.0, "startup": 1.0}}
    account = time_account(RunRecords(name="run", path="run", result=result))
    assert account == [("startup", 1.0), ("compute", 8.0), ("unaccounted", pytest.approx(3.0))]


def test_a_smoothed_curve_does_not_lag():
    line = [(float(n), 2.0 * n) for n in range(200)]
    assert [y for _, y in smoothed(line)] == pytest.approx([y for _, y in line])
    assert smoothed(line[:1]) == line[:1] and smoothed([]) == []


def test_a_noisy_last_point_is_no_spike_of_the_smoothed_curve():
    noisy = [(float(n), 1.0 if n < 299 else 3.0) for n in range(300)]
    ends = smoothed(noisy)[-1][1], smoothed(noisy[::-1])[0][1]
    assert all(1.0 < end < 2.3 for end in ends), ends
    assert smoothed(noisy)[100:102] == [(100.0, 1.0), (101.0, 1.0)]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.37, 0.46, [0.38, 0.4, 0.42, 0.44, 0.46]),
        (-1e-3, 1e-3, [-1e-3, -5e-4, 0, 5e-4, 1e-3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]):
    assert ticks(low, high, 5) == pytest.approx(expected)


@pytest.mark.parametrize("points", [[(1.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)], [(1.0, -3.0), (2.0, -3.0)], [(5.0, 1e-9)]])
def test_flat_and_single_point_curves_are_drawn(points: list[tuple[float, float]]):
    figure = chart("Flat", [Curve("one", points)])
    assert "nan" not in figure and "inf" not in figure
    drawn = re.search(r'class="(dot|line) c1" d="M([^"]*)"', figure)
    assert drawn is not None
    places = [float(place) for place in re.findall(r"-?[\d.]+", drawn[2])]
    assert all(0 <= place <= 1000 for place in places) and len(places) >= 2
    assert chart("None", [Curve("empty", [])]) == ""


def test_outliers_do_not_flatten_a_curve():
    points = [(float(n), 1.0 + 0.01 * n) for n in range(100)] + [(100.0, 1e9)]
    assert "1 point above the axis." in chart("Loss", [Curve("train", points)])


def test_numbers_that_are_no_numbers():
    assert [number(seen) for seen in ("nan", "inf", None, True, "x", 3, "2.5")] == [None] * 5 + [3.0, 2.5]
    assert percentile([], 0.5) is None
    assert percentile([1.0, 2.0, 4.0], 0.75) == 3.0


def test_figures_in_words():
    assert [seconds(s) for s in (None, 0, 0.0042, 0.5, 12.34, 61, 3661)] == [
        "-", "0 s", "4.2 ms", "0.5 s", "12.3 s", "1 min 01 s", "1 h 01 min"
    ]  # fmt: skip
    assert [size(b) for b in (None, 512, 3 * 2**20, 5 * 2**40)] == ["-", "512 B", "3 MiB", "5 TiB"]
    assert [plain_number(v) for v in (None, 1234567, 24809.9, 0.00012345)] == ["-", "1,234,567", "24,810", "0.0001234"]
