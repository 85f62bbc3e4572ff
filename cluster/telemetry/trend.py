"""Whether memory grows without end: a trend test over samples of one process or device."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Samples before the first verdict. A third of them is left out as warm-up, and 10 are what the test needs.
FIRST_VERDICT = 16
#: The next verdict comes after this many times as many samples: few verdicts, so that noise has few chances.
NEXT_VERDICT = 1.5
#: Of the Mann-Kendall test, one-sided: noise alone exceeds it once in 20,000 verdicts.
SIGNIFICANT = 3.9
#: Between the medians of its four quarters a leak grows by the same amount; the least of the three must be at least
#: this fraction of their mean. A warm-up (allocator caches, a filling pool) decays: it fails once it has lasted 2.3
#: times its time constant. A single step, such as that of the first evaluation, fails at once.
STEADY = 0.65
#: The same with fewer than `FEW` samples, which show less of a warm-up's decay.
FEW, STEADY_OF_FEW = 24, 0.88
#: Growth below this many bytes, or this fraction of the level, is not reported, however steady.
LEAST_BYTES, LEAST_FRACTION = 16 * 2**20, 0.03
#: Most samples that are kept; beyond it every second one is dropped.
KEPT = 512


@dataclass(frozen=True)
class Growth:
    """A trend: `bytes_per_s` (the median of all slopes) over `seconds`, from `first` to `last` bytes."""

    bytes_per_s: float
    seconds: float
    first: float
    last: float


class TrendTest:
    """Collects (time, bytes) of one process or device, and says once that it grows."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._seen = 0
        self._next = FIRST_VERDICT
        self._stride = 1

    def add(self, time: float, used: float, *, ready: bool = True) -> Growth | None:
        """Add a sample; returns the growth if a verdict is due and the memory grows.

        Args:
            ready: a verdict may be given now; otherwise it is given later.
        """
        if self._seen % self._stride == 0:
            self._points.append((time, used))
        self._seen += 1
        if self._seen < self._next or not ready:
            return None
        self._next = math.ceil(self._seen * NEXT_VERDICT)
        found = growth(self._points)
        if len(self._points) > KEPT:
            self._points, self._stride = self._points[::2], 2 * self._stride
        return found

    def growth(self) -> Growth | None:
        """The growth of the samples so far, whether or not a verdict is due."""
        return growth(self._points)


def growth(points: Sequence[tuple[float, float]]) -> Growth | None:
    """The growth of (seconds, bytes); None if the samples after the warm-up (the first third) do not grow steadily."""
    late = points[len(points) // 3 :]
    if len(late) < 2 * FIRST_VERDICT // 3 or late[-1][0] <= late[0][0]:
        return None
    values = [used for _, used in late]
    if _mann_kendall(values) < SIGNIFICANT:
        return None
    edges = [len(values) * quarter // 4 for quarter in range(5)]
    levels = [statistics.median(values[begin:end]) for begin, end in itertools.pairwise(edges)]
    rises = [later - before for before, later in itertools.pairwise(levels)]
    if min(rises) < (STEADY if len(points) >= FEW else STEADY_OF_FEW) * statistics.fmean(rises):
        return None
    seconds, rate = late[-1][0] - late[0][0], _slope(late)
    if rate * seconds < max(LEAST_BYTES, LEAST_FRACTION * values[0]):
        return None
    return Growth(rate, seconds, values[0], values[-1])


def _mann_kendall(values: Sequence[float]) -> float:
    """The statistic z: about standard normal for values without a trend, large for rising ones; ties are accounted."""
    number = len(values)
    rises = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    ties = [values.count(value) for value in set(values)]
    variance = (number * (number - 1) * (2 * number + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if variance <= 0 or rises == 0:
        return 0.0
    return (rises - math.copysign(1, rises)) / math.sqrt(variance)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope between all pairs (Theil-Sen), which single outliers do not move."""
    slopes = [
        (later - before) / (at - earlier)
        for i, (earlier, before) in enumerate(points)
        for at, later in points[i + 1 :]
        if at > earlier
    ]
    return statistics.median(slopes) if slopes else 0.0
