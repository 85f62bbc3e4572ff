"""The search over batch size and precision. Pure: measurements in, the next proposals or the decision out.

For each precision two small sizes give a line of time and one of memory. Passes get longer with each further row,
nearly a line that bends upwards where caches end, so that lines through measured sizes bound the others. Measured next
is the smallest size that may be within `NEAR` of the best that memory allows, until that size is a measured one. A
lower precision must beat the reference by `WORTHWHILE_GAIN`, each at its own best size, and pass the numeric gate.
Each size is timed at one moment, at which the machine may have been slow: at the end the winner and its rivals take
turns in one process (a contest), and those ratios decide.

A caller measures what `next_proposals` returns until it returns nothing, then calls `decide`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from statistics import geometric_mean, median
from typing import Any

from raytrain.autotune.measurement import Candidate, Measurement, MemoryLine, line_of, step_seconds
from raytrain.autotune.precision import WORTHWHILE_GAIN, GateReport, gate_refusal, told_apart
from raytrain.errors import InputError, RunError
from raytrain.plan.choice import Resolved, figure_text, size_text

#: A smaller size is chosen if it loses no more than this fraction of the best throughput.
NEAR = 0.03
#: Relative standard deviation of a pass that is assumed at least.
LEAST_NOISE = 0.002
#: A larger size is worth measuring if it may be faster than the best measured one by more than this.
WORTH_A_LOOK = 0.04
#: Passes of one timed measurement after the dropped warm-up: two, and a third if those differ.
LEAST_PASSES, PASSES = 2, 3
#: Timed rounds of a contest, after one round that is dropped; and contests of a search at most.
ROUNDS, MOST_CONTESTS = 3, 2
#: Sizes of a precision that are measured at most.
MOST_SIZES = 6
#: The second size is up to this multiple of the first.
FIRST_RATIO = 8
#: A line through two sizes is drawn where one is at least this multiple of the other: neighbours differ by noise.
APART = 4
#: A line is trusted up to this multiple of the largest measured size; further if passes have hardly become longer.
GROWTH, GROWTH_WHERE_FLAT, FLAT = 8, 32, 1.25
#: A precision whose upper bound is below this fraction of what it has to reach is dropped.
HOPELESS = 0.95
#: Rows of a step of the gate, at most: rounding shows with few, and its steps are most of the cost of a search.
GATE_ROWS = 4

Contest = tuple[Measurement, ...]
"""Measurements of several candidates, the leader first; pass i of all of them is from round i."""


@dataclass(frozen=True)
class BatchSpace:
    """What may be tried, and how it is judged.

    Attributes:
        precisions: values of `precision.dtype`, the reference among them unless the job names one.
        sizes: micro-batch sizes, ascending.
        rows_per_step: rows of one worker's step where the global batch is given (accumulation makes up the rest); None
            where the batch is free, and each step is one micro-batch.
        budget_bytes: what one process may allocate; None: memory is not read.
        reference: the precision that others must beat.
        devices: measurements that may run at a time.
        workers: of the run; with the size they make the global batch where it is free.
        gate_steps: real steps over which a lower precision is compared with the reference before it is chosen; 0: none.
    """

    precisions: tuple[str, ...]
    sizes: tuple[int, ...]
    rows_per_step: int | None
    budget_bytes: int | None
    reference: str = "fp32"
    devices: int = 1
    workers: int = 1
    gate_steps: int = 20

    def __post_init__(self) -> None:
        if not self.precisions:
            raise InputError("precision.dtype", got="no candidate", expected="at least one precision to measure")
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or min(self.sizes) < 1:
            raise InputError("tune.space", got=f"micro-batch sizes {list(self.sizes)}", expected="ascending, from 1")

    @property
    def lead(self) -> str:
        """The precision that the others are compared with: the reference, else the first."""
        return self.reference if self.reference in self.precisions else self.precisions[0]

    def first_sizes(self) -> tuple[int, ...]:
        """The two small sizes to begin with: 2 rows where there is a choice (a batch norm refuses a single one), and up
        to eight times that."""
        smallest = min(self.sizes)
        begin = self.sizes[1] if len(self.sizes) > 3 and smallest == 1 else smallest
        later = [size for size in self.sizes if size > begin]
        within = [size for size in later if size <= FIRST_RATIO * begin]
        return (begin, within[-1] if within else later[0]) if later else (begin,)

    def score(self, size: int, pass_s: float, updates: Sequence[float]) -> float:
        """Rows per second of one worker."""
        rows = self.rows_per_step or size
        return rows / step_seconds(rows, size, pass_s, updates)


def sizes_dividing(global_batch: int, workers: int) -> tuple[int, ...]:
    """Micro-batch sizes that divide a given global batch evenly: micro x accumulation x workers = global.

    If the number of workers does not divide it, the sizes that divide the batch, up to one worker's share.
    """
    share = math.ceil(global_batch / workers)
    whole = global_batch // workers if global_batch % workers == 0 else global_batch
    return tuple(size for size in range(1, share + 1) if whole % size == 0)


def sizes_free(rows: int, workers: int) -> tuple[int, ...]:
    """Powers of two up to each worker's share of the training rows, for a batch that is free."""
    most = max(1, rows // workers)
    return tuple(2**power for power in range(most.bit_length()) if 2**power <= most)


@dataclass(frozen=True)
class Proposal:
    """One measurement that the search proposes.

    Attributes:
        candidate: what to measure.
        passes: timed passes at most, after a warm-up that is dropped; 0: memory alone.
        with_memory: also read the peak.
        gate_steps: if not 0, run the numeric gate (`raytrain.autotune.comparisons.run_gate`) of this candidate against
            the reference instead, over this many steps.
        against: rivals, measured with this one in `passes` alternating rounds, after this one's peak if it is to be
            read.
    """

    candidate: Candidate
    passes: int = PASSES
    with_memory: bool = False
    gate_steps: int = 0
    against: tuple[Candidate, ...] = ()

    @property
    def kind(self) -> tuple[Candidate, bool, bool, bool]:
        """What it measures, without its number of passes."""
        return self.candidate, self.passes > 0, self.gate_steps > 0, bool(self.against)


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
    complete: bool
    contest: dict[str, Any] | None = None
    untold: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)


