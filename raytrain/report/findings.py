"""Findings about a run's course (loss, experts, memory, failures), all rules, and `diagnose`, which runs them.

The page shows the findings; the end of a command prints the first.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

from cluster.wording import counted, loss_text, seconds, size
from raytrain.config.messages import abbreviated, advice
from raytrain.report.bottlenecks import SEVERITIES, Finding, compilation, limiting_part, step_limits, utilisation
from raytrain.report.experts import loads_of, names_of
from raytrain.report.figures import cause_of, cluster_lost, failure_reason, outcome, ranks_of
from raytrain.report.records import (
    Row,
    RunRecords,
    first_text,
    listed,
    mapping,
    non_finite_steps,
    number,
    percentile,
    series,
    values,
)
from raytrain.runs.faults import CAUSES, NOT_EXPORTED, RAY_NOT_STARTED
from raytrain.runs.folder import resume_command, shell_command

#: No number format is wider where it matters.
FULL_PRECISIONS = ("fp32", "fp64")
#: With fewer logged losses, their ends are single micro-batches, whose differences say nothing.
FEWEST_LOSSES = 10


def end_width(points: int) -> int:
    """Points at each end of a curve that are averaged: a tenth, 3 to 20, or a third of few."""
    return max(1, min(20, points // 10), min(3, points // 3))


def smoothed_ends(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Means of the first and of the last `end_width` points of a curve; None under two points."""
    if len(points) < 2:
        return None
    width = end_width(len(points))
    data = [value for _, value in points]
    return statistics.fmean(data[:width]), statistics.fmean(data[-width:])


def loss_trend(records: RunRecords) -> list[Finding]:
    """Whether the training loss falls; that it does not, or rises to less than ten times, only with `FEWEST_LOSSES`."""
    losses = series(records.train, "loss")
    ends = smoothed_ends(losses)
    if ends is None:
        return []
    first, last = ends
    means = f"means of {counted(end_width(len(losses)), 'row')}"
    seen = f"{loss_text(first)} at the start, {loss_text(last)} at the end ({means})"
    if last > first + (0.5 if len(losses) >= FEWEST_LOSSES else 9.0) * abs(first):
        remedy = "Lower optim.lr or lengthen optim.warmup_steps."
        return [Finding("error", "The training loss diverged", seen, remedy)]
    if last > first - 0.02 * abs(first):
        if len(losses) < FEWEST_LOSSES:
            return []
        remedy = "Check that labels match inputs, then try optim.lr three times higher and lower."
        return [Finding("warning", "The training loss is not falling", seen, remedy)]
    return [Finding("good", "The training loss fell", seen)]


def overfitting(records: RunRecords) -> list[Finding]:
    """The eval loss rises from its best while the training loss keeps falling."""
    evals, train = series(records.evals, "loss"), series(records.train, "loss")
    if len(evals) < 3:
        return []
    best_step, best = min(evals, key=lambda point: point[1])
    last_step, last = evals[-1]
    after = smoothed_ends([point for point in train if point[0] >= best_step])
    if last_step == best_step or last - best <= 0.02 * abs(best) or after is None or after[1] >= after[0]:
        return []
    seen = f"eval {loss_text(best)} at step {int(best_step):,}, {loss_text(last)} at {int(last_step):,}"
    remedy = advice(
        ("use the best checkpoint", records.planned("export") == "best"),
        ("set loop.patience", records.configured("loop.patience") is not None),
        ("add data, weight decay or dropout", False),
    )
    return [Finding("warning", "Overfitting: eval loss rises while training loss falls", seen, remedy)]


def non_finite(records: RunRecords) -> list[Finding]:
    """Steps that were skipped, or whose loss is not finite."""
    rows = records.train
    seen = set(non_finite_steps(rows)) | set(non_finite_steps(rows, "grad_norm"))
    skipped = series(rows, "skipped_steps")
    before = [0.0, *(count for _, count in skipped)]
    seen |= {int(step) for (step, count), last in zip(skipped, before, strict=False) if count > last}
    rolled = [row for row in records.of_kind("decision") if row.get("what") == "rollback"]
    undone = int(sum(number(row.get("skipped")) or 0 for row in rolled))
    if not seen and not undone:
        return []
    total = max(len(seen), int(before[-1])) + undone  # a roll-back takes back the count and the rows
    steps = sorted(seen)
    evidence = f"{counted(total, 'step')}; the run has {int(rows[-1]['step']) if rows else 0:,}"
    if steps:
        shown = ", ".join(f"{step:,}" for step in steps[:8]) + (" and more" if len(steps) > 8 else "")
        evidence += f"; in the log rows of step {shown}"
    evidence += f"; {undone} of them in front of {counted(len(rolled), 'roll-back')}" if undone else ""
    if records.planned("precision") == "fp16" and total <= 20:
        evidence += "; usual while the loss scale of fp16 adapts"
        return [Finding("info", "Non-finite steps were skipped", evidence)]
    if total <= 2:
        return [Finding("info", "Non-finite steps were skipped", evidence)]
    remedy = advice(
        ("lower optim.lr", False),
        ("set optim.max_grad_norm", bool(number(records.configured("optim.max_grad_norm")))),
        ("raise precision.dtype", records.planned("precision") in FULL_PRECISIONS),
        ("look at the data there", False),
    )
    return [Finding("warning", "Non-finite steps were skipped", evidence, remedy)]


