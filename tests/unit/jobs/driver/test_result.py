"""`result.json` and the last lines: over all attempts, from what the run folder holds."""

from __future__ import annotations

import errno
import io
import itertools
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cluster.preflight import JOB_ENVIRONMENT
from jobs.driver import result
from jobs.driver.progress import Phases
from jobs.driver.result import (
    Result,
    close_run,
    command_start,
    last_sign_of_life,
    print_result,
    sample_lines,
    write_result,
)
from raytrain.errors import RunError
from raytrain.execution.driver_channel import AttemptResult
from raytrain.runs.folder import RESERVE_BYTES, RunFolder, this_process
from raytrain.runs.records import PURPOSES
from raytrain.runs.storage import LocalStore, explained_writes


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(str(tmp_path), "test")


def rows(run: RunFolder, *some: dict[str, Any]) -> None:
    for row in some:
        run.writer(run.metrics).write(row)


def checkpoint(run: RunFolder, step: int, *, eval_loss: float | None, complete: bool = True) -> None:
    run.write_json(f"checkpoints/step_{step:08d}/manifest.json", {"eval_loss": eval_loss})
    if complete:
        run.write_text(f"checkpoints/step_{step:08d}/COMPLETE", "x")


def test_the_result_is_read_from_the_files_of_all_attempts(run: RunFolder) -> None:
    rows(
        run,
        {"kind": "train", "step": 5, "loss": 3.0},
        {"kind": "eval", "step": 5, "loss": 2.5},
        {"kind": "eval", "step": 8, "loss": float("nan")},
        {"kind": "eval", "step": 10, "loss": 2.75},
        {"kind": "train", "step": 10, "loss": 1.25},
    )
    now = time.time()
    for row in (
        {"kind": "driver_start", "time": now - 20, "process_start": now - 21, "last_sign_of_life": None},
        {"kind": "attempt", "time": now - 15, "attempt": 1},
        {"kind": "account", "time": now - 1, "seconds": {"compute": 12.0}},
        {"kind": "attempt_end", "time": now - 1},
        {"kind": "driver_end", "time": now - 0.5},
    ):
        run.append_event(row)
    checkpoint(run, 5, eval_loss=2.5)
    checkpoint(run, 10, eval_loss=2.75)
    checkpoint(run, 12, eval_loss=0.5, complete=False)
    record = write_result(run, AttemptResult("done", "10 steps", steps=10))
    assert record == run.read_json(run.result)
    assert record["status"] == "done" and record["steps"] == 10 and record["final_loss"] == 1.25
    assert record["best_eval_loss"] == 2.5 and record["best_checkpoint"] == "step_00000005"
    assert record["best_step"] == 5 and record["weights_step"] is None
    assert record["weights"] is None and list(record["time"]) == list(PURPOSES)
    assert record["wall_s"] == pytest.approx(20.5) and sum(record["time"].values()) == pytest.approx(20.5)
    assert record["time"]["compute"] == 12.0 and record["time"]["startup"] == pytest.approx(6.0)


def test_a_run_that_never_stepped_has_a_result_too(run: RunFolder) -> None:
    record = write_result(run, AttemptResult("interrupted", ""))
    assert record["steps"] == 0 and record["reason"] == ""
    for name in ("final_loss", "best_eval_loss", "best_checkpoint", "weights"):
        assert record[name] is None


def test_without_evaluations_the_newest_checkpoint_is_the_best(run: RunFolder) -> None:
    checkpoint(run, 3, eval_loss=None)
    checkpoint(run, 9, eval_loss=None)
    assert write_result(run, AttemptResult("failed", "why"))["best_checkpoint"] == "step_00000009"


def test_steps_are_those_of_the_last_row_where_the_workers_could_not_say(run: RunFolder) -> None:
    rows(run, {"kind": "train", "step": 7, "loss": 1.0})
    assert write_result(run, AttemptResult("failed", "killed"))["steps"] == 7


def test_the_last_sign_of_life_is_the_newest_of_event_row_and_heartbeat(run: RunFolder) -> None:
    assert last_sign_of_life(run) is None
    run.append_event({"kind": "driver_start", "time": 5.0})
    assert last_sign_of_life(run) == 5.0
    run.next_attempt({"host": "h", "pid": 1, "start": 1})
    run.heartbeat()
    beat = last_sign_of_life(run)
    assert beat is not None and abs(time.time() - beat) < 60
    run.append_event({"kind": "x", "time": beat + 100})
    assert last_sign_of_life(run) == beat + 100


