"""The search over batch size and precision. Pure: measurements in, the next proposals or the decision out.

For each precision two small sizes give a line of time and one of memory. The time predicts the size from which
throughput hardly rises (the knee), which is measured next; bounds drawn through what is measured then say whether any
other size could change the answer, and which. The answer is the smallest size within `NEAR` of the best that memory
allows. A lower precision must beat the reference at its own best size by `WORTHWHILE_GAIN`, and pass the numeric gate.
Each size is timed at one moment, at which the machine may have been slow: at the end the winner, its runner-up and the
best of each other precision are measured once more in alternating rounds, and those ratios decide.

A caller measures what `next_proposals` returns until it returns nothing, then calls `decide`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from raytrain.autotune.search.head_to_head import ROUNDS, HeadToHead
from raytrain.autotune.search.measurement import STEADY, Candidate, Measurement
from raytrain.autotune.search.memory_line import MemoryLine
from raytrain.autotune.search.precision import GateReport
from raytrain.autotune.search.ranking import Ranking
from raytrain.autotune.search.space import (
    LEAST_PASSES,
    MEMORY_PASSES,
    MOST_SIZES,
    MOST_STEPS,
    PASSES,
    BatchSpace,
    Proposal,
    nearest_at_most,
)
from raytrain.autotune.search.throughput import ThroughputCurve, chosen_size, next_size, runner_up, size_reason
from raytrain.errors import RunError
from raytrain.plan.choice import Resolved
from raytrain.plan.text import size_text

#: Beyond this multiple of the measured sizes, the memory line is confirmed by another reading.
FAR = 2
#: Rows of a step of the gate, at most: rounding shows with few, and its steps are most of the cost of a search.
GATE_ROWS = 4
#: Least steps of one timed measurement, and of one contender in a contest; each includes the dropped warm-up.
TIMED, ENTRY = 1 + LEAST_PASSES, 1 + ROUNDS


@dataclass(frozen=True)
class TableRow:
    """One candidate, for the table that a user reads.

    Attributes:
        rows_per_s: of one worker, from medians, with an interval of two standard errors of its logarithm; None where it
            was not timed.
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
        rows_per_s: of one worker, throughput (or goodput, where the space asks for it).
        predicted_peak: bytes by the line through the other sizes, or through the reference's where there is none.
        table: every candidate on which anything was spent.
        refusals: precision -> why it was not chosen.
        knees: precision -> its own best size.
        steps: precision -> passes spent, warm-ups, memory readings and contests included.
        complete: the search had nothing left to measure.
        contest: the contenders of the last contest and the seconds of their passes; None without one.
        untold: precisions that may be faster or slower than the reference: times vary too much to tell.
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
    steps: dict[str, int]
    complete: bool
    contest: dict[str, Any] | None = None
    untold: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)


def next_proposals(
    space: BatchSpace,
    measurements: Iterable[Measurement],
    running: Sequence[Proposal] = (),
    gates: Iterable[GateReport] = (),
    contests: Sequence[HeadToHead] = (),
) -> list[Proposal]:
    """What to measure now, at most one proposal for each idle device; nothing while results are awaited, or at the end.

    Args:
        measurements: all results so far. A measurement that crashed is one with the outcome "error".
        running: proposals without a result so far.
        gates: results of the proposals with `gate_steps`.
        contests: results of the proposals with `against`, the latest last.
    """
    search = _Search(space, measurements, gates, contests)
    idle = space.devices - len(running)
    in_progress = {_kind(one) for one in running}
    return [wanted for wanted in search.wanted() if _kind(wanted) not in in_progress][: max(0, idle)]


def proposals_left(
    space: BatchSpace,
    measurements: Iterable[Measurement],
    gates: Iterable[GateReport] = (),
    contests: Sequence[HeadToHead] = (),
) -> int:
    """About how many proposals are still to come: as many as each part of the search may make, as far as its results
    are known. Times that vary too much add some."""
    return _Search(space, measurements, gates, contests).left()


def _kind(one: Proposal) -> tuple[Candidate, bool, bool, bool]:
    """What a proposal measures, without its number of passes, which may shrink as results arrive."""
    return one.candidate, one.passes > 0, one.gate_steps > 0, bool(one.against)


