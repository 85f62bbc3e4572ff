"""The end of a command: `result.json` over all attempts, the report, and the last lines on the terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from raytrain.errors import RunError
from raytrain.execution.driver_channel import AttemptResult
from raytrain.runs.folder import RunFolder
from raytrain.runs.lease import this_process
from raytrain.runs.records import event
from raytrain.runs.time_account import account


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        run: path of the run folder.
        status: "done", "failed" or "interrupted".
        steps: optimizer steps over all attempts.
        final_loss: loss of the last train row; None without one.
        best_eval_loss: the smallest evaluation loss; None without an evaluation.
        history: every row of metrics.jsonl.
        weights: path of the exported safetensors file; None unless done.
        reason: why it ended, as a sentence.
    """

    run: str
    status: str
    steps: int
    final_loss: float | None
    best_eval_loss: float | None
    history: list[dict[str, Any]]
    weights: str | None
    reason: str


def result_of(run: RunFolder, record: Mapping[str, Any]) -> Result:
    """The `Result` of a run folder and its result.json."""
    return Result(
        run=run.path,
        status=record["status"],
        steps=record["steps"],
        final_loss=record["final_loss"],
        best_eval_loss=record["best_eval_loss"],
        history=run.read_rows(run.metrics),
        weights=run.weights if run.exists(run.weights) else None,
        reason=record.get("reason", ""),
    )


def close_run(run: RunFolder, result: AttemptResult, *, console: Console) -> Result:
    """Write result.json and the report, and print how the run ended.

    Raises:
        RunError: another command has taken over the run folder; nothing is written.
    """
    newest = run.current_attempt()
    if run.owner_of(newest) != this_process():
        raise RunError(f"attempt {newest} of another command has taken over {run.path}; this one writes no result")
    run.append_event(event("driver_end", status=result.status, reason=result.reason))
    record = write_result(run, result)
    run.flush()
    if not result.workers_running:
        from raytrain.report.build import build_report

        print_result(console, run, record, report=build_report(run))
    if record["status"] == "interrupted":
        when = "" if record["steps"] else " before the first step"
        console.print(f"interrupted{when}; resume with: raytrain train --resume {run.path}", soft_wrap=True)
    return result_of(run, record)


def write_result(run: RunFolder, result: AttemptResult) -> dict[str, Any]:
    """Write and return result.json.

    Args:
        run: the run folder, whose last event is `driver_end`.
        result: the result of the last attempt.
    """
    metrics = run.read_rows(run.metrics)
    train_rows = [row for row in metrics if row["kind"] == "train"]
    evals = [row for row in metrics if row["kind"] == "eval"]
    best = min((row for row in evals if row["loss"] == row["loss"]), key=lambda row: row["loss"], default=None)
    last = train_rows[-1] if train_rows else None
    totals = account(run.read_rows(run.events), now=time.time())
    record = {
        "status": result.status,
        "reason": result.reason,
        "steps": max(result.steps, int(last["step"]) if last else 0),
        "final_loss": last["loss"] if last else None,
        "best_eval_loss": best["loss"] if best else None,
        "best_checkpoint": _best_checkpoint(run),
        "weights": run.weights if run.exists(run.weights) else None,
        **totals,
    }
    run.write_json(run.result, record)
    return record


def _best_checkpoint(run: RunFolder) -> str | None:
    """Name of the checkpoint with the smallest eval loss; without evaluations, the newest checkpoint."""
    best: tuple[float, str] | None = None
    newest = None
    for entry in sorted(run.store.entries("checkpoints"), key=lambda item: item.name):
        if not run.exists(f"checkpoints/{entry.name}/COMPLETE"):
            continue
        newest = entry.name
        try:
            loss = run.read_json(f"checkpoints/{entry.name}/manifest.json").get("eval_loss")
        except (OSError, RunError):
            loss = None  # damaged, or the disk fails, which may have ended this run
        if loss is not None and (best is None or loss < best[0]):
            best = (loss, entry.name)
    return best[1] if best else newest


def last_sign_of_life(run: RunFolder) -> float | None:
    """Unix time of the newest event, row or heartbeat, which shows when a killed command was last alive."""
    seen = [row["time"] for row in run.read_rows(run.events)]
    seen += [time for name in ("metrics.jsonl", "attempts/heartbeat.json") if (time := run.store.changed(name))]
    return max(seen, default=None)


def process_start(now: float) -> float:
    """Start of this process in unix seconds, for the time account; `now` if it is unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        started = time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return now
    # a notebook's process may be hours old: count only the start of a command's own interpreter
    return started if now - started < 30 else now


def print_result(console: Console, run: RunFolder, record: Mapping[str, Any], *, report: str) -> None:
    """Print the last lines on the terminal: how the run ended, and where its files are."""
    loss = record["final_loss"]
    best = record["best_eval_loss"]
    parts = [f"{record['status']} after {record['steps']} steps in {record['wall_s']:.0f} s"]
    if isinstance(loss, float):
        parts.append(f"loss {loss:.4f}")
    if isinstance(best, float):
        parts.append(f"best eval loss {best:.4f}")
    console.print(", ".join(parts), markup=False)
    if record["status"] == "failed":
        console.print(f"reason: {record['reason']}", markup=False)
    console.print(f"run     {run.path}", markup=False, soft_wrap=True)
    if record.get("weights"):
        console.print(f"weights {record['weights']}", markup=False, soft_wrap=True)
    console.print(f"report  {report}", markup=False, soft_wrap=True)
