"""Findings about memory: a run that it ended, and steps that were retried after an out-of-memory."""

from __future__ import annotations

import re
from typing import Any

from cluster.wording import seconds, size
from raytrain.config.messages import advice
from raytrain.report.figures import outcome
from raytrain.report.findings.finding import Finding
from raytrain.report.records import Row, RunRecords, first_text, listed, mapping, number

HELD = re.compile(
    r"([\d.]+) ((?:[KMG]i)?B) is allocated by PyTorch.*?([\d.]+) ((?:[KMG]i)?B) is reserved by PyTorch but unallocated"
)
"""What torch says of its allocator where a GPU's memory runs out."""
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
FRAGMENTED = 0.2
"""Part of what the allocator holds that is free, and still cannot be used, above which a remedy pays."""
PROCESSES = {"memory": "a worker", "host_memory": "an expert host"}
"""Choice of the plan -> the process whose bytes it is."""


def memory_failure(records: RunRecords, reason: str) -> Finding | None:
    """That memory ended the run, with the changes that the driver predicted to need less; None without predictions."""
    last = _remedies(records)
    if last is None:
        return None
    process, needed = PROCESSES.get(str(last.get("process")), "a process"), number(last.get("needed_bytes")) or 0.0
    masks = number(mapping(records.train[-1].get("mask_cache")).get("bytes")) if records.train else None
    cached = f"; attention masks that are kept take {size(masks)} (loop.mask_cache_mb)" if masks else ""
    pieces, cached_text = _unallocated(reason)
    cached += cached_text
    options = [mapping(one) for one in listed(last.get("remedies"))]
    return Finding(
        "error",
        "The run failed: memory ran out",
        f"{reason}; the plan estimates {size(needed)} for {process}{cached}",
        f"Set one of these, the best first, with the bytes that {process} needs less by the plan's formula:"
        if options
        else "No key of the job needs less by the plan's formula: what the code itself keeps must become smaller, or "
        "cluster.memory_limit higher",
        (*pieces, *(_option(one, needed) for one in options)),
    )


def _unallocated(reason: str) -> tuple[list[str], str]:
    """From torch's message: an option if the allocator holds much in pieces that are too small, else that it does not
    help to clear its cache; nothing where torch said nothing."""
    match = HELD.search(reason)
    if match is None:
        return [], ""
    used, free = (float(match[n]) * UNITS[match[n + 1]] for n in (1, 3))
    share = free / (used + free) if used + free else 0.0
    if share <= FRAGMENTED:
        return [], f"; clearing the allocator's cache more often would not help, {share:.0%} of what it holds is unused"
    text = f"up to {size(free)} less, in a new process; {share:.0%} of what the allocator holds is unused, in pieces"
    return [f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: {text}"], ""


def _remedies(records: RunRecords) -> Row | None:
    """What the last command predicted after memory ended the run; None if it did not."""
    rows = records.of_kind("driver_start", "memory_remedies")
    return rows[-1] if rows and rows[-1]["kind"] == "memory_remedies" else None


def _option(row: dict[str, Any], needed: float) -> str:
    saved = number(row.get("saved_bytes")) or 0.0
    how = "with train --resume" if row.get("on_resume") else "in a new run"
    part = f" ({saved / needed:.0%})" if needed else ""
    return f"{row.get('setting')}: {size(saved)} less{part}, {how}; {row.get('meaning')}"


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
    ended = _remedies(records) is not None and outcome(records).status == "failed"
    inexact = any(row.get("equal") != "within rounding" for row in rows)
    drawn = "; random draws of the model are equal in distribution only" if inexact else ""
    return [
        Finding(
            "warning",
            "Memory ran out, and steps were retried in smaller micro-batches",
            f"{len(rows)} times, on {', '.join(who)}, in step {shown}; micro-batches down to {min(sizes)}, "
            f"{seconds(spent)} of passes dropped{drawn}",
            ""  # the finding of the failure lists what else there is
            if ended
            else advice(
                (f"set loop.micro_batch_size: {min(sizes)}", False),
                ("let loop.micro_batch_size: auto measure it", asked == "auto"),
            ),
        )
    ]


MEMORY_TITLES = {
    "high_memory": "Memory is nearly full",
    "soft_limit": "A process uses much memory",
    "memory_growth": "Memory grows without end",
    "telemetry_ended": "Telemetry ended early",
}


def memory_warnings(records: RunRecords) -> list[Finding]:
    """The warnings of telemetry: memory that is nearly full, or that grows."""
    found = []
    for row in records.of_kind("warning"):
        evidence, _, remedy = first_text(row, "reason").partition(": ")
        remedy = f"{remedy[:1].upper()}{remedy[1:]}." if remedy else ""
        found.append(Finding("warning", MEMORY_TITLES.get(str(row.get("what")), "Warning"), evidence, remedy))
    return found
