"""The search over batch size and precision. Pure: measurements in, the next proposals or the answer with its reasons
out.

Its goals, measured by `raytrain bench tune`: at most 0.3 of the time of an exhaustive grid, at least 0.95 of the
throughput of its best point, and never more memory than the budget. How it gets there:

1. Two small sizes of each precision give a line of time and one of memory. Passes get longer with each further row,
   nearly a line that bends upwards where caches end, so that lines through measured sizes bound the others.
2. Measured next is the smallest size that may be within `NEAR` of the best that memory allows, until that size is a
   measured one (`size_curve`, which also has the margin for noise).
3. A lower precision must beat the reference by `WORTHWHILE_GAIN`, each at its own best size, and its loss and gradient
   norm must be in the reference's band on the same rows.
4. Each size is timed at one moment, at which the machine may have been slow: at the end the winner and its rivals take
   turns in one process (a comparison), whose times decide.

A caller measures what `next_proposals` returns until it returns nothing; `decide` gives the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean, median
from typing import Any

from cluster.wording import plain_number
from raytrain.autotune.measurement import WORTHWHILE_GAIN, Candidate, Measurement, beyond_noise, outside_band
from raytrain.autotune.size_curve import NEAR, BatchSpace, SizeCurve
from raytrain.config.decode import JsonRecord
from raytrain.errors import RunError
from raytrain.plan.choice import Resolved, size_text

#: Passes of one timed measurement after the dropped warm-up: two, and a third if those differ.
LEAST_PASSES, PASSES = 2, 3
#: Timed rounds of a comparison at least, after one round that is dropped; and comparisons of a search at most.
ROUNDS, MOST_COMPARISONS = 3, 2
#: A precision whose upper bound is below this fraction of what it has to reach is dropped.
HOPELESS = 0.95

Measured = tuple[Measurement, ...]
"""What came of a proposal: one measurement, or those of a comparison, the winner's so far first; pass i of all is from
round i. If the first does not fit or fails, there is only its own."""


@dataclass(frozen=True)
class Proposal(JsonRecord):
    """One measurement that the search proposes.

    Attributes:
        against: rivals, measured with this one in `passes` alternating rounds, or up to four times as many where
            their times vary, after this one's peak if it is to be read.
    """

    candidate: Candidate  # what to measure
    passes: int = PASSES  # timed passes at most, after a warm-up that is dropped; 0: memory alone
    with_memory: bool = False  # also read the peak
    against: tuple[Candidate, ...] = ()

    @property
    def what(self) -> str:
        """What it measures, as lines and trials.jsonl say it."""
        main = ["in turn"] if self.against else ["time"] if self.passes else []
        return " + ".join([*main, "memory"] if self.with_memory else main)

    @property
    def aim(self) -> tuple[str, Candidate]:
        """What it is for; a repetition may read memory in addition, or no more."""
        return self.what.partition(" + ")[0], self.candidate


@dataclass
class SearchResults:
    """Everything that was measured so far, in the order of time. A measurement that crashed is one with the outcome
    "error"."""

    measurements: list[Measurement] = field(default_factory=list)
    comparisons: list[Measured] = field(default_factory=list)

    def add(self, measured: Measured) -> None:
        if len(measured) == 1:
            self.measurements += measured
        else:
            self.comparisons.append(measured)

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> SearchResults:
        """What rows of trials.jsonl hold; those of earlier versions had another form, and do not count."""
        results = cls()
        for row in (one for one in rows if "measured" in one):
            results.add(tuple(Measurement.from_json(one) for one in row["measured"]))
        return results


def next_proposals(space: BatchSpace, results: SearchResults, running: Sequence[Proposal] = ()) -> list[Proposal]:
    """What to measure now, at most one proposal for each idle device; nothing while results are awaited, or at the end.
    `running`: proposals without a result so far."""
    in_progress = {one.aim for one in running}
    wanted = [one for one in CandidateSearch(space, results).wanted() if one.aim not in in_progress]
    return wanted[: max(0, space.devices - len(running))]


class CandidateSearch:
    """All that was measured, compared: the `curves` of the precisions, those before the last `comparison` corrected by
    it, and the `chosen` candidate, None if nothing runs."""

    def __init__(self, space: BatchSpace, results: SearchResults) -> None:
        self.space, self.results, known = space, results, list(results.measurements)
        self.comparison: dict[Candidate, Measurement] = {}
        for measured in results.comparisons:
            if all(one.outcome == "ok" and one.pass_s for one in measured):
                self.comparison = {one.candidate: one for one in measured}
            else:  # a rival that failed is out
                known += [one for one in measured if one.outcome != "ok"]
        if self.comparison:
            known = _corrected(known, self.comparison)
        self.curves = {name: SizeCurve(space, name, known) for name in space.precisions}
        self.reference = self.curves[space.reference]
        # the best size of the fastest precision that computes what the reference does
        faster = (one.chosen for one in self.faster() if not self.refusal(one))
        self.chosen: Candidate | None = next(faster, self.reference.chosen)

    # -- what is best -----------------------------------------------------------------------------

    def refusal(self, curve: SizeCurve) -> str:
        """Why a precision is outside the reference's band, "" where it is inside, by the first pass over the same rows:
        those of the largest size that both have measured."""
        if self.reference.chosen is None:
            return ""
        size = max(set(curve.first_pass) & set(self.reference.first_pass), default=None)
        if size is None:
            return f"no size was measured in {self.reference.precision} too"
        return outside_band(curve.first_pass[size], self.reference.first_pass[size], name=self.reference.precision)

    def faster(self) -> list[SizeCurve]:
        """Precisions that beat the reference on time, or all if it does not run, the fastest first."""
        others = [one for one in self.curves.values() if one is not self.reference and one.chosen is not None]
        if self.reference.chosen is not None:
            rate, least = self.reference.rate, 1 + WORTHWHILE_GAIN
            others = [one for one in others if one.rate / rate > least and not self.is_noise(one)]
        return sorted(others, key=lambda one: one.rate, reverse=True)

    def is_noise(self, curve: SizeCurve) -> bool:
        """Whether rounds in turn did not show that a precision with the better median is faster than the reference."""
        own, reference = curve.chosen, self.reference.chosen
        if curve is self.reference or own is None or own not in self.comparison:
            return False
        if reference not in self.comparison:  # another size of it
            reference = next((one for one in self.comparison if one.precision == self.reference.precision), None)
        return reference is not None and not beyond_noise(self.row_s(own), self.row_s(reference))

    def row_s(self, candidate: Candidate) -> list[float]:
        """The seconds of a compared candidate for a row, in each round."""
        one, size = self.comparison[candidate], candidate.micro_batch_size
        return [1 / self.space.score(size, seconds, one.update_s) for seconds in one.pass_s]

    def cannot_win(self, curve: SizeCurve) -> bool:
        """Whether even the upper bounds of a precision are below what another one has shown that is not refused."""
        for rival in self.curves.values():
            if rival is curve or rival.nonfinite or self.refusal(rival) or self.is_noise(rival):
                continue
            gain = 1 + WORTHWHILE_GAIN
            needed = rival.best * (gain if rival is self.reference else 1 / gain if curve is self.reference else 1.0)
            if curve.reach < HOPELESS * needed:
                return True
        return False

    # -- what to measure --------------------------------------------------------------------------

    def wanted(self) -> list[Proposal]:
        """Everything that could be measured at the same time, the most urgent first: two sizes of every precision, the
        reference's first, then the sizes with the highest upper bounds. Last, the comparison."""
        first, later = [], []
        for curve in sorted(self.curves.values(), key=lambda one: (one is not self.reference, -one.reach)):
            broken = sum(size < curve.too_large for size in curve.failed)  # not by memory
            if curve.nonfinite or (broken > 1 and not curve.seconds):
                continue
            begin = [size for size in self._first_sizes(curve) if size not in curve.seconds]
            again = [
                size for size in curve.unsteady
                if size in curve.measured and Candidate(curve.precision, size) not in self.comparison
            ]  # fmt: skip
            if begin or again:
                first += [(curve, size) for size in (*begin, *again)]
            elif not self.cannot_win(curve) and (size := curve.next_size()) is not None:
                later.append((curve, size))
        found: list[Proposal] = []
        for curve, size in first + later:  # memory is read as well, unless there is room for far more
            read = size not in curve.peaks and not curve.roomy and not self.reference.roomy
            found.append(Proposal(Candidate(curve.precision, size), with_memory=read))
        return found or self._comparison()

    def _first_sizes(self, curve: SizeCurve) -> list[int]:
        """The two sizes to begin with; others near them if those fail or do not fit. Until the memory of a precision is
        read, the reference's is used: weights and optimizer are the same."""
        guess = self.reference.fitting if curve.line_without() is None and self.reference.fitting else self.space.sizes
        fitting = [size for size in curve.fitting if size in guess]
        begin = self.space.first_sizes()[0]
        start = [size for size in self.space.first_sizes() if size in fitting]
        spare = [size for size in curve.measured if size not in start]
        spare += [size for size in fitting if size > begin and size not in start]
        spare += [size for size in reversed(fitting) if size < begin]
        return sorted((start + spare)[: min(2, len(fitting))])

    def _comparison(self) -> list[Proposal]:
        """The candidate about to be chosen against the runner-up of its precision, if it is small enough to be measured
        again, and the best of each other precision that could be chosen; and the reading of its peak."""
        if (chosen := self.chosen) is None:
            return []
        curve, size = self.curves[chosen.precision], chosen.micro_batch_size
        unread = self.space.budget_bytes is not None and size not in curve.peaks
        if chosen not in self.comparison and len(self.results.comparisons) < MOST_COMPARISONS:
            others = [other for other in curve.measured if other != size and other <= 2 * size]
            rivals = [Candidate(curve.precision, max(others, key=curve.bound))] if others else []
            for one in self.curves.values():
                if one is not curve and one.chosen is not None and not self.refusal(one):
                    rivals.append(one.chosen)
            if rivals:
                return [Proposal(chosen, ROUNDS, with_memory=unread, against=tuple(rivals))]
        return [Proposal(chosen, passes=0, with_memory=True)] if unread else []