def experts(records: RunRecords) -> list[Finding]:
    """Dead experts, uneven load and dropped tokens of a mixture of experts."""
    late = records.train[len(records.train) // 2 :]
    load = percentile(values(late, "load_imbalance"), 0.5)
    dropped = percentile(values(late, "dropped_fraction"), 0.5)
    remedy = advice(
        ("raise experts.balance_weight", False),
        ("set experts.balance: both", records.configured("experts.balance") == "both"),
    )
    found, loads = [], loads_of(records)
    if loads is not None and (dead := loads.dead()):
        total = sum(map(len, loads.last_used))
        seen = f"{len(dead)} of {total} received no row in the last quarter of the log intervals: {names_of(dead)}"
        found.append(Finding("warning", "Experts without tokens", seen, remedy))
    if load is not None and load > 2:
        seen = f"the busiest expert has {load:.2g} times the mean load (median of the second half)"
        found.append(Finding("warning", "Experts are loaded unevenly", seen, remedy))
    if dropped is not None and dropped > 0.02:
        remedy = "Raise experts.capacity_factor; null drops none."
        found.append(Finding("warning", "Tokens are dropped", f"{dropped:.1%} of the routed tokens", remedy))
    return found


# ---------------------------------------------------------------- memory


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
    options = []
    if (match := HELD.search(reason)) is not None:
        used, free = (float(match[n]) * UNITS[match[n + 1]] for n in (1, 3))
        share = free / (used + free) if used + free else 0.0
        unused = f"{share:.0%} of what the allocator holds is unused"
        if share > FRAGMENTED:
            how = f"up to {size(free)} less, in a new process; {unused}, in pieces"
            options.append(f"PYTORCH_ALLOC_CONF=expandable_segments:True in the environment: {how}")
        else:
            unused = f"{share:.0%} of what it holds is unused"
            cached += f"; clearing the allocator's cache more often would not help, {unused}"
    remedies = [mapping(one) for one in listed(last.get("remedies"))]
    for row in remedies:
        saved = number(row.get("saved_bytes")) or 0.0
        how = "with train --resume" if row.get("on_resume") else "in a new run"
        part = f" ({saved / needed:.0%})" if needed else ""
        options.append(f"{row.get('setting')}: {size(saved)} less{part}, {how}; {row.get('meaning')}")
    if remedies:
        lead = f"Set one of these, the best first, with the bytes that {process} needs less by the plan's formula:"
    else:
        lead = "No key of the job needs less by the plan's formula: what the code itself keeps must become smaller, or "
        lead += "cluster.memory_limit higher"
    evidence = f"{reason}; the plan estimates {size(needed)} for {process}{cached}"
    return Finding("error", "The run failed: memory ran out", evidence, lead, tuple(options))


def _remedies(records: RunRecords) -> Row | None:
    """What the last command predicted after memory ended the run; None if it did not."""
    rows = records.of_kind("driver_start", "memory_remedies")
    return rows[-1] if rows and rows[-1]["kind"] == "memory_remedies" else None


def retried_steps(records: RunRecords) -> list[Finding]:
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
    evidence = (
        f"{len(rows)} times, on {', '.join(who)}, in step {shown}; micro-batches down to {min(sizes)}, "
        f"{seconds(spent)} of passes dropped{drawn}"
    )
    remedy = advice(
        (f"set loop.micro_batch_size: {min(sizes)}", ended),  # the finding of the failure lists what else there is
        ("let loop.micro_batch_size: auto measure it", ended or asked == "auto"),
    )
    return [Finding("warning", "Memory ran out, and steps were retried in smaller micro-batches", evidence, remedy)]


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


# ---------------------------------------------------------------- failures


def failure(records: RunRecords) -> list[Finding]:
    """The reason of a failed run, with a remedy for known kinds of failure."""
    state, resume = outcome(records), resume_command("train", records.path)
    if state.status == "lost":
        remedy = f"`{resume}` resumes from the latest valid checkpoint."
        return [Finding("warning", "The run has no result", state.sentence, remedy)]
    if state.status != "failed":
        return []
    rows = records.of_kind("failure", "fault")[-1:]
    text = " ".join([failure_reason(records), *(cause_of(row) for row in rows)]).lower()
    known = next((remedy(records) for pattern, remedy in _REMEDIES.items() if re.search(pattern, text)), "")
    evidence = failure_reason(records) or "No cause was recorded; see the end of the files in logs/."
    if evidence.startswith(RAY_NOT_STARTED):  # names what may be missing, memory as well, and the remedy
        return [Finding("error", "Ray did not start", evidence, f"`{resume}` starts it again.")]
    if cluster_lost(evidence):
        return [Finding("error", "Ray itself was lost", evidence, f"`{resume}` {_AFTER_LOST_CLUSTER}")]
    if (short := memory_failure(records, evidence)) is not None:
        return [short]
    recorded = next((first_text(row, "remedy") for row in rows), "")
    place = next((first_text(row, "place") for row in rows), "")
    fix = f"Correct the code at {place}; then `{resume}` continues." if place else ""
    return [Finding("error", "The run failed", evidence, recorded or known or fix)]


def _of_memory(records: RunRecords) -> str:
    """Where the run left no predictions: `findings.memory` has those."""
    tried = [row.get("micro_batch") for row in records.of_kind("fault") if row.get("out_of_memory")]
    if 1 in (records.planned("micro_batch_size"), *tried):
        return advice(
            ("set loop.activation_checkpointing: true", bool(records.configured("loop.activation_checkpointing"))),
            ("set precision.dtype: bf16", records.planned("precision") in ("bf16", "fp16")),
            ("set data.storage: stream", records.planned("storage") == "stream"),
            ("set optim.name: sgd", records.configured("optim.name") == "sgd"),
            ("use a smaller model or shorter samples", False),
        )
    return "Lower loop.micro_batch_size: gradient accumulation keeps the update the same."


_AFTER_LOST_CLUSTER = (
    "continues from the latest valid checkpoint, on a cluster that is running. Where its processes die again, look for "
    "a machine without free memory (`dmesg`) and into Ray's logs on the head node."
)

_REMEDIES: dict[str, Callable[[RunRecords], str]] = {
    NOT_EXPORTED: lambda records: (
        f"`{shell_command('export', records.path)}` writes the weights when the cause is fixed; "
        "--to DIR writes them into another folder."
    ),
    r"out ?of ?memory": _of_memory,
    r"no space|disk full|enospc": lambda records: advice(
        ("free space under save.dir", False), ("lower save.keep", records.configured("save.keep") == 1)
    ),
    r"\bnans?\b|non-?finite|\b(not|was) finite": lambda records: advice(
        ("look for NaNs in the data", False),
        ("lower optim.lr", False),
        ("set precision.dtype: fp32", records.planned("precision") in FULL_PRECISIONS),
    ),
    r"another model": lambda _: "Restore the model's code and keys, or start a new run with model.init_from.",
    r"checkpoint": lambda _: "An older checkpoint may be valid: `--resume` falls back to it automatically.",
    r"deviceplacement": lambda _: "Create tensors on the device of the batch inside forward.",
}


def restarts(records: RunRecords) -> list[Finding]:
    """Attempts after the first, with the faults that ended the earlier ones."""
    attempts = records.of_kind("attempt")
    if len(attempts) < 2:
        return []
    causes = [first_text(row, "cause") for row in attempts[1:]]
    decisive: dict[str, Row] = {}
    for row in records.of_kind("failure", "fault", "restart"):  # such a loss explains the errors around it
        known = decisive.setdefault(str(row.get("attempt")), row)
        if row.get("error") in CAUSES and known.get("error") not in CAUSES:
            decisive[str(row.get("attempt"))] = row
    causes += [cause_of(row) for row in decisive.values()]
    stops = [row for row in records.of_kind("attempt_end") if row.get("outcome") == "interrupted"]
    causes = [cause.rstrip(".") for cause in causes]  # joined below, where a sentence would end with ".;"
    for row in stops:
        causes.append(f"{cause_of(row) or 'a stop was asked for'} (step {int(number(row.get('step')) or 0):,})")
    reasons = "; ".join(dict.fromkeys(cause for cause in causes if cause)) or "no cause was recorded"
    starts = [f"{int(number(row.get('from_step')) or 0):,}" for row in attempts[1:]]
    origin = f"step {starts[0]}" if len(starts) == 1 else f"steps {', '.join(starts[:-1])} and {starts[-1]}"
    failed = f"; {len(decisive)} of the earlier attempts failed" if 0 < len(decisive) < len(attempts) - 1 else ""
    return [Finding("info", f"{len(attempts)} attempts", f"resumed from {origin}{failed}: {reasons}")]


def fall_backs(records: RunRecords) -> list[Finding]:
    """Fall-backs: of the precision during the run, and of any choice in the plan."""
    rows = [
        row
        for row in records.of_kind("decision", "fallback")
        if row["kind"] == "fallback" or row.get("value") == "raise_precision" or row.get("what") == "rollback"
    ]
    found = [Finding("warning", "Fell back during the run", cause_of(row) or str(row.get("kind"))) for row in rows]
    return found + [Finding("info", "Noted in the plan", line) for line in records.warnings]


def idle_devices(records: RunRecords) -> list[Finding]:
    """GPUs on which neither a worker nor an expert host ran: how many were asked for, and how many ran."""
    rows = records.of_kind("attempt")
    running = number(rows[-1].get("workers")) if rows else None
    kind = records.configured("scale.accelerator")
    if running is None or records.planned("device") != "cuda" or kind not in (None, "cuda"):
        return []  # another kind was asked for, and other GPUs are not the run's
    hosts = records.planned("hosts")
    held = sum(hosts.values()) if isinstance(hosts, dict) else hosts if isinstance(hosts, int) else 0
    idle = records.gpus - int(running) - held
    if idle <= 0:
        return []
    asked = {key: records.configured(f"scale.{key}") for key in ("workers", "mode")}
    shown = ", ".join(f"scale.{key} {value}" for key, value in asked.items() if value is not None)
    ran = f"{counted(int(running), 'worker')}" + (f" and {counted(held, 'expert host')}" if held else "")
    remedy = advice(
        ("set scale.workers: auto", asked["workers"] == "auto"),
        ("set scale.mode: auto", asked["mode"] in (None, "auto")),
        ("raise loop.global_batch_size, of which each worker needs a row", False),
    )
    seen = f"{shown}: {ran} ran on {records.gpus} GPUs"
    places = [f"rank {rank} on {row.get('device')} of {row.get('node')}" for rank, row in enumerate(ranks_of(records))]
    seen += f" ({abbreviated(places, 4)})" if places else ""
    hidden = sorted({str(row["visible"]) for row in ranks_of(records) if row.get("visible") is not None})
    seen += f"; the workers see CUDA_VISIBLE_DEVICES={' and '.join(hidden)}" if hidden else ""
    chosen = isinstance(asked["workers"], int) or asked["mode"] == "single_gpu"
    title = f"{idle} of {records.gpus} GPUs did nothing"
    return [Finding("info" if chosen else "warning", title, seen, remedy)]


def unusable_devices(records: RunRecords) -> list[Finding]:
    """GPUs that existed and could not be used, unless the job asked for CPUs."""
    lines = records.unusable
    if not lines or "cpu" in (records.configured("scale.mode"), records.configured("scale.accelerator")):
        return []
    if records.planned("device") != "cpu":
        return [Finding("warning", "Some GPUs were not used", "; ".join(lines))]
    remedy = "Repair what is named, and see with `raytrain plan` that the device is cuda; scale.mode cpu is for CPUs."
    return [Finding("warning", "Trained on the CPU although there is a GPU", "; ".join(lines), remedy)]


RULES: tuple[Callable[[RunRecords], list[Finding]], ...] = (
    failure, loss_trend, overfitting, non_finite, restarts, fall_backs, unusable_devices, idle_devices, retried_steps,
    memory_warnings, step_limits, utilisation, limiting_part, compilation, experts,
)  # fmt: skip


def diagnose(records: RunRecords) -> list[Finding]:
    found = [finding for rule in RULES for finding in rule(records)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """The findings that ask for something, a line each and one for each option, for a terminal; where there are errors,
    these alone: the others of a failed run are on its page."""
    severity = "error" if any(one.severity == "error" for one in findings) else "warning"
    lines = []
    for one in findings:
        if one.severity == severity:
            text = f"{one.evidence.removesuffix('.')}. {one.remedy}" if one.remedy else one.evidence
            lines.append(f"finding: {one.title}: {text}")
            lines += [f"  {number}. {option}" for number, option in enumerate(one.options, 1)]
    return lines
