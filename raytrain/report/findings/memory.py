"""Findings about memory: steps that were retried after an out-of-memory."""

from __future__ import annotations

from raytrain.config.messages import advice
from raytrain.report.findings.finding import Finding
from raytrain.report.records import RunRecords, number


def shortages(records: RunRecords) -> list[Finding]:
    """Steps and evaluations that were retried in smaller micro-batches: which, where memory ran out, what fits."""
    rows = records.of_kind("out_of_memory")
    if not rows:
        return []
    steps = list(dict.fromkeys(int(number(row.get("step")) or 0) for row in rows))
    who = list(dict.fromkeys(name for row in rows for name in row.get("who", [])))
    sizes = [int(number(row.get("micro_batch_size")) or 1) for row in rows]
    shown = ", ".join(f"{step:,}" for step in steps[:8]) + (" and more" if len(steps) > 8 else "")
    spent = sum(number(row.get("seconds")) or 0.0 for row in rows)
    asked = records.configured("loop.micro_batch_size")
    inexact = any(row.get("equal") != "within rounding" for row in rows)
    drawn = "; random draws of the model are equal in distribution only" if inexact else ""
    return [
        Finding(
            "warning",
            "Memory ran out, and steps were retried in smaller micro-batches",
            f"{len(rows)} times, on {', '.join(who)}, in step {shown}; micro-batches down to {min(sizes)}, "
            f"{spent:.3g} s of passes dropped{drawn}",
            advice(
                (f"set loop.micro_batch_size: {min(sizes)}", False),
                ("let loop.micro_batch_size: auto measure it", asked == "auto"),
            ),
        )
    ]
