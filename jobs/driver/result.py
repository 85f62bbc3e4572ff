"""The end of a command: `result.json` over all attempts, the report, and the last lines on the terminal."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from cluster.preflight import is_submitted
from cluster.wording import counted
from jobs.driver.printing import print_command, print_line, print_row
from jobs.driver.progress import Activity, Phases
from jobs.driver.remedies import record_remedies
from jobs.job.facts import path_from_here, text_from_here
from raytrain.errors import RaytrainError, RunError, first_line
from raytrain.execution.driver_channel import AttemptResult
from raytrain.models.weights.headers import read_header
from raytrain.runs.faults import read_faults
from raytrain.runs.folder import (
    RunFolder,
    has_objects,
    on_cluster,
    process_start,
    resume_command,
    shell_command,
    this_process,
)
from raytrain.runs.records import account, account_of_last, event
from raytrain.runs.storage import open_store, split

_COMMANDS = itertools.count()
#: A process that was not older than this when its first command began was started for it.
NEW_PROCESS_S = 30.0
#: How much of a language model's sample is printed.
SAMPLE_LINES, SAMPLE_WIDTH = 6, 76


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        run: path of the run folder.
        status: "done", "failed" or "interrupted".
        steps: optimizer steps over all attempts.
        final_loss: loss of the last train row; None without one.
        best_eval_loss: the smallest evaluation loss; None without an evaluation.
        history: every row of metrics.jsonl; not in the text of `print(result)`.
        weights: path of the exported safetensors file; None unless done.
        reason: why it ended, as a sentence.

    Example:
        >>> from jobs.train import train
        >>> job = {
        ...     "model": {"builder": "raytrain.models.mlp:mlp", "hidden": [8]},
        ...     "data": {"source": "csv", "path": "rows.csv", "label": "y"},
        ...     "loop": {"max_steps": 2},
        ... }
        >>> result = train(job, workers=1, quiet=True)
        >>> result.status, result.steps, result.reason
        ('done', 2, '2 steps')
        >>> [row["step"] for row in result.history if row["kind"] == "train"]
        [1, 2]
        >>> result.final_loss == result.history[-2]["loss"] and result.best_eval_loss == result.history[-1]["loss"]
        True
        >>> result.weights == f"{result.run}/weights/model.safetensors"
        True

        A notebook shows it with its loss curves:

        >>> "<svg" in result._repr_html_()
        True
    """

    run: str
    status: str
    steps: int
    final_loss: float | None
    best_eval_loss: float | None
    history: list[dict[str, Any]] = field(repr=False)
    weights: str | None
    reason: str

    def _repr_html_(self) -> str:
        """For notebooks: how it ended, the loss curves, and where its files are."""
        from raytrain.report.page import result_snippet

        return result_snippet(
            {"status": self.status, "steps": self.steps, "final loss": self.final_loss,
             "best eval loss": self.best_eval_loss, "reason": self.reason, "run": self.run, "weights": self.weights},
            self.history,
        )  # fmt: skip


def result_of(run: RunFolder, record: Mapping[str, Any]) -> Result:
    """The `Result` of a run folder and its result.json."""
    same = {name: record[name] for name in ("status", "steps", "final_loss", "best_eval_loss")}
    weights = run.weights if run.exists(run.weights) else None
    return Result(
        run.path, **same, history=run.read_rows(run.metrics), weights=weights, reason=record.get("reason", "")
    )


def close_run(run: RunFolder, result: AttemptResult, *, console: Console, phases: Phases | None = None) -> Result:
    """Write result.json and the report, and print how the run ended. Errors: RunError, another command has taken over
    the run folder, or it cannot be written, which may have ended the run: the message begins with what failed first."""
    newest = run.current_attempt()
    if run.owner_of(newest) != this_process():
        raise RunError(f"attempt {newest} of another command has taken over {run.path}; this one writes no result")
    run.release_space()
    try:
        run.append_event(event("driver_end", status=result.status, reason=result.reason))
        record = write_result(run, result)
        record_remedies(run, failed=result.status == "failed", reason=result.reason)
        run.close()
    except RunError as error:
        first = f"{result.reason}; " if result.reason else ""
        raise RunError(f"{first}the end of the run was not recorded either: {error}") from error
    if not result.workers_running:
        with Activity(console, phases=phases) as activity:
            activity.begin("writing the report")
            report, findings = _report(run, result)
        for line in findings:
            print_line(console, text_from_here(line, run.path))
        activity.phases.end()
        print_result(console, run, record, report=report, phases=phases)
    if record["status"] == "interrupted":
        when = "" if record["steps"] else " before the first step"
        command = resume_command("train", path_from_here(run.path))
        print_command(console, f"interrupted{when}; resume with: ", command)
    return result_of(run, record)


def _report(run: RunFolder, result: AttemptResult) -> tuple[str, list[str]]:
    """Path of the report, or why there is none, and the lines of what the records of the run show to be wrong. A
    mistake in a report changes nothing of the run, which is complete and recorded."""
    from raytrain.report.findings import diagnose, finding_lines
    from raytrain.report.page import build_report
    from raytrain.report.records import read_records

    findings: list[str] = []
    try:
        findings = finding_lines(diagnose(read_records(run)))
        return build_report(run), findings
    except RunError as error:
        if result.status == "done":
            raise
        return f"not written: {error}", findings
    except Exception as error:  # a mistake of ours, or records that were changed by hand
        why = f"{type(error).__name__}: {first_line(error)}"
        return f"not written ({why}); `{shell_command('report', run.path)}` shows where", findings