def next_proposals(
    space: BatchSpace, measurements: Iterable[Measurement], running: Sequence[Proposal] = (),
    gates: Iterable[GateReport] = (), contests: Sequence[Contest] = (),
) -> list[Proposal]:  # fmt: skip
    """What to measure now, at most one proposal for each idle device; nothing while results are awaited, or at the end.

    Args:
        measurements: all results so far. A measurement that crashed is one with the outcome "error".
        running: proposals without a result so far.
        gates: results of the proposals with `gate_steps`.
        contests: results of the proposals with `against`, the latest last.
    """
    in_progress = {one.kind for one in running}
    wanted = [one for one in _Search(space, measurements, gates, contests).wanted() if one.kind not in in_progress]
    return wanted[: max(0, space.devices - len(running))]


def decide(
    space: BatchSpace, measurements: Iterable[Measurement], gates: Iterable[GateReport] = (),
    contests: Sequence[Contest] = (),
) -> BatchDecision:  # fmt: skip
    """The best candidate by these measurements; also for a search that was interrupted.

    Raises:
        RunError: nothing that was measured can run; says how many bytes are needed and which key allows more.
    """
    return _Search(space, measurements, gates, contests).decision()


class SizeCurve:
    """The measurements of one precision, by size, and bounds for the sizes between and beyond them.

    Attributes:
        seconds: of each pass, by size.
        peaks: bytes, by size, where they were read.
        too_large: the smallest size that did not fit; infinite if all did.
        broken: sizes at which a pass failed for another reason, which it gives.
        nonfinite: why the precision cannot be used here, or "".
        unsteady: sizes timed once, while the machine did other work: to be timed once more. The unsteady measurement
            is left out once there is a steady one.
    """

    def __init__(self, space: BatchSpace, precision: str, measurements: Iterable[Measurement]) -> None:
        self.space, self.precision = space, precision
        self.seconds: dict[int, tuple[float, ...]] = {}
        self.peaks: dict[int, int] = {}
        self.broken: dict[int, str] = {}
        self.too_large, self.nonfinite = math.inf, ""
        self.read: list[Measurement] = []
        self.updates: list[float] = []
        timed: dict[int, list[Measurement]] = {}
        for one in measurements:
            if one.candidate.precision != precision:
                continue
            size, peak = one.candidate.micro_batch_size, one.peak_bytes
            if peak is not None:
                self.peaks[size] = max(peak, self.peaks.get(size, 0))
                self.read.append(one)
            over = peak is not None and space.budget_bytes is not None and peak > space.budget_bytes
            if one.outcome == "out_of_memory" or over:
                self.too_large = min(size, self.too_large)
            elif one.outcome == "error":
                self.broken[size] = one.reason or "it failed"
            elif one.outcome == "nonfinite":
                self.nonfinite = one.reason or "its loss or gradient is not finite"
            elif one.pass_s:
                timed.setdefault(size, []).append(one)
                self.updates += one.update_s
        for size, several in timed.items():
            counted = [one for one in several if one.is_steady] or several
            self.seconds[size] = tuple(second for one in counted for second in one.pass_s)
        self.unsteady = [size for size, several in timed.items() if len(several) == 1 and not several[0].is_steady]

    # -- memory -----------------------------------------------------------------------------------

    def line_without(self, size: int | None = None) -> MemoryLine | None:
        """The line of memory without this size's own peak, as a prediction for it; None before two sizes were read."""
        known = [one for one in self.read if one.candidate.micro_batch_size != size]
        return line_of(known) if len({one.candidate.micro_batch_size for one in known}) > 1 else None

    @cached_property
    def fitting(self) -> tuple[int, ...]:
        """Sizes that have not failed and that, as far as is known, memory allows."""
        line, budget = self.line_without(), self.space.budget_bytes
        return tuple(
            size for size in self.space.sizes
            if size not in self.broken and size < self.too_large
            and (size in self.peaks or line is None or budget is None or line.predict(size) <= budget)
        )  # fmt: skip

    @property
    def roomy(self) -> bool:
        """Whether the largest size would fit even if each row took twice as much as the peaks so far show."""
        budget = self.space.budget_bytes
        return budget is None or (bool(self.read) and line_of(self.read).predict(2 * self.space.sizes[-1]) <= budget)

    # -- time -------------------------------------------------------------------------------------

    @cached_property
    def measured(self) -> tuple[int, ...]:
        """Sizes with times that still fit, ascending."""
        return tuple(sorted(size for size in self.seconds if size in self.fitting))

    @property
    def sizes_tried(self) -> int:
        """Number of sizes that were measured in some way."""
        large = [] if self.too_large == math.inf else [self.too_large]
        return len({*self.seconds, *self.peaks, *self.broken, *large})

    def pass_s(self, size: int) -> float:
        """Median seconds of a pass at a measured size."""
        return median(self.seconds[size])

    def bound(self, size: int) -> float:
        """Rows per second at a measured size; the most that they can be at another one."""
        known = self.measured
        if size in known:
            return self.space.score(size, self.pass_s(size), self.updates)
        below = [other for other in known if other < size]
        above = [other for other in known if other > size]
        lines = [self._drawn(pair, size) for pair in (_apart(below), _apart(above[::-1])) if pair is not None]
        if not below:  # fewer rows take less time, but never give more rows per second
            lines.append(self.pass_s(above[0]) * size / above[0])
        elif not above:
            lines.append(self.pass_s(below[-1]))
        else:  # a curve that bends upwards lies below its chord
            chord = self._drawn((below[-1], above[0]), size)
            lines = [min(max(lines), chord) if lines else (self.pass_s(below[-1]) + chord) / 2]
        return self.space.score(size, max(lines), self.updates)

    def _drawn(self, pair: tuple[int, int], size: int) -> float:
        """Seconds at `size` on the line through two measured sizes."""
        first, second = self.pass_s(pair[0]), self.pass_s(pair[1])
        return first + (second - first) * (size - pair[0]) / (pair[1] - pair[0])

    @property
    def best(self) -> float:
        """The most rows per second that were measured; 0 without a measurement."""
        return max(map(self.bound, self.measured), default=0.0)

    @cached_property
    def reach(self) -> float:
        """The upper bound over all sizes that fit; 0 without a measurement."""
        return max(map(self.bound, self.fitting)) if self.measured else 0.0

    @property
    def to_reach(self) -> float:
        """What counts as the best: the measured one, or a little more if the bounds allow it."""
        return max(self.best, min(self.reach, (1 + WORTH_A_LOOK) * self.best))

    @cached_property
    def _noise(self) -> float:
        """Relative standard deviation of a pass, from how far passes are from the median of their size. With few of
        them the median is one itself, which leaves n - 1."""
        gaps: list[float] = []
        for passes in self.seconds.values():
            middle = median(passes)
            gaps += sorted(abs(one / middle - 1) for one in passes)[len(passes) % 2 :]
        return max(LEAST_NOISE, 1.4826 * median(gaps)) if gaps else LEAST_NOISE

    def _doubt(self, size: int, other: int) -> float:
        """Relative standard error of the ratio of two measured rates; that of a median is 1.25 times that of a mean."""
        return 1.25 * self._noise * (1 / len(self.seconds[size]) + 1 / len(self.seconds[other])) ** 0.5

    def chosen(self) -> int | None:
        """The smallest measured size within `NEAR` of the best, by more than noise explains; None if the precision
        cannot be used."""
        if self.nonfinite or not self.measured:
            return None
        top, enough = max(self.measured, key=self.bound), (1 - NEAR) * self.to_reach
        near = [size for size in self.measured if self.bound(size) >= enough * (1 + self._doubt(size, top))]
        return min(near, default=top)

    def next_size(self) -> int | None:
        """The unmeasured size that could change the choice; None if none could."""
        known, chosen = list(self.measured), self.chosen()
        if chosen is None or self.sizes_tried >= MOST_SIZES:
            return None
        bounds = {size: self.bound(size) for size in self.fitting if size not in self.seconds}
        faster = [size for size, bound in bounds.items() if bound > (1 + WORTH_A_LOOK) * self.best]
        larger = [size for size in faster if size > known[-1]]
        if larger:
            enough = (1 - NEAR) * max(bounds[size] for size in larger)
            knee = min(size for size in bounds if size > known[-1] and bounds[size] >= enough)
            flat = len(known) > 1 and self.pass_s(known[-1]) < FLAT * self.pass_s(known[0])
            limit = max(larger[0], known[-1] * (GROWTH_WHERE_FLAT if flat else GROWTH))
            return max(size for size in bounds if known[-1] < size <= min(knee, limit))
        if faster:
            return max(faster, key=lambda size: bounds[size])
        near = (1 - NEAR) * self.to_reach
        smaller = [size for size, bound in bounds.items() if size < chosen and bound >= near]
        return smaller[len(smaller) // 2] if smaller else None


def _apart(sizes: Sequence[int]) -> tuple[int, int] | None:
    """The last size and one before it, if possible at least `APART` times away; None without two sizes."""
    if len(sizes) < 2:
        return None
    last = sizes[-1]
    far = [size for size in sizes[:-1] if max(size, last) >= APART * min(size, last)]
    return (far[-1] if far else sizes[0], last)


def _at_the_contest(contest: Sequence[Measurement], measurements: Iterable[Measurement]) -> list[Measurement]:
    """Measurements as they would have been at the time of a contest.

    A contender's passes are the leader's median, times the ratio to it in each round; its own from before do not count.
    Other sizes of its precision that were timed earlier are scaled by what has changed for the contenders since.
    """
    first = contest[0]
    middle = median(first.pass_s)
    held = {
        one.candidate: replace(one, pass_s=tuple(middle * a / b for a, b in zip(one.pass_s, first.pass_s, strict=True)))
        for one in contest
    }
    drift: dict[str, list[float]] = {}
    for one in measurements:
        if one.pass_s and one.candidate in held:
            ratio = median(held[one.candidate].pass_s) / median(one.pass_s)
            drift.setdefault(one.candidate.precision, []).append(ratio)
    found = []
    for one in measurements:
        earlier = one.taken_at <= first.taken_at and one.candidate.precision in drift
        factor = geometric_mean(drift[one.candidate.precision]) if earlier else 1.0
        passes = () if one.candidate in held else tuple(factor * seconds for seconds in one.pass_s)
        found.append(replace(one, pass_s=passes))
    return [*found, *held.values()]


class _Search:
    """All that was measured, compared."""

    def __init__(
        self, space: BatchSpace, measurements: Iterable[Measurement], gates: Iterable[GateReport],
        contests: Sequence[Contest],
    ) -> None:  # fmt: skip
        self.space, known = space, list(measurements)
        self.contest: dict[Candidate, Measurement] = {}
        self.contests = len(contests)
        self.passes = Counter(one.candidate for one in known for _ in one.pass_s)
        for contest in contests:
            if all(one.outcome == "ok" and one.pass_s for one in contest):
                self.contest = {one.candidate: one for one in contest}
                self.passes.update(one.candidate for one in contest for _ in one.pass_s)
            else:  # a contender that failed is out
                known += [one for one in contest if one.outcome != "ok"]
        if self.contest:
            known = _at_the_contest(list(self.contest.values()), known)
        self.curves = {name: SizeCurve(space, name, known) for name in space.precisions}
        self.lead = self.curves[space.lead]
        self.gates = {gate.precision: gate_refusal(gate) for gate in gates}

    # -- what was measured ------------------------------------------------------------------------

    def row_s(self, candidate: Candidate) -> list[float]:
        """A contender's seconds for a row, in each round."""
        one, size = self.contest[candidate], candidate.micro_batch_size
        return [1 / self.space.score(size, seconds, one.update_s) for seconds in one.pass_s]

    def gains(self, candidate: Candidate, other: Candidate) -> list[float]:
        """How many times as fast as another contender, in each round."""
        return [b / a for a, b in zip(self.row_s(candidate), self.row_s(other), strict=True)]

    def choice(self, curve: SizeCurve) -> Candidate | None:
        """The best size of a precision."""
        size = curve.chosen()
        return None if size is None else Candidate(curve.precision, size)

    def gain(self, curve: SizeCurve) -> float:
        """Rows per second at a precision's best size over those of the reference at its own."""
        own, lead = self.choice(curve), self.choice(self.lead)
        assert own is not None and lead is not None, "both are measured"
        return curve.bound(own.micro_batch_size) / self.lead.bound(lead.micro_batch_size)

    def in_turn(self, curve: SizeCurve) -> tuple[list[float], list[float]] | None:
        """Seconds of a precision and of the reference in each round of the contest; None if they did not meet."""
        own, lead = self.choice(curve), self.choice(self.lead)
        if own is None or own not in self.contest:
            return None
        if lead not in self.contest:  # another size of it
            lead = next((one for one in self.contest if one.precision == self.lead.precision), None)
        return None if lead is None else (self.row_s(own), self.row_s(lead))

    def is_untold(self, curve: SizeCurve) -> bool:
        """Whether rounds in turn did not show that a precision with the better median is faster than the reference."""
        rounds = self.in_turn(curve)
        return curve is not self.lead and rounds is not None and not told_apart(*rounds)

    def winners(self) -> list[SizeCurve]:
        """Precisions that beat the reference on time, the fastest first."""
        others = [one for one in self.curves.values() if one is not self.lead and self.choice(one) is not None]
        if self.choice(self.lead) is None:
            return sorted(others, key=lambda curve: curve.best, reverse=True)
        faster = [one for one in others if self.gain(one) > 1 + WORTHWHILE_GAIN and not self.is_untold(one)]
        return sorted(faster, key=self.gain, reverse=True)

    def winner(self) -> SizeCurve | None:
        """The fastest that also passes its gate, else the reference; None if nothing runs."""
        alone = self.choice(self.lead) is None
        for curve in self.winners():
            if alone or not self.space.gate_steps or self.gates.get(curve.precision) == "":
                return curve
        return None if alone else self.lead

    def cannot_win(self, curve: SizeCurve) -> bool:
        """Whether even the upper bounds of a precision are below what another one has shown that no gate refused."""
        for rival in self.curves.values():
            if rival is curve or rival.nonfinite or self.gates.get(rival.precision) or self.is_untold(rival):
                continue
            gain = 1 + WORTHWHILE_GAIN
            needed = rival.best * (gain if rival is self.lead else 1 / gain if curve is self.lead else 1.0)
            if curve.reach < HOPELESS * needed:
                return True
        return False

    # -- what to measure --------------------------------------------------------------------------

    def wanted(self) -> list[Proposal]:
        """Everything that could be measured at the same time, the most urgent first: two sizes of every precision, the
        reference's first, then the sizes with the highest upper bounds; after them the gate, and a contest."""
        first, later = [], []
        for curve in sorted(self.curves.values(), key=lambda one: (one is not self.lead, -one.reach)):
            if curve.nonfinite or (len(curve.broken) > 1 and not curve.seconds):
                continue
            begin = [size for size in self._first(curve) if size not in curve.seconds]
            again = [
                size for size in curve.unsteady
                if size in curve.measured and Candidate(curve.precision, size) not in self.contest
            ]  # fmt: skip
            if begin or again:
                first += [self._timed(curve, size) for size in (*begin, *again)]
            elif not self.cannot_win(curve) and (size := curve.next_size()) is not None:
                later.append(self._timed(curve, size))
        return first + later or self._gate() or self._last()

    def _first(self, curve: SizeCurve) -> list[int]:
        """The two sizes to begin with; others near them if those fail or do not fit. Until the memory of a precision is
        read, the reference's is used: weights and optimizer are the same."""
        guess = self.lead.fitting if curve.line_without() is None and self.lead.fitting else self.space.sizes
        fitting = [size for size in curve.fitting if size in guess]
        begin = self.space.first_sizes()[0]
        start = [size for size in self.space.first_sizes() if size in fitting]
        spare = [size for size in curve.measured if size not in start]
        spare += [size for size in fitting if size > begin and size not in start]
        spare += [size for size in reversed(fitting) if size < begin]
        return sorted((start + spare)[: min(2, len(fitting))])

    def _timed(self, curve: SizeCurve, size: int) -> Proposal:
        """Memory is read as well, unless there is room for far more."""
        read = size not in curve.peaks and not curve.roomy and not self.lead.roomy
        return Proposal(Candidate(curve.precision, size), with_memory=read)

    def _gate(self) -> list[Proposal]:
        if not self.space.gate_steps or self.choice(self.lead) is None:
            return []
        for curve in self.winners():
            if curve.precision not in self.gates:
                both = [size for size in curve.fitting if size in self.lead.fitting]
                size = max((one for one in both if one <= GATE_ROWS), default=self.lead.measured[0])
                return [Proposal(Candidate(curve.precision, size), passes=0, gate_steps=self.space.gate_steps)]
            if not self.gates[curve.precision]:
                return []
        return []

    def _last(self) -> list[Proposal]:
        """The contest of the candidate about to be chosen, and the reading of its peak."""
        curve = self.winner()
        chosen = None if curve is None else self.choice(curve)
        if curve is None or chosen is None:
            return []
        unread = self.space.budget_bytes is not None and chosen.micro_batch_size not in curve.peaks
        rivals = () if chosen in self.contest or self.contests >= MOST_CONTESTS else self._rivals(curve, chosen)
        if rivals:
            return [Proposal(chosen, ROUNDS, with_memory=unread, against=rivals)]
        return [Proposal(chosen, passes=0, with_memory=True)] if unread else []

    def _rivals(self, curve: SizeCurve, chosen: Candidate) -> tuple[Candidate, ...]:
        """The runner-up of the same precision, if it is small enough to be measured again, and the best of each other
        precision that could be chosen."""
        size = chosen.micro_batch_size
        others = [other for other in curve.measured if other != size and other <= 2 * size]
        second = [Candidate(curve.precision, max(others, key=curve.bound))] if others else []
        rivals = [one for one in self.curves.values() if one is not curve and not self.gates.get(one.precision)]
        return (*second, *(best for best in map(self.choice, rivals) if best is not None))

    # -- the decision -----------------------------------------------------------------------------

    def decision(self) -> BatchDecision:
        """See `decide`."""
        curve = self.winner()
        chosen = None if curve is None else self.choice(curve)
        if curve is None or chosen is None:
            raise self._nothing_fits()
        size, peak, budget = chosen.micro_batch_size, curve.peaks.get(chosen.micro_batch_size), self.space.budget_bytes
        line = curve.line_without(size) or self.lead.line_without()
        if line is None:
            known = [one for one in (*curve.read, *self.lead.read) if one.candidate != chosen]
            line = line_of(known) if known else None
        share = [f"its peak is {peak / budget:.1%} of what a process may take"] if peak and budget else []
        best = {name: self.choice(one) for name, one in self.curves.items()}
        refusals = {name: why for name, one in self.curves.items() if one is not curve and (why := self._why_not(one))}
        return BatchDecision(
            candidate=chosen,
            precision=Resolved(curve.precision, self._precision_reason(curve, refusals)),
            micro_batch_size=Resolved(size, "; ".join([self._size_reason(curve, chosen), *share])),
            rows_per_s=curve.bound(size),
            predicted_peak=None if line is None else line.predict(size),
            measured_peak=peak,
            table=tuple(row for one in self.curves.values() for row in self._rows(one)),
            refusals=refusals,
            knees={name: one.micro_batch_size for name, one in best.items() if one is not None},
            complete=not self.wanted(),
            contest={
                "contenders": [asdict(one) for one in self.contest],
                "pass_s": [one.pass_s for one in self.contest.values()],
            } if self.contest else None,
            untold=tuple(name for name, one in self.curves.items() if self._may_be_faster(one)),
        )  # fmt: skip

    def _may_be_faster(self, curve: SizeCurve) -> bool:
        """Whether neither a precision nor the reference won their rounds."""
        rounds = self.in_turn(curve)
        if curve is self.lead or rounds is None or self.gates.get(curve.precision):
            return False
        return not told_apart(*rounds) and not told_apart(*rounds[::-1])

    def _rows(self, curve: SizeCurve) -> Iterable[TableRow]:
        for size in self.space.sizes:
            if not (size in curve.seconds or size in curve.peaks or size in curve.broken or size == curve.too_large):
                continue
            line, passes = curve.line_without(size) or curve.line_without(), curve.seconds.get(size)
            speed = low = high = None
            if passes:
                entry = self.contest.get(Candidate(curve.precision, size))
                own = passes if entry is None else entry.pass_s
                speed = self.space.score(size, median(passes), curve.updates)
                low = min(speed, self.space.score(size, max(own), curve.updates))
                high = max(speed, self.space.score(size, min(own), curve.updates))
            note = curve.nonfinite or curve.broken.get(size, "")
            yield TableRow(
                precision=curve.precision,
                micro_batch_size=size,
                passes=self.passes[Candidate(curve.precision, size)],
                rows_per_s=speed,
                low=low,
                high=high,
                predicted_peak=None if line is None else line.predict(size),
                measured_peak=curve.peaks.get(size),
                note="out of memory" if size >= curve.too_large else note,
            )

    def _compared(self, own: Candidate, other: Candidate) -> str:
        """The speed of one candidate against another, from rounds in turn if both took part."""
        if own in self.contest and other in self.contest:
            gains = self.gains(own, other)
            at = f"{median(gains):.2f} [{min(gains):.2f}, {max(gains):.2f}] times as fast as"
            return f"measured in turn {at} {other.precision} x {other.micro_batch_size}"
        first, second = (self.curves[one.precision].bound(one.micro_batch_size) for one in (own, other))
        return f"measured {first / second:.2f} times as fast as {other.precision}"

    def _size_reason(self, curve: SizeCurve, chosen: Candidate) -> str:
        """Its throughput, the best one, what memory allows, and the sizes that it was measured in turn with."""
        scores = {size: curve.bound(size) for size in curve.measured}
        best, size = max(scores, key=lambda one: scores[one]), chosen.micro_batch_size
        reason = f"{figure_text(scores[size])} rows/s"
        if size != best:
            reason += f", within {NEAR:.0%} of the best, {figure_text(scores[best])} at {best}"
        if max(curve.fitting) < self.space.sizes[-1] and self.space.budget_bytes is not None:
            reason += f"; memory allows up to {max(curve.fitting)}"
        if chosen in self.contest:
            others = [one for one in self.contest if one.precision == curve.precision and one != chosen]
            reason = "; ".join([reason, *(self._compared(chosen, one) for one in others)])
        return reason

    def _why_not(self, curve: SizeCurve) -> str:
        """Why a precision other than the chosen one was not chosen."""
        own, lead = self.choice(curve), self.choice(self.lead)
        if curve.nonfinite:
            return f"refused: {curve.nonfinite}"
        if own is None:
            failed = next(iter(curve.broken.values()), "")
            return f"refused: {failed}" if failed else "no size of it was measured, or none fits"
        if curve is self.lead or lead is None:
            return ""
        text = self._compared(own, lead)
        rounds = self.in_turn(curve)
        if rounds is not None and self.gain(curve) > 1 + WORTHWHILE_GAIN and self.is_untold(curve):
            lost = any(a >= b for a, b in zip(*rounds, strict=True))
            text += ", not in every round" if lost else "; too noisy to tell them apart"
        if refusal := self.gates.get(curve.precision):
            return f"{text}, but refused: {refusal}"
        few = len(curve.seconds) <= 2 and self.cannot_win(curve)
        return text + (" and dropped after its first two sizes" if few else "")

    def _precision_reason(self, curve: SizeCurve, refusals: Mapping[str, str]) -> str:
        reasons = [f"{name} {why}" for name, why in refusals.items()]
        own, lead = self.choice(curve), self.choice(self.lead)
        if curve is self.lead or own is None:
            return "; ".join(reasons) or f"nothing but {curve.precision} to compare"
        if lead is None:
            return "; ".join([*reasons, f"so that {curve.precision} could not be compared with it: watch its loss"])
        gain = f"{self._compared(own, lead)}, "
        if self.cannot_win(self.lead):  # so that not all of its sizes were measured
            bound = curve.best / self.lead.reach
            gain += f"at least {bound:.2f} times as fast as {self.lead.precision} can be at any size"
        else:
            gain += "each at its own best size"
        checked = ", loss and gradient norm agree" if curve.precision in self.gates else ""
        return "; ".join([gain + checked, *reasons])

    def _nothing_fits(self) -> RunError:
        """What failed, how many bytes it needed, and the key to change."""
        failed = []
        for name, curve in self.curves.items():
            if curve.nonfinite:
                failed.append(f"{name}: {curve.nonfinite}")
            elif curve.too_large < math.inf:
                peak = curve.peaks.get(int(curve.too_large))
                took = "is out of memory" if peak is None else f"takes {size_text(peak)}"
                failed.append(f"{name}: {curve.too_large} row{'s' if curve.too_large > 1 else ''} {took}")
            elif curve.broken:
                failed.append("{}: at {} rows {}".format(name, *next(iter(curve.broken.items()))))
        budget = self.space.budget_bytes
        if budget is not None and any(curve.too_large < math.inf for curve in self.curves.values()):
            floors = [one.floor_bytes for curve in self.curves.values() for one in curve.read if one.floor_bytes]
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

    A precision other than the reference is considered if some kind chose it and no kind's gate refused it.

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
    chosen_anywhere = {one.candidate.precision for one in decisions.values()} - {*refused}
    everywhere = set.intersection(*(set(one.knees) for one in decisions.values()))
    allowed = sorted(everywhere & {reference, *chosen_anywhere})
    if not allowed:
        kinds_text = "; ".join(f"{kind}: {', '.join(one.knees)}" for kind, one in decisions.items())
        raise RunError(f"no precision runs on every kind of device ({kinds_text}): scale.accelerator picks one kind")
    totals = dict.fromkeys(allowed, 0.0)
    for kind, one in decisions.items():
        speeds = {(row.precision, row.micro_batch_size): row.rows_per_s or 0.0 for row in one.table}
        for name in allowed:
            totals[name] += workers[kind] * speeds[name, one.knees[name]]
    precision = max(allowed, key=lambda name: (totals[name], name == reference))
    sizes = {kind: one.knees[precision] for kind, one in decisions.items()}
    binding = min(sizes, key=lambda kind: sizes[kind])
    ranked = sorted(totals.items(), key=lambda one: -one[1])
    together = ", ".join(f"{name} {figure_text(total)} rows/s" for name, total in ranked)
    best = ", ".join(f"{kind} {size}" for kind, size in sizes.items())
    return KindsDecision(
        decisions, Candidate(precision, sizes[binding]), binding,
        Resolved(precision, f"of all {sum(workers.values())} workers together: {together}"),
        Resolved(sizes[binding], f"fits every kind (best of each: {best}); scale.shares gives the faster ones more"),
        totals[precision],
    )  # fmt: skip
