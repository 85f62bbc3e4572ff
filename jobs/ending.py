"""`result.json`: how a run ended, over all its attempts."""

from __future__ import annotations

import time
from typing import Any

from raytrain.accounting import account
from raytrain.run_folder import RunFolder


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
        loss = run.read_json(f"checkpoints/{entry.name}/manifest.json").get("eval_loss")
        if loss is not None and (best is None or loss < best[0]):
            best = (loss, entry.name)
    return best[1] if best else newest