def write_result(run: RunFolder, result: AttemptResult) -> dict[str, Any]:
    from raytrain.checkpoint.reader import best_checkpoint, list_checkpoints  # imports torch

    metrics = run.read_rows(run.metrics)
    train_rows = [row for row in metrics if row["kind"] == "train"]
    evals = [row for row in metrics if row["kind"] == "eval"]
    best = min((row for row in evals if math.isfinite(row["loss"])), key=lambda row: row["loss"], default=None)
    last = train_rows[-1] if train_rows else None
    faults = read_faults(run, since=0)[-1:] if result.status == "failed" else []  # it may have no row of its last step
    reported = max([result.steps, *(fault.step - 1 for fault in faults if fault.step)])
    saved = [info for info in list_checkpoints(run) if info.complete]
    kept = best_checkpoint(saved) or (saved[-1] if saved else None)
    # where no worker reported a step, the newest checkpoint may be of a later one than the last row
    unreported = saved[-1].step if saved and not reported else 0
    totals = account(run.read_rows(run.events), now=time.time())
    record = {
        "status": result.status,
        "reason": result.reason,
        "steps": max(reported, int(last["step"]) if last else 0, unreported),
        "final_loss": last["loss"] if last else None,
        "best_eval_loss": best["loss"] if best else None,
        "best_step": int(best["step"]) if best else None,
        "best_checkpoint": split(kept.path)[1] if kept else None,
        "weights": run.weights if run.exists(run.weights) else None,
        "weights_step": weights_step(run),
        **totals,
    }
    run.write_json(run.result, record)
    return record


def weights_step(run: RunFolder) -> int | None:
    """The step whose weights are exported; None if there are none, or the user's own code wrote them."""
    try:
        folder, _, name = run.weights.rpartition("/")
        return int(read_header(open_store(folder), name, key="weights")["__metadata__"]["step"])
    except (OSError, RaytrainError, KeyError, ValueError):
        return None


def last_sign_of_life(run: RunFolder) -> float | None:
    """Unix time of the newest event, row or heartbeat, which shows when a killed command was last alive."""
    seen = [row["time"] for row in run.read_rows(run.events)]
    seen += [time for name in ("metrics.jsonl", "attempts/heartbeat.json") if (time := run.store.changed(name))]
    return max(seen, default=None)


def command_start(now: float) -> float:
    """When this command began, in unix seconds: with its process, if it is the first one there, else now."""
    ticks = process_start(os.getpid())
    if next(_COMMANDS) or ticks is None:
        return now
    started = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    # a notebook's process may be hours old: count only the start of a command's own interpreter
    return started if now - started < NEW_PROCESS_S else now


def print_result(
    console: Console, run: RunFolder, record: Mapping[str, Any], *, report: str, phases: Phases | None = None
) -> None:
    """Print the last lines on the terminal: how the run ended, what took its time, where its files are, and what can
    be done next."""
    loss, best = record["final_loss"], record["best_eval_loss"]
    commands = sum(row["kind"] == "driver_start" for row in run.read_rows(run.events))
    over = f" over {commands} commands" if commands > 1 else ""
    parts = [f"{record['status']} after {counted(record['steps'], 'step')} in {record['wall_s']:.0f} s{over}"]
    if isinstance(loss, float):
        parts.append(f"loss {loss:.4f}")
    if isinstance(best, float):
        parts.append(f"best eval loss {best:.4f}")
    print_row(console, "", ", ".join(parts))
    if record["status"] == "failed":
        print_row(console, "reason: ", text_from_here(record["reason"], run.path))
    if phases is not None:
        of_command = account_of_last(run.read_rows(run.events), now=time.time())["time"]
        print_row(console, f"{'time':<8}", phases.line(of_command))
    for line in sample_lines(run):
        print_line(console, line)
    print_line(console, f"run     {path_from_here(run.path)}")
    if record.get("weights"):
        print_line(console, f"weights {path_from_here(record['weights'])}")
    print_line(console, f"report  {path_from_here(report)}")
    for number, command in enumerate(next_commands(run, record)):
        print_command(console, f"{'' if number else 'next':<8}", command)


def next_commands(run: RunFolder, record: Mapping[str, Any]) -> list[str]:
    """The commands that a user is most likely to want now; none after an interruption, which says how to resume."""
    where = path_from_here(run.path)
    if record["status"] == "interrupted":
        return []
    if has_objects(run):
        return [resume_command("train", where)]
    if record["status"] == "failed":
        return [resume_command("train", where), shell_command("check", "--bundle", "problem.zip", "--run", where)]
    output = ["infer.output=FOLDER"] * is_submitted()  # the default is deleted with the job
    infer = [on_cluster("infer", where, "infer.input=FILE", *output)] if record.get("weights") else []
    loop = run.read_json(run.plan).get("config", {}).get("loop", {}) if run.exists(run.plan) else {}
    twice_as_long = f"loop.max_steps={2 * record['steps']}"
    if loop.get("epochs") and loop.get("max_steps") is None:  # the key that limits the run
        twice_as_long = f"loop.epochs={2 * loop['epochs']}"
    return [*infer, resume_command("train", where, twice_as_long)]


def sample_lines(run: RunFolder) -> list[str]:
    """The text that a language model wrote at the end of its training, without empty lines: at most `SAMPLE_LINES`, cut
    at `SAMPLE_WIDTH` characters. A model of bytes may write some that control a terminal: they are left out."""
    if not run.exists(run.sample):
        return []
    text = str(run.read_json(run.sample).get("text", ""))
    lines = ["".join(sign if sign.isprintable() else " " for sign in line) for line in text.splitlines()]
    lines = [line.rstrip()[:SAMPLE_WIDTH] for line in lines if line.strip()]
    return ["sample of what the model writes:", *(f"  {line}" for line in lines[:SAMPLE_LINES])] if lines else []
