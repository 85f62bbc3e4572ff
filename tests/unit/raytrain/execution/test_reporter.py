"""Rows of rank 0: to the files, to observers, to the driver; and the fence against a newer attempt."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from raytrain.errors import RunError
from raytrain.execution.reporter import RankZeroReporter, SilentReporter, StepReports, Superseded
from raytrain.runs.folder import RunFolder, this_process

ROOT = Path(__file__).resolve().parents[4]


class Watcher:
    """An observer that keeps rows, or fails."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails, self.rows, self.events, self.closed = fails, [], [], False

    def metrics(self, row: dict[str, Any]) -> None:
        if self.fails:
            raise ValueError("a guest's mistake")
        self.rows.append(row)
        row["loss"] = -1.0  # it may do with its copy what it likes

    def event(self, row: dict[str, Any]) -> None:
        self.events.append(row["kind"])

    def close(self) -> None:
        self.closed = True


def opened(folder: Path, **more: Any) -> tuple[RunFolder, RankZeroReporter]:
    run = RunFolder.create(str(folder), "test")
    attempt = run.next_attempt(this_process())
    return run, RankZeroReporter(run, attempt=attempt, **{"observers": [], "report_progress": None, **more})


def test_rows_reach_the_files_and_each_observer_gets_a_copy(tmp_path: Path) -> None:
    first, second = Watcher(), Watcher()
    run, reporter = opened(tmp_path, observers=[first, second])
    reporter.metrics({"kind": "train", "step": 1, "loss": 2.5})
    reporter.event("checkpoint", step=1)
    assert run.read_rows(run.metrics) == [{"kind": "train", "step": 1, "loss": 2.5}]
    (event,) = run.read_rows(run.events)
    assert (event["kind"], event["step"], event["attempt"]) == ("checkpoint", 1, 1) and event["time"] > 1e9
    assert second.rows[0] is not first.rows[0] and second.events == ["checkpoint"]
    reporter.close()
    assert first.closed and second.closed


def test_the_best_evaluation_of_a_resumed_run_is_that_of_all_its_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, first = opened(tmp_path)
    for step, loss in ((10, 0.5), (20, 0.4), (25, math.nan), (30, 0.3)):
        first.metrics({"kind": "eval", "step": step, "loss": loss})
    capsys.readouterr()
    resumed = RankZeroReporter(
        run, attempt=run.next_attempt(this_process()), observers=[], report_progress=None, from_step=25
    )
    for step, loss in ((30, 0.45), (40, 0.35)):
        resumed.metrics({"kind": "eval", "step": step, "loss": loss})
    assert capsys.readouterr().out.splitlines() == [
        "step 30: eval loss 0.4500, best 0.4000", "step 40: eval loss 0.3500, the best so far",
    ]  # fmt: skip


def test_deaths_and_roll_backs_are_printed_and_other_decisions_are_only_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, reporter = opened(tmp_path)
    reporter.event("decision", what="rollback", reason="3 steps in a row were not finite")
    reporter.event("decision", what="overlap", reason="one bucket")
    reporter.event("death", reason="expert host 1 died")
    reporter.event("out_of_memory", reason="rank 0")
    assert capsys.readouterr().out.splitlines() == [
        "3 steps in a row were not finite", "expert host 1 died", "out of memory: rank 0",
    ]  # fmt: skip
    assert len(run.read_rows(run.events)) == 4


def test_load_intervals_and_traces_have_their_own_files(tmp_path: Path) -> None:
    run, reporter = opened(tmp_path)
    reporter.interval({"kind": "load", "step": 10, "layers": [[1, 2]]}, {7: b"trace"})
    assert run.read_rows(run.experts) == [{"kind": "load", "step": 10, "layers": [[1, 2]]}]
    assert run.store.read_bytes("routing/step_00000007.npz") == b"trace"
    run.next_attempt(this_process())
    with pytest.raises(Superseded):
        reporter.interval({"kind": "load", "step": 20}, {})
    SilentReporter().interval({}, {})


