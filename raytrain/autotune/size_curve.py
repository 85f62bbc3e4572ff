"""One precision in the search over batch size: what was measured of it by size, and what the other sizes can be.

**The noise margin.** A smaller size replaces the fastest one only if it is within `NEAR` of it by more than the passes
vary: the margin is the standard error of the ratio of the two medians. A search without it took sizes that looked near
by chance, and lost 7 % of the throughput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from statistics import median

from raytrain.autotune.batch_space import BatchSpace
from raytrain.autotune.measurement import Measurement, MemoryLine, line_of

#: A smaller size is chosen if it loses no more than this fraction of the best throughput.
NEAR = 0.03
#: Relative standard deviation of a pass that is assumed at least.
LEAST_NOISE = 0.002
#: A larger size is worth measuring if it may be faster than the best measured one by more than this.
WORTH_A_LOOK = 0.04
#: Sizes of a precision that are measured at most.
MOST_SIZES = 6
#: A line through two sizes is drawn where one is at least this multiple of the other: neighbours differ by noise.
APART = 4
#: A line is trusted up to this multiple of the largest measured size; further if passes have hardly become longer.
GROWTH, GROWTH_WHERE_FLAT, FLAT = 8, 32, 1.25


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