def _corrected(measurements: Sequence[Measurement], comparison: Mapping[Candidate, Measurement]) -> list[Measurement]:
    """The measurements with those of a comparison in place of its candidates' own times from before it; other sizes
    that were timed earlier are scaled by what has changed for the candidates of their precision since."""
    ended = next(iter(comparison.values())).taken_at
    drift: dict[str, list[float]] = {}
    for one in measurements:
        if one.pass_s and one.candidate in comparison:
            ratio = median(comparison[one.candidate].pass_s) / median(one.pass_s)
            drift.setdefault(one.candidate.precision, []).append(ratio)
    found = list(comparison.values())
    for one in measurements:
        earlier = one.taken_at <= ended and one.candidate.precision in drift
        factor = geometric_mean(drift[one.candidate.precision]) if earlier else 1.0
        passes = () if one.candidate in comparison else tuple(factor * seconds for seconds in one.pass_s)
        found.append(replace(one, pass_s=passes))  # without passes its memory still counts
    return found


# -- the answer -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableRow:
    """One candidate, for the table that a user reads; None where it was not timed, or its memory is unknown."""

    precision: str
    micro_batch_size: int
    passes: int
    rows_per_s: float | None  # of one worker, from the median
    low: float | None  # by the slowest pass
    high: float | None
    predicted_peak: int | None  # bytes by the line through the other sizes
    measured_peak: int | None
    note: str = ""  # why it was ruled out


