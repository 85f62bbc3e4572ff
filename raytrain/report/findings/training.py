"""Findings about the course of the training: loss, overfitting, non-finite steps, experts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from cluster.wording import counted, loss_text
from raytrain.config.messages import advice
from raytrain.report.experts import loads_of, names_of
from raytrain.report.findings.finding import Finding
from raytrain.report.records import (
    RunRecords,
    non_finite_steps,
    number,
    percentile,
    series,
    values,
)

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
        return [
            Finding("info", "Non-finite steps were skipped", evidence + "; usual while the loss scale of fp16 adapts")
        ]
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
        seen, remedy = (
            f"{dropped:.1%} of the routed tokens",
            "Raise experts.capacity_factor; null drops none.",
        )
        found.append(Finding("warning", "Tokens are dropped", seen, remedy))
    return found
