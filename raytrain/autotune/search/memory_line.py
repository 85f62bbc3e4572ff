"""Peak memory as a line in the rows of a micro-batch: fit, predict, the largest size within a budget. Pure.

At its peak a step holds what exists before it (weights, optimizer state, gradients, the process) and what each row
adds, mostly activations. A kernel may use another algorithm for a large size, so a prediction is confirmed by one
measurement before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain.autotune.search.measurement import Measurement


@dataclass(frozen=True)
class MemoryLine:
    """Peak bytes of a micro-batch of n rows: `floor` + n x `per_row`."""

    floor: float
    per_row: float

    def predict(self, rows: int) -> int:
        """Predicted peak bytes of one process with micro-batches of `rows` rows."""
        return round(self.floor + rows * self.per_row)

    def largest(self, budget: int, sizes: Iterable[int]) -> int | None:
        """The largest of `sizes` whose predicted peak is within `budget` bytes; None if there is none."""
        return max((size for size in sizes if self.predict(size) <= budget), default=None)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)


def points(measurements: Iterable[Measurement]) -> list[tuple[int, int]]:
    """(rows, peak bytes) of the measurements whose peak is known, for `fit`: also of those above their budget, but not
    of those that the allocator refused.

    A process keeps something for each size that it has computed (compiled kernels), so that its floor rises: every peak
    is what its own size added, on top of the highest floor.
    """
    known = [one for one in measurements if one.peak_bytes]
    found = [(one.candidate.micro_batch_size, one.peak_bytes or 0, one.floor_bytes or 0) for one in known]
    base = max((floor for _, _, floor in found), default=0)
    return [(rows, peak - floor + base) for rows, peak, floor in found]


def line_of(measured: Iterable[Measurement]) -> MemoryLine:
    """The line through all measurements whose peak is known. With one size alone it goes through that size's floor:
    what the size needs once is then attributed to its rows, so that the line predicts too much rather than too little.

    Raises:
        ValueError: no peak is known.
    """
    known = [one for one in measured if one.peak_bytes]
    found = points(known)
    if len({rows for rows, _ in found}) == 1:
        found.append((0, min(one.floor_bytes or 0 for one in known)))
    return fit(found)


def fit(points: Sequence[tuple[int, int]]) -> MemoryLine:
    """The least-squares line through measured (rows, peak bytes); its slope is never negative.

    One size alone does not determine the slope: all of its peak is then attributed to the rows and the floor is 0,
    which predicts too much for larger sizes.

    Raises:
        ValueError: no point.
    """
    if not points:
        raise ValueError("a memory line needs at least one measured size")
    sizes = {rows for rows, _ in points}
    if len(sizes) == 1:
        rows, peak = max(points, key=lambda point: point[1])
        return MemoryLine(0.0, peak / rows)
    mean_rows = sum(rows for rows, _ in points) / len(points)
    mean_peak = sum(peak for _, peak in points) / len(points)
    spread = sum((rows - mean_rows) ** 2 for rows, _ in points)
    slope = max(0.0, sum((rows - mean_rows) * (peak - mean_peak) for rows, peak in points) / spread)
    return MemoryLine(mean_peak - slope * mean_rows, slope)