@dataclass(frozen=True)
class BatchDecision:
    candidate: Candidate
    precision: Resolved
    micro_batch_size: Resolved
    table: tuple[TableRow, ...]  # every candidate on which anything was spent
    refusals: dict[str, str]  # precision -> why it was not chosen
    complete: bool  # the search had nothing left to measure

    @property
    def chosen(self) -> TableRow:
        return next(row for row in self.table if Candidate(row.precision, row.micro_batch_size) == self.candidate)


def decide(space: BatchSpace, results: SearchResults) -> BatchDecision:
    """The best candidate by these measurements; also for a search that was interrupted. Raises RunError: nothing that
    was measured can run; says how many bytes are needed and which key allows more."""
    search = CandidateSearch(space, results)
    chosen = search.chosen
    if chosen is None:
        raise _nothing_runs(search)
    refusals = {name: why for name, one in search.curves.items() if name != chosen.precision
                and (why := _why_not(search, one))}  # fmt: skip
    return BatchDecision(
        candidate=chosen,
        precision=Resolved(chosen.precision, _precision_reason(search, chosen, refusals)),
        micro_batch_size=Resolved(chosen.micro_batch_size, _size_reason(search, chosen)),
        table=_table(search),
        refusals=refusals,
        complete=not search.wanted(),
    )


def choose_precision(measured: Sequence[Measurement]) -> Resolved:
    """The precision by the same rules, where all took turns at one size. Raises RunError if none of them runs."""
    able = tuple(one for one in measured if one.outcome == "ok")
    failed = [one for one in measured if one.outcome != "ok"]
    names, size = tuple(one.candidate.precision for one in measured), measured[0].candidate.micro_batch_size
    space = BatchSpace(names, (size,), rows_per_step=None, budget_bytes=None)
    return decide(space, SearchResults(failed, [able])).precision


def _table(search: CandidateSearch) -> tuple[TableRow, ...]:
    space, timed = search.space, list(search.results.measurements)
    timed += [
        one for comparison in search.results.comparisons if all(one.pass_s for one in comparison) for one in comparison
    ]
    passes = Counter(one.candidate for one in timed for _ in one.pass_s)
    rows = []
    for curve in search.curves.values():
        for size in (one for one in space.sizes if one in {*curve.seconds, *curve.peaks, *curve.failed}):
            line = curve.line_without(size) or curve.line_without()
            rates = [space.score(size, one, curve.updates) for one in curve.seconds.get(size, ())]
            rows.append(TableRow(
                precision=curve.precision,
                micro_batch_size=size,
                passes=passes[Candidate(curve.precision, size)],
                rows_per_s=space.score(size, curve.pass_s(size), curve.updates) if rates else None,
                low=min(rates, default=None),
                high=max(rates, default=None),
                predicted_peak=None if line is None else line.predict(size),
                measured_peak=curve.peaks.get(size),
                note="out of memory" if size >= curve.too_large else curve.nonfinite or curve.failed.get(size, ""),
            ))  # fmt: skip
    return tuple(rows)