def test_a_failing_observer_is_disabled_with_an_event_and_a_line_and_the_others_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = Watcher(fails=True), Watcher()
    run, reporter = opened(tmp_path, observers=[bad, good])
    for step in (1, 2):
        reporter.metrics({"kind": "train", "step": step, "loss": 1.0})
    (event,) = run.read_rows(run.events)
    assert event["kind"] == "observer_failed" and event["observer"] == "Watcher"
    assert "a guest's mistake" in event["traceback"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning: the observer Watcher failed") and "a guest's mistake" in line
    assert [row["step"] for row in good.rows] == [1, 2] and len(run.read_rows(run.metrics)) == 2
    reporter.close()
    assert not bad.closed


def test_a_worker_that_finds_a_newer_attempt_ends_before_it_writes(tmp_path: Path) -> None:
    watcher = Watcher()
    run, reporter = opened(tmp_path, observers=[watcher])
    reporter.metrics({"kind": "train", "step": 1, "loss": 1.0})
    run.next_attempt(this_process())
    for write in (lambda: reporter.metrics({"kind": "train", "step": 2, "loss": 1.0}), lambda: reporter.event("x")):
        with pytest.raises(Superseded, match=r"attempt 2 has taken over .*; attempt 1 ends"):
            write()
    assert len(run.read_rows(run.metrics)) == 1 and run.read_rows(run.events) == [] and len(watcher.rows) == 1
    assert issubclass(Superseded, RunError)


def test_the_driver_hears_of_progress_at_most_twice_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("raytrain.execution.reporter.time.monotonic", lambda: now[0])
    reported: list[dict[str, Any]] = []
    _, reporter = opened(tmp_path, report_progress=reported.append)
    for step in range(30):
        now[0] += 0.1
        reporter.metrics({"kind": "train", "step": step, "loss": 1.0})
    assert [status["row"]["step"] for status in reported] == [0, 6, 12, 18, 24]


def test_the_other_ranks_write_nothing() -> None:
    silent = SilentReporter()
    assert silent.metrics({"kind": "train"}) is None and silent.event("x", step=1) is None and silent.close() is None


def test_steps_between_rows_are_reported_where_they_have_changed() -> None:
    now, sent = {"step": 3, "activity": ""}, []
    reports = StepReports(lambda: dict(now), sent.append)
    reports.report()
    reports.report()
    now["activity"] = "evaluating"
    reports.report()
    assert sent == [{"step": 3, "activity": ""}, {"step": 3, "activity": "evaluating"}]


def test_each_evaluation_prints_a_line_that_says_whether_it_is_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, reporter = opened(tmp_path)
    for step, loss in ((0, 5.0), (10, 2.0), (20, 2.5), (30, 2.2), (40, 1.0)):
        reporter.metrics({"kind": "train", "step": step, "loss": 0.1})
        reporter.metrics({"kind": "eval", "step": step, "loss": loss})
    assert capsys.readouterr().out.splitlines() == [
        "step 0: eval loss 5.0000",
        "step 10: eval loss 2.0000, the best so far",
        "step 20: eval loss 2.5000, best 2.0000",
        "step 30: eval loss 2.2000, best 2.0000",
        "step 40: eval loss 1.0000, the best so far",
    ]


@pytest.mark.covers("CFG-12")
def test_memory_is_printed_with_each_train_row_only_if_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = {"memory_allocated_bytes": 3 << 29, "memory_reserved_bytes": 2 << 30, "peak_memory_bytes": 7 << 28}
    row = {"kind": "train", "step": 20, "loss": 1.5, **memory}
    _, silent = opened(tmp_path / "a")
    silent.metrics(row)
    assert capsys.readouterr().out == ""
    _, reporter = opened(tmp_path / "b", print_memory=True)
    reporter.metrics(row)
    reporter.metrics({"kind": "eval", "step": 20, "loss": 1.5})
    line, evaluation = capsys.readouterr().out.splitlines()
    assert line == "step 20: memory 1.50 GiB allocated, 2.00 GiB reserved, 1.75 GiB peak"
    assert evaluation == "step 20: eval loss 1.5000"


@pytest.mark.covers("PERF-22")
def test_the_line_of_an_epoch_is_the_one_in_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = {f"memory_{name}_bytes": gib * 2**30 for name, gib in (("allocated", 2.34), ("reserved", 2.5))}
    row = {"kind": "train", "step": 7032, "epoch": 3, "loss": 1.23451, "samples_per_s": 5121.4, **memory}
    _, silent = opened(tmp_path / "a")
    silent.metrics({**row, "ends_epoch": True})
    _, reporter = opened(tmp_path / "b", print_epochs=True)
    reporter.metrics(row)
    assert capsys.readouterr().out == ""
    reporter.metrics({**row, "ends_epoch": True})
    (line,) = capsys.readouterr().out.splitlines()
    assert f"```text\n{line}\n```" in (ROOT / "raytrain" / "README.md").read_text()