def decide(
    space: BatchSpace,
    measurements: Iterable[Measurement],
    gates: Iterable[GateReport] = (),
    contests: Sequence[HeadToHead] = (),
) -> BatchDecision:
    """The best candidate by these measurements; also for a search that was interrupted.

    Raises:
        RunError: nothing that was measured can run; says how many bytes are needed and which key allows more.
    """
    return _Search(space, measurements, gates, contests).decision()


class _Search(Ranking):
    # -- what to measure --------------------------------------------------------------------------

    def wanted(self) -> list[Proposal]:
        """Everything that could be measured at the same time, the most urgent first: two sizes of every precision, the
        reference's first, then the sizes with the highest upper bounds."""
        curves = sorted(self.curves.values(), key=lambda curve: curve is not self.lead)
        first = [one for curve in curves for one in (*self._begin(curve), *self._again(curve))]
        by_promise = sorted(curves, key=lambda curve: -curve.reach)
        started = [curve for curve in by_promise if not self._begin(curve) and not self._again(curve)]
        found = first + [one for curve in started for one in self._go_on(curve)]
        return found or self._gate() or self._last()

    def left(self) -> int:
        """See `proposals_left`."""
        found = 0
        for curve in self.curves.values():
            begin = len(self._begin(curve))
            found += begin + len(self._again(curve))
            if begin or self._go_on(curve):
                unmeasured = sum(size not in curve.seconds for size in curve.fitting())
                found += max(0, min(MOST_SIZES - curve.sizes_tried, unmeasured) - begin)
        compare = int(self.contest is None and (len(self.curves) > 1 or len(self.space.sizes) > 1))
        if not found:
            gate = len(self._gate())
            return gate + compare if gate else len(self._last())
        rivals = [one for one in self.curves.values() if one is not self.lead and not one.nonfinite]
        able = [one for one in rivals if not one.measured or not self.cannot_win(one)]
        gates = sum(one.precision not in self.gates for one in able) if self.space.gate_steps else 0
        return found + gates + compare

    def _begin(self, curve: ThroughputCurve) -> list[Proposal]:
        """The first sizes of a precision that have not been measured."""
        if curve.nonfinite or (len(curve.broken) > 1 and not curve.seconds):
            return []
        missing = [size for size in self._first(curve) if size not in curve.seconds]
        unasked = curve.roomy or self.lead.roomy
        return [self._timed(curve, size, with_memory=self._unread(curve, size) and not unasked) for size in missing]

    def _again(self, curve: ThroughputCurve) -> list[Proposal]:
        """Repetitions for sizes that were timed while the machine did other work, in a separate process later."""
        left = MOST_STEPS - curve.steps - self._reserved()
        if curve.nonfinite or left < TIMED:
            return []
        return [self._timed(curve, size, most=left - 1) for size in curve.unsteady if size in curve.measured]

    def _go_on(self, curve: ThroughputCurve) -> list[Proposal]:
        """The next size of a precision after its first ones."""
        left = MOST_STEPS - curve.steps - self._reserved()
        if curve.nonfinite or not curve.measured or left < TIMED or self.cannot_win(curve):
            return []
        size = next_size(curve) if curve.sizes_tried < MOST_SIZES else None
        if size is None:
            return []
        read = left >= TIMED + MEMORY_PASSES and self._frontier(curve, size)
        most = left - 1 - (MEMORY_PASSES if read else 0)
        return [self._timed(curve, size, most=most, with_memory=read)]

    def _first(self, curve: ThroughputCurve) -> list[int]:
        """The two sizes to begin with; others near them if those fail or do not fit."""
        fitting = [size for size in curve.fitting() if self._guessed_to_fit(curve, size)]
        start = [size for size in self.space.first_sizes() if size in fitting]
        known = [size for size in curve.measured if size not in start]
        begin = self.space.first_sizes()[0]
        spare = [size for size in fitting if size > begin and size not in start]
        spare += [size for size in reversed(fitting) if size < begin]
        return sorted((start + known + spare)[: min(2, len(fitting))])

    def _guessed_to_fit(self, curve: ThroughputCurve, size: int) -> bool:
        """Until the memory of a precision is read, the reference's is used: weights and optimizer are the same."""
        return curve.line is not None or curve is self.lead or size in self.lead.fitting() or not self.lead.fitting()

    def _unread(self, curve: ThroughputCurve, size: int) -> bool:
        return self.space.budget_bytes is not None and size not in curve.peaks

    def _reserved(self) -> int:
        """Steps reserved for the end: the confirmation of a peak, and a contest between precisions."""
        confirmed = MEMORY_PASSES if self.space.budget_bytes is not None else 0
        return confirmed + (ENTRY if len(self.curves) > 1 and self.contest is None else 0)

    def _frontier(self, curve: ThroughputCurve, size: int) -> bool:
        """Whether larger sizes are ruled out only by a line of memory extrapolated from far smaller ones. Where an
        allocator takes memory in large blocks that line is rough, so that memory is read again at this size."""
        if not self._unread(curve, size) or curve.too_large is not None or not curve.peaks:
            return False
        return size == curve.fitting()[-1] < self.space.sizes[-1] and size > FAR * max(curve.peaks)

    def _timed(self, curve: ThroughputCurve, size: int, *, most: int = PASSES, with_memory: bool = False) -> Proposal:
        passes = max(1, min(PASSES, most))
        return Proposal(Candidate(curve.precision, size), passes=passes, with_memory=with_memory)

    def _gate(self) -> list[Proposal]:
        if not self.space.gate_steps or chosen_size(self.lead) is None:
            return []
        for curve in self.winners():
            if curve.precision not in self.gates:
                both = [size for size in curve.fitting() if size in self.lead.fitting()]
                size = nearest_at_most(both, GATE_ROWS) or self.lead.measured[0]
                return [Proposal(Candidate(curve.precision, size), passes=0, gate_steps=self.space.gate_steps)]
            if not self.refused(curve):
                return []
        return []

    def _last(self) -> list[Proposal]:
        """The contest of the candidate about to be chosen, and the reading of its peak."""
        curve = self.winner()
        size = None if curve is None else chosen_size(curve)
        if curve is None or size is None:
            return []
        unread, against = self._unread(curve, size), self._rivals(curve, size)
        if against and curve.entry(size) is None:
            return [Proposal(Candidate(curve.precision, size), ROUNDS, with_memory=unread, against=against)]
        return [Proposal(Candidate(curve.precision, size), passes=0, with_memory=True)] if unread else []

    def _rivals(self, curve: ThroughputCurve, size: int) -> tuple[Candidate, ...]:
        """Contenders against the chosen size, as far as steps are left: its runner-up, the best of each other precision
        that could be chosen and, where times vary, the reference with as many rows."""

        def left(other: ThroughputCurve, *sizes: int) -> int:
            """Steps that remain once each of these sizes has been confirmed, in case it wins."""
            return MOST_STEPS - other.steps - MEMORY_PASSES * sum(self._unread(other, one) for one in sizes)

        if left(curve, size) < ENTRY:
            return ()
        second = runner_up(curve, size)
        joins = second is not None and left(curve, size, second) >= 2 * ENTRY
        others = [
            Candidate(other.precision, best)
            for other in self.curves.values()
            for best in [chosen_size(other)]
            if other is not curve and best is not None and not self.refused(other) and left(other, best) >= ENTRY
        ]
        best = chosen_size(self.lead)
        alike = curve is not self.lead and best not in (None, size) and size in self.lead.fitting()
        alike = alike and self.is_noisy(curve) and left(self.lead, size, best or size) >= 2 * ENTRY
        same = [Candidate(self.lead.precision, size)] if alike else []
        return (*([Candidate(curve.precision, second)] if joins and second is not None else []), *others, *same)

    def decision(self) -> BatchDecision:
        """See `decide`."""
        curve = self.winner()
        size = None if curve is None else chosen_size(curve)
        if curve is None or size is None:
            raise nothing_fits(self.space, list(self.curves.values()))
        line = next((one for one in self._lines(curve, size) if one is not None), None)
        chosen = {name: chosen_size(one) for name, one in self.curves.items()}
        return BatchDecision(
            candidate=Candidate(curve.precision, size),
            precision=Resolved(curve.precision, self.precision_reason(curve)),
            micro_batch_size=Resolved(size, "; ".join(self._size_reasons(curve, size))),
            rows_per_s=curve.score(size),
            predicted_peak=None if line is None else line.predict(size),
            measured_peak=curve.peaks.get(size),
            table=table_of(self.curves.values()),
            refusals=self.refusals(curve),
            knees={name: at for name, at in chosen.items() if at is not None},
            steps={name: one.steps for name, one in self.curves.items()},
            contest=None if self.contest is None else self.contest.record(),
            complete=not self.wanted(),
            untold=tuple(self.untold()),
        )

    def _size_reasons(self, curve: ThroughputCurve, size: int) -> list[str]:
        peak, budget = curve.peaks.get(size), self.space.budget_bytes
        share = [f"its peak is {peak / budget:.1%} of what a process may take"] if peak and budget else []
        return [size_reason(curve, size), *self.sizes_in_turn(curve, size), *share]

    def _lines(self, curve: ThroughputCurve, size: int) -> Iterator[MemoryLine | None]:
        """Lines that predict the peak of a size, the best first; the reference's if no other size of its own was
        read."""
        yield curve.line_without(size)
        yield curve.estimate_without(size)
        yield self.lead.line
        yield self.lead.estimate_without(0)