def _compared(search: CandidateSearch, own: Candidate, other: Candidate) -> str:
    """The speed of one candidate against another, from rounds in turn if both took part."""
    if own in search.comparison and other in search.comparison:
        gains = [b / a for a, b in zip(search.row_s(own), search.row_s(other), strict=True)]
        at = f"{median(gains):.2f} [{min(gains):.2f}, {max(gains):.2f}] times as fast as"
        return f"measured in turn {at} {other.precision} x {other.micro_batch_size}"
    first, second = (search.curves[one.precision].bound(one.micro_batch_size) for one in (own, other))
    return f"measured {first / second:.2f} times as fast as {other.precision}"


def _size_reason(search: CandidateSearch, chosen: Candidate) -> str:
    """Its throughput, the best one, the sizes that it was measured in turn with, and what memory allows."""
    curve, size, budget = search.curves[chosen.precision], chosen.micro_batch_size, search.space.budget_bytes
    best = max(curve.measured, key=curve.bound)
    reason = f"{plain_number(curve.bound(size))} rows/s"
    if size != best:
        reason += f", within {NEAR:.0%} of the best, {plain_number(curve.bound(best))} at {best}"
    if max(curve.fitting) < search.space.sizes[-1] and budget is not None:
        reason += f"; memory allows up to {max(curve.fitting)}"
    if chosen in search.comparison:
        others = [one for one in search.comparison if one.precision == chosen.precision and one != chosen]
        reason = "; ".join([reason, *(_compared(search, chosen, one) for one in others)])
    if budget is not None and size in curve.peaks:
        reason += f"; its peak is {curve.peaks[size] / budget:.1%} of what a process may take"
    return reason


def _why_not(search: CandidateSearch, curve: SizeCurve) -> str:
    own, reference = curve.chosen, search.reference.chosen
    if own is None:
        failed = curve.nonfinite or next((why for size, why in curve.failed.items() if size < curve.too_large), "")
        return f"refused: {failed}" if failed else "no size of it was measured, or none fits"
    if curve is search.reference or reference is None:
        return ""
    text = _compared(search, own, reference)
    if curve.rate / search.reference.rate > 1 + WORTHWHILE_GAIN and search.is_noise(curve):
        text += f"; too noisy to tell them apart, so that {reference.precision} stays: search again on an idle machine"
    refusal = search.refusal(curve)
    return f"{text}, but refused: {refusal}" if refusal else text


def _precision_reason(search: CandidateSearch, chosen: Candidate, refusals: Mapping[str, str]) -> str:
    """What the chosen precision gains over the reference, and why others were not chosen."""
    reasons, reference = [f"{name} {why}" for name, why in refusals.items()], search.reference.chosen
    if chosen == reference:
        return "; ".join(reasons) or f"nothing but {chosen.precision} to compare"
    if reference is None:
        return "; ".join([*reasons, f"so that {chosen.precision} could not be compared with it: watch its loss"])
    whose = "each at its own best size"
    if search.cannot_win(search.reference) and {*search.reference.fitting} - {*search.reference.measured}:
        bound = search.curves[chosen.precision].best / search.reference.reach
        whose = f"at least {bound:.2f} times as fast as {reference.precision} can be at any size"
    return "; ".join([f"{_compared(search, chosen, reference)}, {whose}, loss and gradient norm agree", *reasons])


def _nothing_runs(search: CandidateSearch) -> RunError:
    """What failed, how many bytes it needed, and the key to change."""
    failed, too_large = [], False
    for name, curve in search.curves.items():
        if curve.nonfinite or curve.failed:
            size = min(curve.failed, default=0)
            rows = f"{size} row{'s' if size > 1 else ''}: "
            failed.append(f"{name}: {curve.nonfinite or rows + curve.failed[size]}")
            too_large = too_large or size >= curve.too_large
    why, budget = "; ".join(failed), search.space.budget_bytes
    if not failed:
        return RunError("nothing has been measured yet")
    if too_large and budget is not None:
        return RunError(
            f"no micro-batch fits into {size_text(budget)} ({why}): raise cluster.memory_limit or"
            " cluster.memory_fraction, or take a smaller model"
        )
    return RunError(f"no candidate of precision.dtype and loop.micro_batch_size can run: {why}")
