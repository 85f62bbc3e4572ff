"""How a command ends: `result.json` over all attempts, and the last lines on the terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder
from raytrain.runs.time_account import account


def write_result(run: RunFolder, ending: dict[str, Any]) -> dict[str, Any]:
    """Write and return result.json.

    Args:
        run: the run folder, its events closed with `driver_end`.
        ending: what rank 0 returned, or what the driver knows: {"status", "reason", ...}.
    """
    metrics = run.read_rows(run.metrics)
    train_rows = [row for row in metrics if row["kind"] == "train"]
    evals = [row for row in metrics if row["kind"] == "eval"]
    best = min((row for row in evals if row["loss"] == row["loss"]), key=lambda row: row["loss"], default=None)
    last = train_rows[-1] if train_rows else None
    totals = account(run.read_rows(run.events), now=time.time())
    record = {
        "status": ending["status"],
        "reason": ending.get("reason", ""),
        "steps": max(int(ending.get("steps") or 0), int(last["step"]) if last else 0),
        "final_loss": last["loss"] if last else None,
        "best_eval_loss": best["loss"] if best else None,
        "best_checkpoint": _best_checkpoint(run),
        "weights": run.weights if run.exists(run.weights) else None,
        **totals,
    }
    run.write_json(run.result, record)
    return record


def _best_checkpoint(run: RunFolder) -> str | None:
    """Name of the kept checkpoint with the smallest eval loss; without evaluations, of the newest."""
    best: tuple[float, str] | None = None
    newest = None
    for entry in sorted(run.store.entries("checkpoints"), key=lambda item: item.name):
        if not run.exists(f"checkpoints/{entry.name}/COMPLETE"):
            continue
        newest = entry.name
        try:
            loss = run.read_json(f"checkpoints/{entry.name}/manifest.json").get("eval_loss")
        except (OSError, RunError):
            loss = None  # damaged, or the disk is out of order, which is how this run may have ended
        if loss is not None and (best is None or loss < best[0]):
            best = (loss, entry.name)
    return best[1] if best else newest


def last_sign_of_life(run: RunFolder) -> float | None:
    """Unix seconds of the newest event, row or heartbeat: when a command that was killed was last seen."""
    seen = [row["time"] for row in run.read_rows(run.events)]
    seen += [time for name in ("metrics.jsonl", "attempts/heartbeat.json") if (time := run.store.changed(name))]
    return max(seen, default=None)


def process_start(now: float) -> float:
    """When this process began (unix seconds), for the time account; `now` where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        started = time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return now
    # in a notebook the process is hours old: only a command's own interpreter start counts
    return started if now - started < 30 else now


def say_ending(console: Console, run: RunFolder, record: Mapping[str, Any], page: str) -> None:
    """The last lines a person sees: how it ended, and where things are."""
    loss = record["final_loss"]
    best = record["best_eval_loss"]
    parts = [f"{record['status']} after {record['steps']} steps in {record['wall_s']:.0f} s"]
    if isinstance(loss, float):
        parts.append(f"loss {loss:.4f}")
    if isinstance(best, float):
        parts.append(f"best eval loss {best:.4f}")
    console.print(", ".join(parts), markup=False)
    if record["status"] == "failed":
        console.print(f"why: {record['reason']}", markup=False)
    console.print(f"run     {run.path}", markup=False, soft_wrap=True)
    if record.get("weights"):
        console.print(f"weights {record['weights']}", markup=False, soft_wrap=True)
    console.print(f"report  {page}", markup=False, soft_wrap=True)
