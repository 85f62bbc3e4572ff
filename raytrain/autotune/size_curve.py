"""What a search over batch size and precision may try, and one precision in it: what was measured by size, and what
the other sizes can be. Pure.

**The noise margin.** A smaller size replaces the fastest one only if it is within `NEAR` of it by more than the passes
vary: the margin is the standard error of the ratio of the two medians. A search without it took sizes that looked near
by chance, and lost 7 % of the throughput.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from raytrain.autotune.measurement import Candidate, Measurement, MemoryLine, are_steady, line_of, step_seconds

#: A smaller size is chosen if it loses no more than this fraction of the best throughput.
NEAR = 0.03
#: Relative standard deviation of a pass that is assumed at least.
LEAST_NOISE = 0.002
#: A larger size is worth measuring if it may be faster than the best measured one by more than this.
WORTH_A_LOOK = 0.04
#: Sizes of a precision that are measured at most.
MOST_SIZES = 6
#: The second size is up to this multiple of the first.
FIRST_RATIO = 8
#: A line through two sizes is drawn where one is at least this multiple of the other: neighbours differ by noise.
APART = 4
#: A line is trusted up to this multiple of the largest measured size; further if passes have hardly become longer.
GROWTH, GROWTH_WHERE_FLAT, FLAT = 8, 32, 1.25


@dataclass(frozen=True)
class BatchSpace:
    """What may be tried, and how it is judged.

    Attributes:
        rows_per_step: rows of one worker's step where the global batch is given (accumulation makes up the rest); None
            where the batch is free, and each step is one micro-batch.
    """

    precisions: tuple[str, ...]
    sizes: tuple[int, ...]  # of micro-batches, ascending
    rows_per_step: int | None
    budget_bytes: int | None  # what one process may allocate; None: memory is not read
    devices: int = 1  # measurements that may run at a time

    @property
    def reference(self) -> str:
        """The precision that the others must beat: fp32, unless the job names others."""
        return "fp32" if "fp32" in self.precisions else self.precisions[0]

    def first_sizes(self) -> tuple[int, ...]:
        """The two small sizes to begin with: 2 rows where there is a choice (a batch norm refuses a single one), and up
        to eight times that."""
        smallest = min(self.sizes)
        begin = self.sizes[1] if len(self.sizes) > 3 and smallest == 1 else smallest
        later = [size for size in self.sizes if size > begin]
        within = [size for size in later if size <= FIRST_RATIO * begin]
        return (begin, within[-1] if within else later[0]) if later else (begin,)

    def rows(self, size: int) -> int:
        """Rows of one worker's step with micro-batches of this size."""
        return self.rows_per_step or size

    def score(self, size: int, pass_s: float, updates: Sequence[float]) -> float:
        """Rows per second of one worker."""
        return self.rows(size) / step_seconds(self.rows(size), size, pass_s, updates)


def sizes_dividing(global_batch: int, workers: int) -> tuple[int, ...]:
    """Micro-batch sizes that divide a given global batch evenly: micro x accumulation x workers = global. If the number
    of workers does not divide it, the sizes that divide the batch, up to one worker's share."""
    share = math.ceil(global_batch / workers)
    whole = global_batch // workers if global_batch % workers == 0 else global_batch
    return tuple(size for size in range(1, share + 1) if whole % size == 0)