def table_of(curves: Iterable[ThroughputCurve]) -> tuple[TableRow, ...]:
    """A row for each candidate, by precision and size."""
    return tuple(_row(curve, size) for curve in curves for size in curve.space.sizes if _spent(curve, size))


def _spent(curve: ThroughputCurve, size: int) -> bool:
    return size in curve.seconds or size in curve.peaks or size in curve.broken or size == curve.too_large


def _row(curve: ThroughputCurve, size: int) -> TableRow:
    timed = size in curve.seconds
    speed = curve.score(size) if timed else None
    low, high = _interval(curve, size) if timed else (None, None)
    line = curve.line_without(size) or curve.line
    note = curve.nonfinite or curve.broken.get(size, "")
    if curve.too_large is not None and size >= curve.too_large:
        note = "out of memory"
    return TableRow(
        precision=curve.precision,
        micro_batch_size=size,
        passes=curve.repeats(size),
        rows_per_s=speed,
        low=low,
        high=high,
        predicted_peak=None if line is None else line.predict(size),
        measured_peak=curve.peaks.get(size),
        note=note,
    )


def _interval(curve: ThroughputCurve, size: int) -> tuple[float, float]:
    """Two standard errors around a score; where times vary, not beyond those of the slowest and the fastest pass."""
    speed, error = curve.score(size), 2 * curve.error(size)
    low, high = speed * math.exp(-error), speed * math.exp(error)
    if error > STEADY:
        entry = curve.entry(size)
        passes = curve.seconds[size] if entry is None else entry.pass_s
        drift = curve.pass_s(size) / median(passes)
        slowest, fastest = (curve.space.score(size, drift * end(passes), curve.update_s) for end in (max, min))
        low, high = max(low, min(slowest, speed)), min(high, max(fastest, speed))
    return low, high


