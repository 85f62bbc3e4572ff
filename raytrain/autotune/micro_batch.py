"""`loop.micro_batch_size: auto` on the real model, where memory decides: the largest size that fits, of those that
divide the global batch.

Time does not matter here, so that two runs with the same seed compute the same steps; `raytrain tune` decides by speed.
An estimate is no shorter way to begin: torch's MemTracker on fake tensors was right about a row within 4 %, but took
0.5 to 3.5 s where the first real measurement took 0.2 to 0.9 s, and does not see what a process needs once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from cluster.wording import counted
from raytrain.autotune.measurement import Candidate, Measurement, line_of
from raytrain.autotune.size_curve import sizes_dividing
from raytrain.autotune.step_probe import StepProbe
from raytrain.errors import RunError
from raytrain.plan.choice import Deferred, Resolved, size_text
from raytrain.plan.shares import SPLITS
from raytrain.train.memory.device import process_budget
from raytrain.train.session import Session

#: The first size measured is at most this fraction of the largest one.
FIRST = 1 / 8


class NothingFits(RunError):
    """Not even the smallest micro-batch fits into memory in this precision."""


def micro_batch_sizes(global_batch: int, workers: int) -> tuple[int, ...]:
    """Sizes that `auto` may choose, ascending: those that divide the batch evenly, and one worker's share."""
    return tuple(sorted({*sizes_dividing(global_batch, workers), math.ceil(global_batch / workers)}))


def next_micro_batch(sizes: Sequence[int], measured: Sequence[Measurement], *, budget: int | None) -> int | None:
    """The size to measure next; None where `choose_micro_batch` has its answer.

    Begins with a small size, continues with the largest one that the line through all fitting sizes predicts to be
    within the budget, and ends where the next larger one was measured, or is predicted from two sizes, not to fit.
    """
    fitted = {one.candidate.micro_batch_size for one in measured if one.outcome == "ok"}
    failed = {one.candidate.micro_batch_size for one in measured if one.outcome != "ok"}
    best, ceiling = max(fitted, default=0), min(failed, default=max(sizes) + 1)
    larger = [size for size in sizes if best < size < ceiling]
    if not larger:
        return None
    if not best:
        return max((size for size in larger if size <= FIRST * min(ceiling, max(sizes))), default=larger[0])
    line = line_of([one for one in measured if one.outcome == "ok"])  # others may not be on the line
    within = max((size for size in larger if budget is None or line.predict(size) <= budget), default=None)
    if within is None and len(fitted) == 1:
        within = larger[0]  # one size alone predicts too much, see `line_of`
    return within


def choose_micro_batch(sizes: Sequence[int], measured: Sequence[Measurement], *, budget: int | None) -> Resolved | None:
    """The largest size that was measured to fit, with its reason; None where not even the smallest one did."""
    good = [one for one in measured if one.outcome == "ok"]
    best = max(good, key=lambda one: one.candidate.micro_batch_size, default=None)
    if best is None:
        return None
    rows = best.candidate.micro_batch_size
    room = "" if budget is None else f" of {size_text(budget)} that a worker may take"
    reason = f"one real step of {rows} rows measured {size_text(best.peak_bytes or 0)}{room}"
    larger = min((size for size in sizes if size > rows), default=None)
    if larger is None:
        return Resolved(rows, f"all of a worker's share: {reason}")
    refused = [one for one in measured if one.candidate.micro_batch_size == larger]
    why = refused[0].reason if refused else f"{size_text(line_of(measured).predict(larger))} are predicted"
    return Resolved(rows, f"{reason}; {larger} rows: {why}")


def micro_batch_record(
    chosen: Resolved, tried: Sequence[Measurement], *, budget: int | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """What `memory_probe.json` keeps: the choice, each size with its predicted and measured peak, and the line with
    what it predicts for half, the same and twice the rows."""
    line, rows, trials = line_of(tried), int(chosen.value), []
    peak = next(one.peak_bytes for one in tried if one.candidate.micro_batch_size == rows)
    for number, one in enumerate(tried):
        before = [other for other in tried[:number] if other.outcome == "ok"]
        predicted = line_of(before).predict(one.candidate.micro_batch_size) if before else None
        trials.append({"predicted_bytes": predicted, **asdict(one)})
    return {
        "value": rows, "reason": chosen.reason, "peak_bytes": peak, "budget_bytes": budget, "line": asdict(line),
        "predicted_peaks": {str(size): line.predict(size) for size in sorted({max(1, rows // 2), rows, 2 * rows})},
        "settings": settings, "trials": trials,
    }  # fmt: skip


def measure_micro_batch(probe: StepProbe, settings: dict[str, Any]) -> tuple[Resolved, dict[str, Any]]:
    """The largest micro-batch that fits, and the record of how it was found, for these `settings`. Changes nothing that
    it measures.

    Raises:
        NothingFits: not even the smallest micro-batch.
        RunError: a step failed for another reason than memory.
    """
    session = probe.session
    assert session.precision is not None, "measured after `prepare`"
    sizes, budget = possible_sizes(session), memory_budget(session)
    tried: list[Measurement] = []
    while (rows := next_micro_batch(sizes, tried, budget=budget)) is not None:
        candidate = Candidate(session.precision, rows)
        found = probe.measure(candidate, budget=budget, passes=0, with_memory=True)
        # a loss that is not finite needs as much memory as any other; training has its own rules for it
        tried.append(replace(found, outcome="ok") if found.outcome == "nonfinite" else found)
    chosen = choose_micro_batch(sizes, tried, budget=budget)
    if chosen is not None:
        return chosen, micro_batch_record(chosen, tried, budget=budget, settings=settings)
    last = tried[-1]
    few = counted(last.candidate.micro_batch_size, "row")
    if last.outcome == "error":
        raise RunError(f"a step of {few} cannot be run: {last.reason}")
    allowed = "" if budget is None else f" ({size_text(budget)} for a worker)"
    needed = "" if last.peak_bytes is None else f", {size_text(last.peak_bytes)} at its peak"
    raise NothingFits(
        f"not even a micro-batch of {few} fits{needed}: {last.reason}; raise cluster.memory_fraction or"
        f" cluster.memory_limit{allowed}, set loop.activation_checkpointing or a lower precision.dtype, or make the"
        " model smaller"
    )


def possible_sizes(session: Session) -> tuple[int, ...]:
    """All sizes that divide the global batch; smaller ones where shares are still to be measured."""
    parts = SPLITS if isinstance(session.job.plan.shares, Deferred) else 1
    return micro_batch_sizes(int(session.job.planned("global_batch_size")), session.workers.world_size * parts)


def memory_budget(session: Session) -> int | None:
    """Bytes that each worker may use (`cluster.memory_fraction`, `cluster.memory_limit`), the same on every worker."""
    cluster = session.job.cluster
    own = process_budget(
        session.device, fraction=cluster.memory_fraction, limit=cluster.memory_limit, processes=session.sharing
    )
    known = [row[0] for row in session.workers.all_gather_floats([float(own or 0)]) if row[0]]
    return int(min(known)) if known else None
