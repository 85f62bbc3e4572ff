"""Diagnoses of a run: records in, findings out. Pure rules, each with its evidence and what mends it.

Every rule is a function `RunRecords -> list[Finding]`; `diagnose` runs them all and sorts by severity. A rule
that lacks its records finds nothing.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Sequence

from raytrain.report.experts import loads_of, names_of
from raytrain.report.figures import (
    cause_of,
    failure_reason,
    outcome,
    plain_number,
    seconds,
    step_ms,
    time_account,
)
from raytrain.report.findings.compile import graph_breaks
from raytrain.report.findings.finding import SEVERITIES, Finding
from raytrain.report.findings.memory import shortages
from raytrain.report.records import (
    Row,
    RunRecords,
    first_text,
    non_finite_steps,
    number,
    percentile,
    series,
    values,
)

SAVE_BUDGET = 0.03


def diagnose(records: RunRecords) -> list[Finding]:
    """All findings, the worst first."""
    found = [finding for rule in RULES for finding in rule(records)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def smoothed_ends(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Means of the first and of the last tenth (1 to 20 points each) of a curve; None under two points."""
    if len(points) < 2:
        return None
    width = max(1, min(20, len(points) // 10))
    data = [value for _, value in points]
    return statistics.fmean(data[:width]), statistics.fmean(data[-width:])


def failure(records: RunRecords) -> list[Finding]:
    """The reason of a failed run, with the remedy of a kind of failure that is known."""
    state = outcome(records)
    if state.status == "lost":
        remedy = "`raytrain train --resume RUN` goes on from the newest good checkpoint."
        return [Finding("warning", "The run has no result", state.sentence, remedy)]
    if state.status != "failed":
        return []
    rows = records.of_kind("failure", "fault")[-1:]
    said = " ".join([failure_reason(records), *(cause_of(row) for row in rows)]).lower()
    known = next((mend for words, mend in _REMEDIES.items() if re.search(words, said)), "")
    evidence = failure_reason(records) or "No cause is on record; the end of logs/ may tell."
    told = next((first_text(row, "remedy") for row in rows), "")
    return [Finding("error", "The run failed", evidence, told or known)]


_REMEDIES = {
    r"out ?of ?memory": "Lower loop.micro_batch_size: accumulation keeps the update the same.",
    r"no space|disk full|enospc": "Free space under save.dir, or lower save.keep.",
    r"\bnans?\b|non-?finite": "Look for NaNs in the data, lower optim.lr, or set precision.dtype: fp32.",
    r"checkpoint": "An older checkpoint may be whole: `--resume` falls back to it by itself.",
    r"deviceplacement": "Create tensors on the device of the batch inside forward.",
}


def loss_trend(records: RunRecords) -> list[Finding]:
    """Whether the training loss falls."""
    ends = smoothed_ends(series(records.train, "loss"))
    if ends is None:
        return []
    first, last = ends
    seen = f"{plain_number(first)} at the start, {plain_number(last)} at the end (means of a tenth of the log)"
    if last > first + 0.5 * abs(first):
        remedy = "Lower optim.lr or lengthen optim.warmup_steps."
        return [Finding("error", "The training loss diverged", seen, remedy)]
    if last > first - 0.02 * abs(first):
        remedy = "Check that labels match inputs, then try optim.lr three times higher and lower."
        return [Finding("warning", "The training loss is not falling", seen, remedy)]
    return [Finding("good", "The training loss fell", seen)]


def overfitting(records: RunRecords) -> list[Finding]:
    """The eval loss rises from its best while the training loss goes on falling."""
    evals, train = series(records.evals, "loss"), series(records.train, "loss")
    if len(evals) < 3:
        return []
    best_step, best = min(evals, key=lambda point: point[1])
    last_step, last = evals[-1]
    after = smoothed_ends([point for point in train if point[0] >= best_step])
    if last_step == best_step or last - best <= 0.02 * abs(best) or after is None or after[1] >= after[0]:
        return []
    seen = f"eval {plain_number(best)} at step {int(best_step):,}, {plain_number(last)} at {int(last_step):,}"
    remedy = "Use the best checkpoint, set loop.patience, or add data, weight decay or dropout."
    return [Finding("warning", "Overfitting: eval loss rises while training loss falls", seen, remedy)]


def non_finite(records: RunRecords) -> list[Finding]:
    """Steps that were skipped, or whose loss is no number."""
    rows = records.train
    seen = set(non_finite_steps(rows)) | set(non_finite_steps(rows, "grad_norm"))
    skipped = series(rows, "skipped_steps")
    before = [0.0, *(count for _, count in skipped)]
    seen |= {int(step) for (step, count), last in zip(skipped, before, strict=False) if count > last}
    if not seen:
        return []
    total = max(len(seen), int(before[-1]))
    steps = sorted(seen)
    shown = ", ".join(f"{step:,}" for step in steps[:8]) + (" and more" if len(steps) > 8 else "")
    evidence = f"{total} of {int(rows[-1]['step']):,} steps; in the log rows of step {shown}"
    if records.planned("precision") == "fp16" and total <= 20:
        return [Finding("info", "Non-finite steps were skipped", evidence + "; usual while fp16's scale settles")]
    if total <= 2:
        return [Finding("info", "Non-finite steps were skipped", evidence)]
    remedy = "Lower optim.lr, set optim.max_grad_norm or raise precision.dtype; look at the data there."
    return [Finding("warning", "Non-finite steps were skipped", evidence, remedy)]


def restarts(records: RunRecords) -> list[Finding]:
    """Attempts after the first, with the faults that ended the ones before."""
    attempts = records.of_kind("attempt")
    if len(attempts) < 2:
        return []
    causes = [first_text(row, "cause") for row in attempts[1:]]
    decisive: dict[str, Row] = {}
    for row in records.of_kind("failure", "fault", "restart"):  # a death explains the errors around it
        known = decisive.setdefault(str(row.get("attempt")), row)
        if row.get("error") == "WorkerDied" != known.get("error"):
            decisive[str(row.get("attempt"))] = row
    causes += [cause_of(row) for row in decisive.values()]
    told = "; ".join(dict.fromkeys(cause for cause in causes if cause)) or "no cause on record"
    starts = ", ".join(f"{int(number(row.get('from_step')) or 0):,}" for row in attempts[1:])
    failed = f"; {len(decisive)} of those before had failed" if 0 < len(decisive) < len(attempts) - 1 else ""
    return [Finding("info", f"{len(attempts)} attempts", f"went on from step {starts}{failed}: {told}")]


def fall_backs(records: RunRecords) -> list[Finding]:
    """Choices that were changed for a lesser one: precision during the run, anything else in the plan."""
    rows = [
        row
        for row in records.of_kind("decision", "fallback")
        if row["kind"] == "fallback" or row.get("value") == "raise_precision" or row.get("what") == "rollback"
    ]
    found = [Finding("warning", "Fell back during the run", cause_of(row) or str(row.get("kind"))) for row in rows]
    return found + [Finding("info", "Noted in the plan", line) for line in records.warnings]


def limiting_part(records: RunRecords) -> list[Finding]:
    """Which part of the wall time limits the run."""
    account = dict(time_account(records))
    wall = sum(account.values())
    if wall <= 0 or not records.train:
        return []
    share = {part: spent / wall for part, spent in account.items()}
    found = []
    for part, limit, title, remedy in _LIMITS:
        if share.get(part, 0.0) > limit:
            small = part == "startup" and wall < 600
            seen = f"{share[part]:.0%} of {seconds(wall)} ({seconds(account[part])})"
            found.append(Finding("info" if small else "warning", title, seen, "" if small else remedy))
    busy = share.get("compute", 0.0)
    if busy >= 0.5:
        found.append(Finding("good", "Limited by compute", f"{busy:.0%} of {seconds(wall)} is computation"))
    return found


_LIMITS = (
    (
        "data",
        0.15,
        "Waiting for data",
        "Set data.storage: resident if the split fits, or make samples cheaper to read.",
    ),
    (
        "communication",
        0.25,
        "Waiting for communication",
        "Raise loop.global_batch_size, use fewer workers or a faster cluster.interface.",
    ),
    ("eval", 0.25, "Evaluation takes much of the time", "Raise loop.eval_every or set loop.eval_batches."),
    (
        "save",
        SAVE_BUDGET,
        "Checkpoints cost more than their budget of 3 %",
        "Set save.every: auto or a larger number, and save.asynchronous: true.",
    ),
    ("startup", 0.3, "Start-up takes much of the time", "A longer run spreads it over more steps."),
    ("compile", 0.25, "Compilation takes much of the time", "Set loop.compile: off for runs this short."),
    (
        "restart",
        0.1,
        "Restarts take much of the time",
        "See the faults in the timeline; lower save.every to lose fewer steps.",
    ),
    ("lost", 0.1, "Work was lost between a checkpoint and a fault", "Lower save.every."),
)


def clipping(records: RunRecords) -> list[Finding]:
    """The gradient norm is over the clip at nearly every step of the second half."""
    limit = number(records.configured("optim.max_grad_norm"))
    norms = values(records.train[len(records.train) // 2 :], "grad_norm")
    if not limit or len(norms) < 20:
        return []
    share = sum(norm > limit for norm in norms) / len(norms)
    if share < 0.9:
        return []
    median = plain_number(percentile(norms, 0.5))
    seen = f"{share:.0%} of the steps of the second half; median norm {median}, clip {limit:g}"
    ends = smoothed_ends(series(records.train, "loss"))
    stuck = ends is not None and ends[1] > ends[0] - 0.02 * abs(ends[0])
    remedy = "Try a third of optim.lr, or raise optim.max_grad_norm if the loss is smooth."
    return [Finding("warning" if stuck else "info", "Gradients are clipped nearly always", seen, remedy)]


def step_times(records: RunRecords) -> list[Finding]:
    """Step times that scatter."""
    low, high = step_ms(records)
    if len(records.train) < 20 or not low or not high or high / low < 1.5:
        return []
    seen = f"p50 {seconds(low / 1000)}, p95 {seconds(high / 1000)} ({high / low:.1f} times)"
    remedy = "Other load, uneven samples or too many threads: see scale.threads and the telemetry."
    return [Finding("warning" if high / low >= 2 else "info", "Step times scatter", seen, remedy)]


def experts(records: RunRecords) -> list[Finding]:
    """Dead experts, uneven load and dropped tokens of a mixture of experts."""
    late = records.train[len(records.train) // 2 :]
    load = percentile(values(late, "load_imbalance"), 0.5)
    dropped = percentile(values(late, "dropped_fraction"), 0.5)
    remedy = "Raise experts.balance_weight, or set experts.balance: both."
    found, loads = [], loads_of(records)
    if loads is not None and (dead := loads.dead()):
        number = sum(map(len, loads.last_used))
        seen = f"{len(dead)} of {number} had no row in the last quarter of the windows: {names_of(dead)}"
        found.append(Finding("warning", "Experts without tokens", seen, remedy))
    if load is not None and load > 2:
        seen = f"the busiest expert has {load:.2g} times the mean load (median of the second half)"
        found.append(Finding("warning", "Experts are loaded unevenly", seen, remedy))
    if dropped is not None and dropped > 0.02:
        seen, remedy = (
            f"{dropped:.1%} of the routed tokens",
            "Raise experts.capacity_factor; null drops none.",
        )
        found.append(Finding("warning", "Tokens are dropped", seen, remedy))
    return found


RULES: tuple[Callable[[RunRecords], list[Finding]], ...] = (
    failure,
    loss_trend,
    overfitting,
    non_finite,
    restarts,
    fall_backs,
    shortages,
    limiting_part,
    clipping,
    step_times,
    graph_breaks,
    experts,
)