def test_a_commands_time_begins_with_its_process_and_a_notebooks_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(result, "_COMMANDS", itertools.count())
    monkeypatch.setattr(result, "NEW_PROCESS_S", math.inf)
    began = command_start(now)
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    (booted,) = (line.split()[1] for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    assert abs(began - (int(booted) + ticks / os.sysconf("SC_CLK_TCK"))) < 2
    assert command_start(now + 2) == now + 2, "the second in a process"
    monkeypatch.setattr(result, "_COMMANDS", itertools.count())
    monkeypatch.setattr(result, "NEW_PROCESS_S", 0.0)
    assert command_start(now) == now, "a process that has been there for days"


@pytest.mark.parametrize("status", ["done", "failed", "interrupted"])
def test_the_last_lines_say_how_it_ended_and_where_things_are(run: RunFolder, status: str) -> None:
    out = io.StringIO()
    record = {
        "status": status, "steps": 12, "wall_s": 61.6, "final_loss": 1.23456, "best_eval_loss": 2.0,
        "reason": "[red]the cause[/red]", "weights": "w.safetensors" if status == "done" else None,
    }  # fmt: skip
    print_result(Console(file=out, width=40), run, record, report="report.html")
    lines = out.getvalue().splitlines()
    text = " ".join(lines)
    assert f"{status} after 12 steps in 62 s, loss 1.2346, best eval loss 2.0000" in text.replace("  ", " ")
    assert f"run     {run.path}" in lines and "report  report.html" in lines  # a path is never broken
    assert ("reason: [red]the cause[/red]" in lines) == (status == "failed")
    assert ("weights w.safetensors" in lines) == (status == "done")


def test_the_last_lines_account_for_the_time_and_name_the_next_commands(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    phases = Phases(clock=iter((10.0, 20.0)).__next__, began=0.0)
    phases.begin("training")
    phases.end()
    for number, seconds in ((1, {"eval": 5.0}), (2, {"eval": 2.0})):  # two commands; the line is about the last one
        start = {"kind": "driver_start", "process_start": 0.0, "last_sign_of_life": None, "ray_job": None}
        for row in (start, {"kind": "attempt", "attempt": number}, {"kind": "account", "seconds": seconds}):
            run.append_event({"time": 1.0, **row})

    def lines(status: str, **more: Any) -> list[str]:
        record = {"status": status, "steps": 12, "wall_s": 10.0, "final_loss": 1.0, "best_eval_loss": None,
                  "reason": "why", "time": {"eval": 2.0}, **more}  # fmt: skip
        out = io.StringIO()
        print_result(Console(file=out, width=200), run, record, report="report.html", phases=phases)
        return out.getvalue().splitlines()

    where = os.path.relpath(run.path)
    done = lines("done", weights="w")
    assert "time    10 s: training 10.0 (evaluating 2.0)" in done
    assert done[0] == "done after 12 steps in 10 s over 2 commands, loss 1.0000"
    commands = [
        f"next    raytrain infer {where} infer.input=FILE",
        f"        raytrain train --resume {where} loop.max_steps=24",
    ]
    assert done[-2:] == commands
    for limits, key in (
        ({"epochs": 3, "max_steps": None}, "loop.epochs=6"), ({"epochs": 3, "max_steps": 99}, "loop.max_steps=24")
    ):  # fmt: skip
        run.write_json(run.plan, {"config": {"loop": limits}})
        assert f"        raytrain train --resume {where} {key}" in lines("done", weights="w")
    assert lines("failed")[-2:] == [
        f"next    raytrain train --resume {where}", f"        raytrain check --bundle problem.zip --run {where}",
    ]  # fmt: skip
    assert not any("next" in line for line in lines("interrupted"))
    monkeypatch.setenv(JOB_ENVIRONMENT, "{}")
    where = run.path  # its own folder is not where it was submitted from
    assert f"next    raytrain submit train --resume {where}" in lines("failed")
    on_cluster = lines("done", weights="w")[-2:]
    assert on_cluster[0] == f"next    raytrain submit infer {where} infer.input=FILE infer.output=FOLDER"
    assert on_cluster[1].startswith(f"        raytrain submit train --resume {where} ")
    monkeypatch.delenv(JOB_ENVIRONMENT)
    run.write_text(run.job, "model: {module: <object Net>}\n")
    assert lines("done", weights="w")[-1] == f'next    train(..., resume="{os.path.relpath(run.path)}")'


def test_an_interrupted_run_says_how_it_is_resumed_from_where_it_was_started(run: RunFolder) -> None:
    def last_line() -> str:
        out = io.StringIO()
        run.next_attempt(this_process())
        close_run(run, AttemptResult("interrupted", "a stop was asked for", steps=3), console=Console(file=out))
        return out.getvalue().splitlines()[-1]

    assert last_line() == f"interrupted; resume with: raytrain train --resume {run.path}"
    run.write_text(run.job, "model: {module: <object Net>}\n")
    assert last_line() == f'interrupted; resume with: train(..., resume="{run.path}")'


def test_steps_are_those_of_the_newest_checkpoint_where_a_command_ended_before_its_first_step(run: RunFolder) -> None:
    """A row every ten steps, stopped after step 63; then resumed, and stopped before step 64."""
    rows(run, {"kind": "train", "step": 60, "loss": 1.0})
    checkpoint(run, 50, eval_loss=None)
    checkpoint(run, 63, eval_loss=None)
    checkpoint(run, 70, eval_loss=None, complete=False)
    first = write_result(run, AttemptResult("interrupted", "a stop was asked for", steps=63))
    second = write_result(run, AttemptResult("interrupted", "interrupted before the first step"))
    assert first["steps"] == second["steps"] == 63 and second["best_checkpoint"] == "step_00000063"
    damaged = write_result(run, AttemptResult("done", "5 steps", steps=5))
    assert damaged["steps"] == 60, "what the workers say counts, not a checkpoint that they could not load"


def test_of_equal_eval_losses_the_first_is_the_best(run: RunFolder) -> None:
    for step, loss in ((2, 3.0), (4, 1.5), (6, 1.5), (8, float("inf"))):
        rows(run, {"kind": "eval", "step": step, "loss": loss})
        checkpoint(run, step, eval_loss=loss if loss < 10 else None)
    record = write_result(run, AttemptResult("done", "", steps=8))
    assert record["best_step"] == 4 and record["best_checkpoint"] == "step_00000004"


def full_disk(monkeypatch: pytest.MonkeyPatch, run: RunFolder, *, reserve_counts: bool) -> None:
    """From now on, writes to the folder fail; with `reserve_counts`, only while the reserved space is not freed."""
    write = LocalStore.write_bytes

    def write_bytes(store: LocalStore, name: str, data: bytes) -> None:
        if not reserve_counts or run.exists("attempts/reserve"):
            with explained_writes(store.at(name)):
                raise OSError(errno.ENOSPC, "No space left on device")
        write(store, name, data)

    monkeypatch.setattr(LocalStore, "write_bytes", write_bytes)


def test_a_run_on_a_full_disk_writes_its_result_and_names_what_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(str(tmp_path), "full")
    run.next_attempt(this_process())
    run.reserve_space()
    assert (Path(run.path) / "attempts" / "reserve").stat().st_size == RESERVE_BYTES
    full_disk(monkeypatch, run, reserve_counts=True)
    with pytest.raises(RunError, match="No space left"):
        run.write_text(run.plan, "{}")
    monkeypatch.setattr("raytrain.report.page.build_report", failing_report)
    failed = AttemptResult("failed", "metrics.jsonl: cannot be written")
    console = Console(file=io.StringIO(), width=500)
    assert close_run(run, failed, console=console).status == "failed"
    assert run.read_json(run.result)["reason"] == "metrics.jsonl: cannot be written"
    assert not run.exists("attempts/reserve")
    assert "report  not written: no room for the report" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_mistake_in_the_report_changes_nothing_of_a_run_that_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(str(tmp_path), "done")
    run.next_attempt(this_process())
    monkeypatch.setattr("raytrain.report.page.build_report", lambda run: {}["chart"])
    console = Console(file=io.StringIO(), width=500)
    result = close_run(run, AttemptResult("done", "5 steps", steps=5), console=console)
    assert result.status == run.read_json(run.result)["status"] == "done"
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"not written (KeyError: 'chart'); `raytrain report {run.path}` shows where" in printed


def failing_report(run: RunFolder) -> str:
    raise RunError("no room for the report")


def test_where_no_result_can_be_written_the_error_begins_with_what_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder.create(str(tmp_path), "full")
    run.next_attempt(this_process())
    run.reserve_space()
    full_disk(monkeypatch, run, reserve_counts=False)
    with pytest.raises(RunError, match=r"^metrics\.jsonl: cannot be written; .*result\.json.*No space left"):
        close_run(run, AttemptResult("failed", "metrics.jsonl: cannot be written"), console=Console(quiet=True))


def test_a_disk_without_room_for_the_reserve_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.create(str(tmp_path), "full")
    full_disk(monkeypatch, run, reserve_counts=False)
    run.reserve_space()
    run.release_space()


def test_the_sample_is_printed_without_what_controls_a_terminal(tmp_path: Path) -> None:
    run = RunFolder(str(tmp_path))
    assert sample_lines(run) == []
    run.write_json(
        run.sample, {"prompt": "a", "text": "  def \x1b[31m f():\n\n\treturn 1\n" + "x" * 200 + "\nlast" * 9}
    )
    first, *lines = sample_lines(run)
    assert first.startswith("sample of what the model writes")
    assert lines[:3] == ["    def  [31m f():", "   return 1", "  " + "x" * 76] and lines[3:] == ["  last"] * 3


def test_a_notebook_shows_a_result_with_its_figures_and_curves(run: RunFolder) -> None:
    history = [{"kind": "train", "step": step, "loss": 3.0 / step} for step in range(1, 9)]
    history += [{"kind": "eval", "step": 8, "loss": 0.5}]
    html = Result(run.path, "done", 8, 0.375, 0.5, history, None, "<8 steps>")._repr_html_()
    assert "<svg" in html and "0.375" in html and "&lt;8 steps&gt;" in html and f">{run.path}</td>" in html
    assert "weights" not in html.split("</style>")[1], "there are none"
    style = html.partition("<style>")[2].partition("</style>")[0]
    depth, outside = 0, ""
    for sign in style:
        depth += (sign == "{") - (sign == "}")
        outside += sign if depth == 0 and sign not in "{}" else ""
    assert set(outside.split()) <= {".raytrain", "dl", ".raytrain.raytrain", "dl.raytrain"}, outside
    last = style.rpartition(".raytrain{")[2]
    assert "--card:transparent" in last and "--ink:currentColor" in last, "the theme is the notebook's"
    assert "prefers-color-scheme" not in last


@pytest.mark.parametrize("width", [80, 60])
def test_paths_below_the_current_folder_are_relative_and_a_command_to_copy_is_never_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(str(tmp_path / "runs"), "default")
    run.next_attempt(this_process())
    where = f"runs/{Path(run.path).name}"
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    close_run(run, AttemptResult("interrupted", "a stop was requested", steps=3), console=console)
    lines = out.getvalue().splitlines()
    assert f"run     {where}" in lines and f"report  {where}/report/report.html" in lines
    command = f"raytrain train --resume {where}"
    if width == 80:
        assert lines[-1] == f"interrupted; resume with: {command}" and len(lines[-1]) <= 80
    else:
        assert lines[-2:] == ["interrupted; resume with:", command]
    assert str(tmp_path) not in out.getvalue()


def test_a_failed_run_names_its_paths_as_they_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create("runs", "default")
    run.next_attempt(this_process())
    reason = f"its weights could not be exported: disk. `raytrain export {run.path}` writes them"
    out = io.StringIO()
    close_run(run, AttemptResult("failed", reason, steps=3), console=Console(file=out, width=1000))
    where = f"runs/{Path(run.path).name}"
    assert f"reason: {reason.replace(run.path, where)}" in out.getvalue()
    assert f"next    raytrain train --resume {where}\n" in out.getvalue() and str(tmp_path) not in out.getvalue()
    assert run.read_json(run.result)["reason"] == reason, "the record holds wherever it is read"
