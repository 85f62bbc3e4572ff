"""Throughput of one precision by micro-batch size: measured and bounded, what memory allows, and the smallest size near
the best (the knee). Pure, without torch.

A pass takes longer with each further row: nearly a line, bent upwards where the caches end. A line through two
neighbouring points, extrapolated, is therefore a bound on the sizes beyond them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from raytrain.autotune.search.head_to_head import HeadToHead
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.memory_line import MemoryLine, fit, line_of, points
from raytrain.autotune.search.space import MEMORY_PASSES, BatchSpace, nearest_at_most
from raytrain.plan.text import figure_text

#: Least relative standard deviation of one pass that is assumed.
LEAST_NOISE = 0.002
#: The line through two sizes may be extrapolated if one is at least this multiple of the other.
APART = 4
#: A line is trusted up to this multiple of the largest measured size; further if passes have hardly become longer.
GROWTH, GROWTH_WHERE_FLAT, FLAT = 8, 32, 1.25
#: A smaller size is chosen if it loses no more than this fraction of the best throughput.
NEAR = 0.03
#: A size that cannot beat the best measured by more than this is not worth measuring.
WORTH_A_LOOK = 0.04
#: A size of at least this multiple of the chosen one is expensive to measure again, and no better than its bounds.
AS_LARGE = 2
#: Standard errors by which a smaller size must be closer to the best.
CAUTION = 1.0


class ThroughputCurve:
    """The measurements of one precision, by size.

    Attributes:
        seconds: of each pass, by size.
        peaks: bytes, by size, where they were read.
        too_large: the smallest size that did not fit; None if all did.
        broken: sizes at which a pass failed for another reason, which it gives.
        nonfinite: why the precision cannot be used here, or "".
        unsteady: sizes timed once, while the machine did other work: to be timed once more. The unsteady measurement
            is left out once there is a steady one.
        noisy: whether even the times that count vary, since the machine did other work.
        steps: passes spent, warm-ups, memory readings and contests included; without what was left out as unsteady.
    """

    def __init__(
        self,
        space: BatchSpace,
        precision: str,
        measurements: Iterable[Measurement],
        contests: Sequence[HeadToHead] = (),
    ) -> None:
        self.space, self.precision = space, precision
        self.contest = contests[-1] if contests else None
        self.seconds: dict[int, tuple[float, ...]] = {}
        self.peaks: dict[int, int] = {}
        self.floors: list[int] = []
        self.broken: dict[int, str] = {}
        self.too_large: int | None = None
        self.nonfinite = ""
        self.steps = 0
        self.noisy = False
        self._timed: dict[int, list[Measurement]] = {}
        self._ended: dict[int, float] = {}
        self._updates: list[float] = []
        self._read: list[Measurement] = []
        for one in measurements:
            if one.candidate.precision == precision:
                self._take(one)
        for size, timed in self._timed.items():
            counted = [one for one in timed if one.is_steady] or timed
            self.noisy |= any(not one.is_steady for one in counted)
            self.steps -= sum(len(one.pass_s) + 1 for one in timed if one not in counted)
            self.seconds[size] = tuple(second for one in counted for second in one.pass_s)
            self._ended[size] = max(one.taken_at for one in counted)
        for contest in contests:
            self._join(contest)
        self.unsteady = [size for size, timed in self._timed.items() if len(timed) == 1 and not timed[0].is_steady]

    def _take(self, one: Measurement) -> None:
        size = one.candidate.micro_batch_size
        read = one.peak_bytes is not None or one.floor_bytes is not None
        self.steps += (len(one.pass_s) + 1 if one.pass_s else 0) + (MEMORY_PASSES if read else 0)
        if one.floor_bytes is not None:
            self.floors.append(one.floor_bytes)
        if one.peak_bytes is not None:
            self.peaks[size] = max(one.peak_bytes, self.peaks.get(size, 0))
            self._read.append(replace(one, outcome="ok"))  # above the budget it is a point of the line all the same
        budget = self.space.budget_bytes
        over = one.peak_bytes is not None and budget is not None and one.peak_bytes > budget
        if one.outcome == "out_of_memory" or over:
            self.too_large = size if self.too_large is None else min(size, self.too_large)
        elif one.outcome == "error":
            self.broken[size] = one.reason or "it failed"
        elif one.outcome == "nonfinite":
            self.nonfinite = one.reason or "its loss or gradient is not finite"
        elif one.pass_s:
            self._timed.setdefault(size, []).append(one)
            self._updates += one.update_s

    def _join(self, contest: HeadToHead) -> None:
        for one in contest.measurements:
            if one.candidate.precision == self.precision:
                self.steps += len(one.pass_s) + 1
                self.seconds.setdefault(one.candidate.micro_batch_size, one.pass_s)  # its own were not kept
                self._updates += one.update_s

    def entry(self, size: int) -> Measurement | None:
        """What the last contest measured of a size; None if it took no part."""
        return None if self.contest is None else self.contest.of(Candidate(self.precision, size))

    # -- memory -----------------------------------------------------------------------------------

    @cached_property
    def line(self) -> MemoryLine | None:
        """The line through all peaks; None before two were read."""
        return self.line_without(None)

    def line_without(self, size: int | None) -> MemoryLine | None:
        """The line without this size's own peak, as a prediction for it."""
        known = points(one for one in self._read if one.candidate.micro_batch_size != size)
        return fit(known) if len({rows for rows, _ in known}) > 1 else None

    def estimate_without(self, size: int) -> MemoryLine | None:
        """The same, or the line through the floor if there is only one other peak."""
        read = [one for one in self._read if one.candidate.micro_batch_size != size]
        return line_of(read) if read else None

    @property
    def roomy(self) -> bool:
        """Whether the largest size would fit even if each row took twice as much as the peaks so far show."""
        line, budget = self.estimate_without(0), self.space.budget_bytes
        largest = self.space.sizes[-1]
        return line is not None and budget is not None and line.predict(2 * largest) <= budget

    def fitting(self) -> tuple[int, ...]:
        """Sizes that have not failed and that, as far as is known, memory allows."""
        line, budget = self.line, self.space.budget_bytes
        return tuple(
            size
            for size in self.space.sizes
            if size not in self.broken
            and (self.too_large is None or size < self.too_large)
            and (size in self.peaks or line is None or budget is None or line.predict(size) <= budget)
        )

    # -- time -------------------------------------------------------------------------------------

    @property
    def update_s(self) -> float:
        """Median over all sizes: an update does not depend on the micro-batch."""
        return statistics.median(self._updates) if self._updates else 0.0

    @cached_property
    def measured(self) -> tuple[int, ...]:
        """Sizes with times that still fit, ascending."""
        fitting = set(self.fitting())
        return tuple(sorted(size for size in self.seconds if size in fitting))

    @property
    def sizes_tried(self) -> int:
        """Number of sizes that were measured in some way."""
        return len({*self.seconds, *self.peaks, *self.broken, *([self.too_large] if self.too_large else [])})

    def pass_s(self, size: int) -> float:
        """Seconds of a pass at a measured size: from the contest; else the median, scaled to the time of the contest if
        it was timed before."""
        if self.contest is not None and self.entry(size) is not None:
            return self.contest.pass_s(Candidate(self.precision, size))
        later = self.contest is not None and self._ended.get(size, 0.0) > self.contest.measurements[0].taken_at
        return (1.0 if later else self._drift) * statistics.median(self.seconds[size])

    @cached_property
    def _drift(self) -> float:
        """How much longer passes took in the contest than when these sizes were timed, as a ratio."""
        known = [(self.entry(size), passes) for size, passes in self.seconds.items()]
        ratios = [
            self.pass_s(entry.candidate.micro_batch_size) / statistics.median(passes)
            for entry, passes in known
            if entry is not None and entry.pass_s is not passes
        ]
        return statistics.geometric_mean(ratios) if ratios else 1.0

    def repeats(self, size: int) -> int:
        """Timed passes of a size, those of the contest included."""
        entry = self.entry(size)
        passes = self.seconds.get(size, ())
        return len(passes) + (0 if entry is None or entry.pass_s is passes else len(entry.pass_s))

    def score(self, size: int) -> float:
        """Throughput (or goodput) at a measured size."""
        return self.space.score(size, self.pass_s(size), self.update_s)

    @property
    def best(self) -> float:
        """The best measured score; 0 without one."""
        return max((self.score(size) for size in self.measured), default=0.0)

    @cached_property
    def reach(self) -> float:
        """The upper bound of the score over all sizes that fit; 0 if nothing was measured."""
        return max((self.bound(size) for size in self.fitting()), default=0.0) if self.measured else 0.0

    @property
    def growth(self) -> int:
        """How many times the largest measured size the next one may be: more if further rows have cost almost nothing,
        as on a GPU that few rows do not fill."""
        known = self.measured
        flat = len(known) > 1 and self.pass_s(known[-1]) < FLAT * self.pass_s(known[0])
        return GROWTH_WHERE_FLAT if flat else GROWTH

    def error(self, size: int) -> float:
        """Relative standard error of the median pass at a measured size: from the noise of all sizes, or its own."""
        entry = self.entry(size)
        passes = self.seconds[size] if entry is None else entry.pass_s
        own = (max(passes) - min(passes)) / (2 * statistics.median(passes))
        return 1.25 * max(self._noise, own if len(passes) < 4 else 0.0) / len(passes) ** 0.5

    @cached_property
    def _noise(self) -> float:
        """Relative standard deviation of one pass. With few passes the median is one of them, which leaves n - 1."""
        gaps: list[float] = []
        for passes in self.seconds.values():
            middle = statistics.median(passes)
            gaps += sorted(abs(one / middle - 1) for one in passes)[len(passes) % 2 :]
        return max(LEAST_NOISE, 1.4826 * statistics.median(gaps)) if gaps else LEAST_NOISE

    def bound(self, size: int) -> float:
        """The upper bound of the score of an unmeasured size; the score of a measured one."""
        known = self.measured
        if size in known:
            return self.score(size)
        below = [other for other in known if other < size]
        above = [other for other in known if other > size]
        lines = [self._drawn_on(pair, size) for pair in (_apart(below), _apart(above[::-1])) if pair is not None]
        if not below:  # fewer rows take less time, but never give more rows per second
            lines.append(self.pass_s(above[0]) * size / above[0])
        elif not above:
            lines.append(self.pass_s(below[-1]))
        else:  # a curve that bends upwards lies below its chord
            chord = self._drawn_on((below[-1], above[0]), size)
            lines = [min(max(lines), chord) if lines else (self.pass_s(below[-1]) + chord) / 2]
        return self.space.score(size, max(lines), self.update_s)

    def _drawn_on(self, pair: tuple[int, int], size: int) -> float:
        """Seconds at `size` on the line through two measured sizes."""
        first, second = self.pass_s(pair[0]), self.pass_s(pair[1])
        return first + (second - first) * (size - pair[0]) / (pair[1] - pair[0])


