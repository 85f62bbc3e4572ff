"""What was measured of a candidate, and the line of peak memory through several of them. Pure, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import linear_regression, median
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")

#: Passes of one size that differ by more than this fraction of their median ran while the machine did other work.
STEADY = 0.5
#: Two passes that differ by less than this fraction of the shorter one need no third.
ALIKE = 0.05

Outcome = Literal["ok", "out_of_memory", "nonfinite", "error"]


@dataclass(frozen=True)
class Candidate:
    """One point of the search.

    Attributes:
        precision: value of `precision.dtype`.
        micro_batch_size: rows of one forward and backward pass.
    """

    precision: str
    micro_batch_size: int


@dataclass(frozen=True)
class Measurement:
    """One candidate, measured with the real step: the slowest worker's seconds, the largest peak.

    Attributes:
        outcome: with "out_of_memory" the device's allocator refused, or the peak was above the budget.
        pass_s: seconds of each forward and backward pass of one micro-batch, warm-up dropped; may be empty.
        update_s: seconds of each reduction, clip and optimizer step, warm-up dropped; may be empty.
        peak_bytes: the most that the process had allocated at a time; None if memory was not read.
        floor_bytes: allocated before the first pass: model, optimizer state, gradients, data and the process itself.
        loss, grad_norm: of the first pass.
        reason: of an outcome other than "ok".
        device: name of the device, such as "cpu" or "NVIDIA H100".
        taken_at: unix time of its end; 0 if unknown.
    """

    candidate: Candidate
    outcome: Outcome
    pass_s: tuple[float, ...] = ()
    update_s: tuple[float, ...] = ()
    peak_bytes: int | None = None
    floor_bytes: int | None = None
    loss: float = math.nan
    grad_norm: float = math.nan
    reason: str = ""
    device: str = "cpu"
    taken_at: float = 0.0

    def step_s(self, rows: int) -> float:
        """Seconds of a step of `rows` rows on one worker, from the medians: its passes and one update."""
        return step_seconds(rows, self.candidate.micro_batch_size, median(self.pass_s), self.update_s)

    @property
    def is_steady(self) -> bool:
        """Whether its timed passes took about the same time; true for a memory reading alone."""
        return are_steady(self.pass_s)


def step_seconds(rows: int, size: int, pass_s: float, updates: Sequence[float]) -> float:
    """Seconds of a step of `rows` rows in micro-batches of `size`: the last pass is a whole one, and one update ends
    it."""
    return math.ceil(rows / size) * pass_s + (median(updates) if updates else 0.0)


def are_steady(seconds: Sequence[float]) -> bool:
    """Whether passes of one kind took about the same time, so that the machine did no other work meanwhile."""
    return not seconds or max(seconds) - min(seconds) <= STEADY * median(seconds)


def nearly_equal(seconds: Sequence[float]) -> bool:
    """Whether the last two passes took about the same time."""
    one, other = seconds[-2:]
    return abs(one - other) <= ALIKE * min(one, other)


@dataclass(frozen=True)
class MemoryLine:
    """Peak bytes of a micro-batch of n rows: `floor` + n x `per_row`.

    At its peak a step holds what exists before it (weights, optimizer state, gradients, the process) and what each row
    adds, mostly activations. A kernel may use another algorithm for a large size, so a prediction is confirmed by one
    measurement before it is used.
    """

    floor: float
    per_row: float

    def predict(self, rows: int) -> int:
        """Predicted peak bytes of one process with micro-batches of `rows` rows."""
        return round(self.floor + rows * self.per_row)


def line_of(measured: Iterable[Measurement]) -> MemoryLine:
    """The line through all measurements whose peak is known, also those above their budget; there must be one.

    A process keeps something for each size that it has computed (compiled kernels), so that its floor rises: every peak
    counts as what its own size added, on top of the highest floor. One size alone gives a line through its floor: what
    the size needs once is then attributed to its rows, so that the line predicts too much rather than too little.
    """
    known = [one for one in measured if one.peak_bytes]
    base = max(one.floor_bytes or 0 for one in known)
    rows = [one.candidate.micro_batch_size for one in known]
    peaks = [(one.peak_bytes or 0) - (one.floor_bytes or 0) + base for one in known]
    if len(set(rows)) == 1:
        rows.append(0)
        peaks.append(min(one.floor_bytes or 0 for one in known))
    slope, floor = linear_regression(rows, peaks)
    if slope >= 0:
        return MemoryLine(floor, slope)
    return MemoryLine(sum(peaks) / len(peaks), 0.0)  # more rows never take less


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def from_json(kind: type[T], row: Mapping[str, Any]) -> T:
    """A value of a dataclass from the plain mapping that `asdict` made of it and JSON may have carried: lists become
    tuples, mappings dataclasses; further keys are ignored."""
    return _adapter(kind).validate_python(row)
