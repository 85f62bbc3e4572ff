"""The micro-batch where memory decides. Pure: measurements in, the next size to measure or the answer out.

The largest size that fits, of those that divide the global batch. Time does not matter here, so that two runs with the
same seed compute the same steps; `raytrain tune` decides by speed.

No estimate says which size to begin with. torch's MemTracker in FakeTensorMode (torch 2.13, two sizes, forward and
backward) was tried for that. Its estimate of a row is right: 1.000 of the measured bytes for a GPT of 4 layers in fp32,
0.998 in bf16, 0.996 for an MLP, 0.998 for a CNN, 1.04 for a Llama of 4 layers. But it took 2.3, 2.0, 0.5, 0.9 and 3.5 s
on one CPU core, which grow with the layers and not with the rows, where the first real measurement, of an eighth of the
largest size, took 0.2 to 0.9 s and gives the floor as well: the process, its kernels and what the allocator rounds up,
which a fake run does not see. Two measured sizes are needed in either case, as one alone does not show what a process
needs once. It
cannot run a mixture of experts: where rows go depends on the data (DataDependentOutputException).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.autotune.search.measurement import Measurement
from raytrain.autotune.search.memory_line import MemoryLine, line_of
from raytrain.autotune.search.space import sizes_dividing
from raytrain.plan.choice import Resolved
from raytrain.plan.text import size_text

#: The first size measured is at most this fraction of the largest one.
FIRST = 1 / 8


@dataclass(frozen=True)
class NextSize:
    """A size to measure, and its peak as the line predicts it; None if there is no line yet."""

    rows: int
    predicted: int | None


def micro_batch_sizes(global_batch: int, workers: int) -> tuple[int, ...]:
    """Sizes that `auto` may choose, ascending: those that divide the batch evenly, and one worker's share."""
    return tuple(sorted({*sizes_dividing(global_batch, workers), math.ceil(global_batch / workers)}))


def next_micro_batch(sizes: Sequence[int], measured: Sequence[Measurement], *, budget: int | None) -> NextSize | None:
    """What to measure next; None where `choose_micro_batch` has its answer.

    Begins with a small size, continues with the largest one that the line through all fitting sizes predicts to be
    within the budget, and ends at a size that was measured to fit while the next larger one was measured, or is
    predicted from two sizes, not to fit.
    """
    fitted = {one.candidate.micro_batch_size for one in measured if one.outcome == "ok"}
    failed = {one.candidate.micro_batch_size for one in measured if one.outcome != "ok"}
    best, ceiling = max(fitted, default=0), min(failed, default=max(sizes) + 1)
    larger = [size for size in sizes if best < size < ceiling]
    if not larger:
        return None
    if not best:
        first = max((size for size in larger if size <= FIRST * min(ceiling, max(sizes))), default=larger[0])
        return NextSize(first, None)
    line = line_of([one for one in measured if one.outcome == "ok"])  # others may not be on the line
    within = max(larger) if budget is None else line.largest(budget, larger)
    if within is None and len(fitted) == 1:
        within = larger[0]  # one size alone predicts too much, see `line_of`
    return None if within is None else NextSize(within, line.predict(within))


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


def advice(line: MemoryLine, rows: int) -> dict[str, int]:
    """Predicted peak bytes of half, the same and twice the micro-batch, by its rows."""
    return {str(size): line.predict(size) for size in sorted({max(1, rows // 2), rows, 2 * rows})}


def micro_batch_record(
    chosen: Resolved, tried: Sequence[tuple[NextSize, Measurement]], *, budget: int | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """What `memory_probe.json` keeps: the choice, each size with its predicted and measured peak, and the line."""
    line = line_of([one for _, one in tried])
    trials = [{"predicted_bytes": proposal.predicted, **one.to_json()} for proposal, one in tried]
    peak = next(one.peak_bytes for _, one in tried if one.candidate.micro_batch_size == chosen.value)
    record = {"value": chosen.value, "reason": chosen.reason, "peak_bytes": peak, "budget_bytes": budget}
    record["line"] = line.to_json()
    return {**record, "predicted_peaks": advice(line, chosen.value), "settings": settings, "trials": trials}
