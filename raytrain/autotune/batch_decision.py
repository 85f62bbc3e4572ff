"""The answer of a search over batch size and precision with its reasons, also for several kinds of devices. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from raytrain.autotune.batch_search import CandidateSearch
from raytrain.autotune.batch_space import BatchSpace, SearchResults
from raytrain.autotune.measurement import Candidate, line_of
from raytrain.autotune.precision import WORTHWHILE_GAIN
from raytrain.autotune.size_curve import NEAR, SizeCurve
from raytrain.errors import RunError
from raytrain.plan.choice import Resolved, figure_text, size_text


@dataclass(frozen=True)
class TableRow:
    """One candidate, for the table that a user reads.

    Attributes:
        rows_per_s: of one worker, from the median; None where it was not timed.
        low, high: by the slowest and the fastest pass.
        predicted_peak, measured_peak: bytes; None if unknown.
        note: why it was ruled out, or "".
    """

    precision: str
    micro_batch_size: int
    passes: int
    rows_per_s: float | None
    low: float | None
    high: float | None
    predicted_peak: int | None
    measured_peak: int | None
    note: str = ""


@dataclass(frozen=True)
class BatchDecision:
    """The chosen point with its reasons.

    Attributes:
        rows_per_s: of one worker.
        predicted_peak: bytes by the line through the other sizes, or through the reference's where there is none.
        table: every candidate on which anything was spent.
        refusals: precision -> why it was not chosen.
        knees: precision -> its own best size.
        complete: the search had nothing left to measure.
        contest: the contenders of the last contest and the seconds of their passes; None without one.
    """

    candidate: Candidate
    precision: Resolved
    micro_batch_size: Resolved
    rows_per_s: float
    predicted_peak: int | None
    measured_peak: int | None
    table: tuple[TableRow, ...]
    refusals: dict[str, str]
    knees: dict[str, int]
    complete: bool
    contest: dict[str, Any] | None = None

    def row(self, precision: str, size: int) -> TableRow:
        """The row of a candidate."""
        return next(row for row in self.table if (row.precision, row.micro_batch_size) == (precision, size))

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)


def decide(space: BatchSpace, results: SearchResults) -> BatchDecision:
    """The best candidate by these measurements; also for a search that was interrupted.

    Raises:
        RunError: nothing that was measured can run; says how many bytes are needed and which key allows more.
    """
    search = CandidateSearch(space, results)
    curve, chosen = search.chosen()
    if curve is None or chosen is None:
        raise _nothing_fits(search)
    size, peak, budget = chosen.micro_batch_size, curve.peaks.get(chosen.micro_batch_size), space.budget_bytes
    others = [one for one in (*curve.read, *search.lead.read) if one.candidate != chosen]
    line = curve.line_without(size) or search.lead.line_without() or (line_of(others) if others else None)
    size_reason = _size_reason(search, curve, chosen)
    if peak and budget:
        size_reason += f"; its peak is {peak / budget:.1%} of what a process may take"
    refusals = {name: why for name, one in search.curves.items() if one is not curve and (why := _why_not(search, one))}
    best = {name: search.choice(one) for name, one in search.curves.items()}
    contest = {
        "contenders": [asdict(one) for one in search.contest],
        "pass_s": [one.pass_s for one in search.contest.values()],
    }
    return BatchDecision(
        candidate=chosen,
        precision=Resolved(curve.precision, _precision_reason(search, curve, refusals)),
        micro_batch_size=Resolved(size, size_reason),
        rows_per_s=curve.bound(size),
        predicted_peak=None if line is None else line.predict(size),
        measured_peak=peak,
        table=_table(search),
        refusals=refusals,
        knees={name: one.micro_batch_size for name, one in best.items() if one is not None},
        complete=not search.wanted(),
        contest=contest if search.contest else None,
    )


def _table(search: CandidateSearch) -> tuple[TableRow, ...]:
    timed = list(search.results.measurements)
    timed += [one for contest in search.results.contests if all(one.pass_s for one in contest) for one in contest]
    passes = Counter(one.candidate for one in timed for _ in one.pass_s)
    rows = []
    for curve in search.curves.values():
        tried = {*curve.seconds, *curve.peaks, *curve.broken, curve.too_large}
        for size in (one for one in search.space.sizes if one in tried):
            line = curve.line_without(size) or curve.line_without()
            seconds = curve.seconds.get(size)
            rates = [search.space.score(size, one, curve.updates) for one in seconds or ()]
            failed = curve.nonfinite or curve.broken.get(size, "")
            rows.append(TableRow(
                precision=curve.precision,
                micro_batch_size=size,
                passes=passes[Candidate(curve.precision, size)],
                rows_per_s=search.space.score(size, median(seconds), curve.updates) if seconds else None,
                low=min(rates, default=None),
                high=max(rates, default=None),
                predicted_peak=None if line is None else line.predict(size),
                measured_peak=curve.peaks.get(size),
                note="out of memory" if size >= curve.too_large else failed,
            ))  # fmt: skip
    return tuple(rows)


def _compared(search: CandidateSearch, own: Candidate, other: Candidate) -> str:
    """The speed of one candidate against another, from rounds in turn if both took part."""
    if own in search.contest and other in search.contest:
        gains = [b / a for a, b in zip(search.row_s(own), search.row_s(other), strict=True)]
        at = f"{median(gains):.2f} [{min(gains):.2f}, {max(gains):.2f}] times as fast as"
        return f"measured in turn {at} {other.precision} x {other.micro_batch_size}"
    first, second = (search.curves[one.precision].bound(one.micro_batch_size) for one in (own, other))
    return f"measured {first / second:.2f} times as fast as {other.precision}"


def _size_reason(search: CandidateSearch, curve: SizeCurve, chosen: Candidate) -> str:
    """Its throughput, the best one, what memory allows, and the sizes that it was measured in turn with."""
    scores = {size: curve.bound(size) for size in curve.measured}
    best, size = max(scores, key=lambda one: scores[one]), chosen.micro_batch_size
    reason = f"{figure_text(scores[size])} rows/s"
    if size != best:
        reason += f", within {NEAR:.0%} of the best, {figure_text(scores[best])} at {best}"
    if max(curve.fitting) < search.space.sizes[-1] and search.space.budget_bytes is not None:
        reason += f"; memory allows up to {max(curve.fitting)}"
    if chosen in search.contest:
        others = [one for one in search.contest if one.precision == curve.precision and one != chosen]
        reason = "; ".join([reason, *(_compared(search, chosen, one) for one in others)])
    return reason


def _why_not(search: CandidateSearch, curve: SizeCurve) -> str:
    """Why a precision other than the chosen one was not chosen."""
    own, lead = search.choice(curve), search.choice(search.lead)
    if curve.nonfinite:
        return f"refused: {curve.nonfinite}"
    if own is None:
        failed = next(iter(curve.broken.values()), "")
        return f"refused: {failed}" if failed else "no size of it was measured, or none fits"
    if curve is search.lead or lead is None:
        return ""
    text = _compared(search, own, lead)
    if search.gain(curve) > 1 + WORTHWHILE_GAIN and search.is_untold(curve):
        text += f"; too noisy to tell them apart, so that {lead.precision} stays: search again on an idle machine"
    if refusal := search.gates.get(curve.precision):
        return f"{text}, but refused: {refusal}"
    few = len(curve.seconds) <= 2 and search.cannot_win(curve)
    return text + (" and dropped after its first two sizes" if few else "")


def _precision_reason(search: CandidateSearch, curve: SizeCurve, refusals: Mapping[str, str]) -> str:
    """What the chosen precision gains over the reference, and why others were not chosen."""
    reasons = [f"{name} {why}" for name, why in refusals.items()]
    own, lead = search.choice(curve), search.choice(search.lead)
    if curve is search.lead or own is None:
        return "; ".join(reasons) or f"nothing but {curve.precision} to compare"
    if lead is None:
        return "; ".join([*reasons, f"so that {curve.precision} could not be compared with it: watch its loss"])
    gain = f"{_compared(search, own, lead)}, each at its own best size"
    if search.cannot_win(search.lead):  # so that not all of its sizes were measured
        bound = curve.best / search.lead.reach
        gain = (
            f"{_compared(search, own, lead)}, at least {bound:.2f} times as fast as {lead.precision} can be at any size"
        )
    checked = ", loss and gradient norm agree" if curve.precision in search.gates else ""
    return "; ".join([gain + checked, *reasons])


def _nothing_fits(search: CandidateSearch) -> RunError:
    """What failed, how many bytes it needed, and the key to change."""
    failed = []
    for name, curve in search.curves.items():
        if curve.nonfinite:
            failed.append(f"{name}: {curve.nonfinite}")
        elif curve.too_large < math.inf:
            peak = curve.peaks.get(int(curve.too_large))
            took = "is out of memory" if peak is None else f"takes {size_text(peak)}"
            failed.append(f"{name}: {curve.too_large} row{'s' if curve.too_large > 1 else ''} {took}")
        elif curve.broken:
            failed.append("{}: at {} rows {}".format(name, *next(iter(curve.broken.items()))))
    budget = search.space.budget_bytes
    if budget is not None and any(curve.too_large < math.inf for curve in search.curves.values()):
        floors = [one.floor_bytes for curve in search.curves.values() for one in curve.read if one.floor_bytes]
        alone = f"; the process with the model alone takes {size_text(max(floors))}" if floors else ""
        return RunError(
            f"no micro-batch fits into {size_text(budget)} ({'; '.join(failed)}{alone}): "
            "raise cluster.memory_limit or cluster.memory_fraction, or take a smaller model"
        )
    if not failed:
        return RunError("nothing has been measured yet")
    return RunError(f"no candidate of precision.dtype and loop.micro_batch_size can run: {'; '.join(failed)}")


# -- several kinds of devices ---------------------------------------------------------------------


@dataclass(frozen=True)
class KindsDecision:
    """The candidate for all kinds of devices, each of which was searched by itself.

    All workers of a run compute in one precision, and rows are assigned in micro-batches: one has to fit the smallest
    device, and `scale.shares: auto` assigns more of them to the faster ones.

    Attributes:
        decisions: kind -> what its own search decided.
        binding: the kind with the smallest best size in that precision, which is the candidate's.
        rows_per_s: of all workers together, each at its own kind's best size.
    """

    decisions: Mapping[str, BatchDecision]
    candidate: Candidate
    binding: str
    precision: Resolved
    micro_batch_size: Resolved
    rows_per_s: float


def choose_for_all(
    decisions: Mapping[str, BatchDecision], *, workers: Mapping[str, int], reference: str, refused: Collection[str] = ()
) -> KindsDecision:
    """The precision in which all workers together are fastest, and the least of the kinds' best sizes in it.

    Args:
        decisions: kind -> what its own search decided.
        workers: kind -> how many of the run's workers use it; devices that the run does not use do not count.
        refused: precisions that a gate has refused on some kind.

    Raises:
        RunError: there is no precision that runs on every kind.
    """
    if len(decisions) == 1:
        ((kind, only),) = decisions.items()
        speed = workers[kind] * only.rows_per_s
        return KindsDecision(decisions, only.candidate, kind, only.precision, only.micro_batch_size, speed)
    chosen = {reference, *(one.candidate.precision for one in decisions.values())} - {*refused}
    totals = {}
    for name in sorted(chosen):
        if all(name in one.knees for one in decisions.values()):
            rates = {kind: one.row(name, one.knees[name]).rows_per_s or 0.0 for kind, one in decisions.items()}
            totals[name] = sum(workers[kind] * rate for kind, rate in rates.items())
    if not totals:
        each = "; ".join(f"{kind}: {', '.join(one.knees)}" for kind, one in decisions.items())
        raise RunError(f"no precision runs on every kind of device ({each}): scale.accelerator picks one kind")
    precision = max(totals, key=lambda name: (totals[name], name == reference))
    sizes = {kind: one.knees[precision] for kind, one in decisions.items()}
    binding = min(sizes, key=lambda kind: sizes[kind])
    together = ", ".join(
        f"{name} {figure_text(totals[name])} rows/s" for name in sorted(totals, key=lambda name: -totals[name])
    )
    best = ", ".join(f"{kind} {size}" for kind, size in sizes.items())
    return KindsDecision(
        decisions, Candidate(precision, sizes[binding]), binding,
        Resolved(precision, f"of all {sum(workers.values())} workers together: {together}"),
        Resolved(sizes[binding], f"fits every kind (best of each: {best}); scale.shares gives the faster ones more"),
        totals[precision],
    )  # fmt: skip
