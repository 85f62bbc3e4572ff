"""Peak memory as a line over the rows of a micro-batch: two or three sizes give it. Pure, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class MemoryLine:
    """`floor` bytes at no rows at all, and `per_row` bytes more for each."""

    floor: float
    per_row: float

    def predict(self, size: int) -> int:
        """Peak bytes at a micro-batch of `size` rows."""
        return round(self.floor + self.per_row * size)

    def largest(self, budget: int | None, sizes: Iterable[int]) -> int | None:
        """The largest of `sizes` whose predicted peak is within `budget` bytes (None: all are); None where none is."""
        return max((size for size in sizes if budget is None or self.predict(size) <= budget), default=None)


def fit(points: Iterable[tuple[int, int]]) -> MemoryLine:
    """The least squares line through (rows, peak bytes); a single point gives a level one. Never falls with the rows.

    Raises:
        ValueError: no point at all.
    """
    known: Sequence[tuple[int, int]] = sorted(set(points))
    if not known:
        raise ValueError("a line needs at least one point")
    rows, peaks = fmean(size for size, _ in known), fmean(peak for _, peak in known)
    spread = sum((size - rows) ** 2 for size, _ in known)
    slope = sum((size - rows) * (peak - peaks) for size, peak in known) / spread if spread else 0.0
    slope = max(0.0, slope)
    return MemoryLine(floor=peaks - slope * rows, per_row=slope)
