"""performance_summary: a flat mapping of key figures, written as JSON and as text with equal values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raytrain.report.experts import loads_of, names_of
from raytrain.report.figures import (
    best_eval,
    device_line,
    expert_counts,
    failure_reason,
    history,
    last_step,
    outcome,
    rounded,
    step_ms,
    time_account,
)
from raytrain.report.findings.compile import compile_figures
from raytrain.report.records import RunRecords, number, percentile, values


def summarise(records: RunRecords) -> dict[str, Any]:
    """The figures by name, in the order of the page; None where a run has no such figure.

    Times in seconds (`_s`) or milliseconds (`_ms`), memory in bytes; floats have six significant digits.
    """
    result = records.result or {}
    losses, (p50, p95) = values(records.train, "loss"), step_ms(records)
    accuracies = values(records.evals, "accuracy") or values(records.train, "accuracy")
    best = best_eval(records)
    (first_experts, last_experts), loads = expert_counts(records), loads_of(records)
    found: dict[str, Any] = {
        "run": records.name,
        "status": outcome(records).status,
        "reason": failure_reason(records) or None,
        "mode": records.planned("mode"),
        "devices": device_line(records),
        "workers": records.planned("workers"),
        "strategy": records.planned("strategy"),
        "precision": records.planned("precision"),
        "micro_batch": records.planned("micro_batch_size"),
        "accumulation": records.planned("accumulation"),
        "effective_batch": records.planned("effective_batch") or records.planned("global_batch_size"),
        "compile": records.configured("loop.compile"),
        **compile_figures(records),
        "parameters": records.planned("parameters"),
        "experts_first": first_experts,
        "experts_last": last_experts,
        "experts_without_tokens": names_of(dead) if (dead := loads.dead() if loads else []) else None,
        "expert_imbalance": max(loads.imbalance()) if loads else None,
        "attempts": len(records.of_kind("attempt")) or None,
        "steps": last_step(records),
        "epochs": len(history(records)) or None,
        "wall_s": number(result.get("wall_s")),
        **{f"{part}_s": spent for part, spent in time_account(records)},
        "step_planned": records.planned("step_time"),
        "step_ms_p50": p50,
        "step_ms_p95": p95,
        "samples_per_s": percentile(values(records.train, "samples_per_s"), 0.5),
        "tokens_per_s": percentile(values(records.train, "tokens_per_s"), 0.5),
        "mfu": percentile(values(records.train, "mfu"), 0.5),
        "peak_memory_bytes": max(values(records.train, "peak_memory_bytes"), default=None),
        "first_loss": losses[0] if losses else None,
        "final_loss": losses[-1] if losses else number(result.get("final_loss")),
        "best_eval_loss": best[1] if best else number(result.get("best_eval_loss")),
        "best_eval_step": best[0] if best else None,
        "accuracy": accuracies[-1] if accuracies else None,
        "skipped_steps": number(records.train[-1].get("skipped_steps")) if records.train else None,
    }
    return {name: rounded(value) if isinstance(value, float) else value for name, value in found.items()}


def summary_text(summary: Mapping[str, Any]) -> str:
    """One `name  value` line per figure; strings as they are, everything else as JSON."""
    width = max(len(name) for name in summary) + 2
    lines = [f"{name:<{width}}{_cell(value)}" for name, value in summary.items()]
    return "\n".join(["raytrain performance summary", "", *lines, ""])


def summary_from_text(text: str) -> dict[str, str]:
    """The figures of a summary text by name, each as the text it stands in."""
    rows = (line.split(None, 1) for line in text.splitlines()[2:] if line.strip())
    return {row[0]: row[1].strip() if len(row) > 1 else "" for row in rows}


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return " ".join(value.split())
    return "-" if value is None else json.dumps(value)