def sizes_free(rows: int, workers: int) -> tuple[int, ...]:
    """Powers of two up to each worker's share of the training rows, for a batch that is free."""
    most = max(1, rows // workers)
    return tuple(2**power for power in range(most.bit_length()) if 2**power <= most)


class SizeCurve:
    """The measurements of one precision, by size, and bounds for the sizes between and beyond them.

    Attributes:
        nonfinite: why the precision cannot be used here, or "".
        unsteady: sizes timed once, while the machine did other work: to be timed once more. The unsteady measurement
            is left out once there is a steady one.
    """

    def __init__(self, space: BatchSpace, precision: str, measurements: Iterable[Measurement]) -> None:
        self.space, self.precision = space, precision
        self.seconds: dict[int, tuple[float, ...]] = {}  # of each pass, by size
        self.first_pass: dict[int, tuple[float, float]] = {}  # loss and gradient norm, by size
        self.peaks: dict[int, int] = {}  # bytes, by size
        self.failed: dict[int, str] = {}  # why, by size, where a pass did not fit or failed for another reason
        self.too_large, self.nonfinite = math.inf, ""
        self.read: list[Measurement] = []
        self.updates: list[float] = []
        self.unsteady: list[int] = []
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
                self.too_large = min(size, self.too_large)  # the smallest size that did not fit; infinite if all did
                self.failed[size] = one.reason or "out of memory"
            elif one.outcome == "error":
                self.failed[size] = one.reason or "it failed"
            elif one.outcome == "nonfinite":
                self.nonfinite = one.reason or "its loss or gradient is not finite"
            elif one.pass_s:
                timed.setdefault(size, []).append(one)
                self.first_pass[size] = one.loss, one.grad_norm
                self.updates += one.update_s
        for size, several in timed.items():
            counted = [one for one in several if are_steady(one.pass_s)] or several
            self.seconds[size] = tuple(second for one in counted for second in one.pass_s)
            if len(several) == 1 and not are_steady(several[0].pass_s):
                self.unsteady.append(size)

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
            if size not in self.failed and size < self.too_large
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
    def enough(self) -> float:
        """Rows per second that are near the best: the measured one, or a little more if the bounds allow it."""
        return (1 - NEAR) * max(self.best, min(self.reach, (1 + WORTH_A_LOOK) * self.best))

    def _doubt(self, size: int, other: int) -> float:
        """Relative standard error of the ratio of two measured rates; that of a median is 1.25 times a mean's. The
        noise of a pass is how far passes are from the median of their size, which with few is one of them itself."""
        gaps: list[float] = []
        for passes in self.seconds.values():
            middle = median(passes)
            gaps += sorted(abs(one / middle - 1) for one in passes)[len(passes) % 2 :]
        noise = max(LEAST_NOISE, 1.4826 * median(gaps)) if gaps else LEAST_NOISE
        return 1.25 * noise * (1 / len(self.seconds[size]) + 1 / len(self.seconds[other])) ** 0.5

    @cached_property
    def chosen(self) -> Candidate | None:
        """The smallest measured size within `NEAR` of the best, by more than noise explains; None if the precision
        cannot be used."""
        if self.nonfinite or not self.measured:
            return None
        top = max(self.measured, key=self.bound)
        near = [size for size in self.measured if self.bound(size) >= self.enough * (1 + self._doubt(size, top))]
        return Candidate(self.precision, min(near, default=top))

    @property
    def rate(self) -> float:
        """Rows per second at the best size; 0 without one."""
        return 0.0 if self.chosen is None else self.bound(self.chosen.micro_batch_size)

    def next_size(self) -> int | None:
        """The unmeasured size that could change the choice; None if none could."""
        known, chosen = list(self.measured), self.chosen
        failed = [size for size in self.failed if size <= self.too_large]
        if chosen is None or len({*self.seconds, *self.peaks, *failed}) >= MOST_SIZES:
            return None
        bounds = {size: self.bound(size) for size in self.fitting if size not in self.seconds}
        faster = [size for size, bound in bounds.items() if bound > (1 + WORTH_A_LOOK) * self.best]
        larger = [size for size in faster if size > known[-1]]
        if larger:
            enough = (1 - NEAR) * max(bounds[size] for size in larger)
            saturated = min(size for size in bounds if size > known[-1] and bounds[size] >= enough)
            flat = len(known) > 1 and self.pass_s(known[-1]) < FLAT * self.pass_s(known[0])
            limit = max(larger[0], known[-1] * (GROWTH_WHERE_FLAT if flat else GROWTH))
            return max(size for size in bounds if known[-1] < size <= min(saturated, limit))
        if faster:
            return max(faster, key=lambda size: bounds[size])
        smaller = [size for size, bound in bounds.items() if size < chosen.micro_batch_size and bound >= self.enough]
        return smaller[len(smaller) // 2] if smaller else None


def _apart(sizes: Sequence[int]) -> tuple[int, int] | None:
    """The last size and one before it, if possible at least `APART` times away; None without two sizes."""
    if len(sizes) < 2:
        return None
    last = sizes[-1]
    far = [size for size in sizes[:-1] if max(size, last) >= APART * min(size, last)]
    return (far[-1] if far else sizes[0], last)