def nothing_fits(space: BatchSpace, curves: Sequence[ThroughputCurve]) -> RunError:
    """The error of a search without an answer: what failed, how many bytes it needed, and the key to change."""
    failed = [f"{curve.precision}: {why}" for curve in curves for why in [_failure(curve)] if why]
    if space.budget_bytes is not None and any(curve.too_large is not None for curve in curves):
        floors = [floor for curve in curves for floor in curve.floors]
        alone = f"; the process with the model alone takes {size_text(max(floors))}" if floors else ""
        return RunError(
            f"no micro-batch fits into {size_text(space.budget_bytes)} ({'; '.join(failed)}{alone}): "
            "raise cluster.memory_limit or cluster.memory_fraction, or take a smaller model"
        )
    if not failed:
        return RunError("nothing has been measured yet")
    return RunError(f"no candidate of precision.dtype and loop.micro_batch_size can run: {'; '.join(failed)}")


def _failure(curve: ThroughputCurve) -> str:
    if curve.nonfinite:
        return curve.nonfinite
    if curve.too_large is not None:
        peak = curve.peaks.get(curve.too_large)
        took = "is out of memory" if peak is None else f"takes {size_text(peak)}"
        return f"{curve.too_large} row{'s' if curve.too_large > 1 else ''} {took}"
    return next((f"at {size} rows {why}" for size, why in curve.broken.items()), "")