def _apart(sizes: Sequence[int]) -> tuple[int, int] | None:
    """The last size and one before it, if possible at least `APART` times away: neighbours give an unreliable line."""
    if len(sizes) < 2:
        return None
    last = sizes[-1]
    far = [size for size in sizes[:-1] if max(size, last) >= APART * min(size, last)]
    return (far[-1] if far else sizes[0], last)


def _to_reach(curve: ThroughputCurve) -> float:
    """The score that counts as the best: the measured one, or a little more if the bounds allow it."""
    return max(curve.best, min(curve.reach, (1 + WORTH_A_LOOK) * curve.best))


def chosen_size(curve: ThroughputCurve) -> int | None:
    """The smallest measured size within `NEAR` of the best; None if nothing measured fits, or the precision
    cannot be used.

    Against noise a smaller size has to be closer by a standard error.
    """
    if curve.nonfinite or not curve.measured:
        return None
    top, reach = max(curve.measured, key=curve.score), _to_reach(curve)
    near = [
        size
        for size in curve.measured
        if curve.score(size) >= (1 - NEAR) * reach * (1 + CAUTION * doubt_of(curve, size, curve, top))
    ]
    return min(near, default=top)


def next_size(curve: ThroughputCurve) -> int | None:
    """The unmeasured size that could change the choice; None if none could."""
    if not curve.measured:
        return None
    known, best = curve.measured, curve.best
    bounds = {size: curve.bound(size) for size in curve.fitting() if size not in curve.seconds}
    faster = [size for size, bound in bounds.items() if bound > (1 + WORTH_A_LOOK) * best]
    larger = [size for size in faster if size > known[-1]]
    if larger:
        top = max(bounds[size] for size in larger)
        knee = min(size for size in bounds if size > known[-1] and bounds[size] >= (1 - NEAR) * top)
        limit = max(curve.growth * known[-1], larger[0])
        return nearest_at_most([size for size in bounds if known[-1] < size <= knee], limit)
    if faster:
        return max(faster, key=lambda size: bounds[size])
    chosen = chosen_size(curve)
    assert chosen is not None, "a curve with measured sizes has a choice, or was dropped before"
    smaller = [size for size, bound in bounds.items() if size < chosen and bound >= (1 - NEAR) * _to_reach(curve)]
    return smaller[len(smaller) // 2] if smaller else None


def doubt_of(first: ThroughputCurve, size: int, second: ThroughputCurve, other: int) -> float:
    """Relative standard error of the ratio of two measured scores."""
    return (first.error(size) ** 2 + second.error(other) ** 2) ** 0.5


def runner_up(curve: ThroughputCurve, size: int) -> int | None:
    """The best other measured size; None if there is none that is small enough to measure again."""
    others = [other for other in curve.measured if other != size and other <= AS_LARGE * size]
    return max(others, key=curve.score, default=None)


def size_reason(curve: ThroughputCurve, size: int) -> str:
    """The reason for this size: its throughput, the best one, and what memory allows."""
    best = max(curve.measured, key=curve.score)
    unit = "rows/s" if curve.space.noise_rows is None else "rows/s weighed by what a row is worth"
    reason = f"{figure_text(curve.score(size))} {unit}"
    if size != best:
        reason += f", within {NEAR:.0%} of the best, {figure_text(curve.score(best))} at {best}"
    ceiling = max(curve.fitting())
    if ceiling < curve.space.sizes[-1] and curve.space.budget_bytes is not None:
        reason += f"; memory allows up to {ceiling}"
    return reason
