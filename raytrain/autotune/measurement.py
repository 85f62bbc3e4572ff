"""What was measured of a candidate, the line of peak memory through several, and whether one precision is faster than
another beyond noise and computes the same. Pure, without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import linear_regression, median
from typing import Literal

from raytrain.config.decode import JsonRecord

#: Passes of one size that differ by more than this fraction of their median ran while the machine did other work.
STEADY = 0.5
#: Two passes that differ by less than this fraction of the shorter one need no third.
ALIKE = 0.05
#: A lower precision must be faster by at least this fraction, or it is not worth its rounding errors.
WORTHWHILE_GAIN = 0.03
#: And in this share of the rounds: on a busy machine the medians of a few rounds differ by more than that by chance.
WON_ROUNDS = 0.75
#: The numeric band of one batch: relative difference of the loss, and band of the gradient-norm ratio, against fp32.
LOSS_TOLERANCE = 0.02
NORM_BAND = (0.8, 1.25)
#: Significance level for times that vary: the highest accepted probability that as many rounds are won by chance.
CHANCE = 0.05

Outcome = Literal["ok", "out_of_memory", "nonfinite", "error"]


@dataclass(frozen=True)
class Candidate:
    precision: str
    micro_batch_size: int


@dataclass(frozen=True)
class Measurement(JsonRecord):
    """One candidate, measured with the real step: the slowest worker's seconds, the largest peak.

    Attributes:
        pass_s: seconds of each forward and backward pass of one micro-batch, warm-up dropped; may be empty.
        update_s: seconds of each reduction, clip and optimizer step, warm-up dropped; may be empty.
        floor_bytes: allocated before the first pass: model, optimizer state, gradients, data and the process itself.
    """

    candidate: Candidate
    outcome: Outcome  # with "out_of_memory" the device's allocator refused, or the peak was above the budget
    pass_s: tuple[float, ...] = ()
    update_s: tuple[float, ...] = ()
    peak_bytes: int | None = None  # the most that the process had allocated at a time; None if memory was not read
    floor_bytes: int | None = None
    loss: float = math.nan  # of the first pass
    grad_norm: float = math.nan
    reason: str = ""  # of an outcome other than "ok"
    taken_at: float = 0.0  # unix time of its end; 0 if unknown

    def step_s(self, rows: int) -> float:
        """Seconds of a step of `rows` rows on one worker, from the medians: its passes and one update."""
        return step_seconds(rows, self.candidate.micro_batch_size, median(self.pass_s), self.update_s)


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
    adds. A kernel may use another algorithm for a large size, so a prediction is confirmed by one measurement.
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


# -- one way to compute against another ---------------------------------------------------------


def beyond_noise(seconds: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether the times of two ways to compute are enough to say that the first is faster; the one rule of `train` and
    `tune` for precisions, compiled passes and overlapped all-reduces.

    It must win `WON_ROUNDS` of the rounds. Where times vary, since the machine does other work, that says little: it
    must also have been faster in each round than the reference ever was, or in so many rounds that chance explains it
    in at most one case of twenty (a sign test).

    Position i of both is round i of the same work; without rounds the answer is yes.
    """
    rounds = min(len(seconds), len(reference))
    won = sum(own < other for own, other in zip(seconds, reference, strict=False))
    if won < WON_ROUNDS * rounds:
        return False
    if not rounds or (are_steady(seconds) and are_steady(reference)):
        return True
    chance = sum(math.comb(rounds, number) for number in range(won, rounds + 1)) / 2**rounds
    return max(seconds) * (1 + WORTHWHILE_GAIN) < min(reference) or chance <= CHANCE


def faster_beyond_noise(seconds: Sequence[float], others: Sequence[float], *, than: str) -> tuple[bool, str]:
    """Whether the first of two ways is faster at the median of the rounds by what is worth while, and clearly; and
    how much, in words."""
    ratios = [b / a for a, b in zip(seconds, others, strict=True)]
    rounds, won, middle = len(ratios), sum(ratio > 1 for ratio in ratios), median(ratios)
    text = f"{middle:.2f} times as fast as {than}, faster in {won} of {rounds} rounds"
    return middle >= 1 + WORTHWHILE_GAIN and beyond_noise(seconds, others), text


def has_winner(seconds: list[list[float]]) -> bool:
    """Whether more rounds would not change the choice: in every round one way was faster than each other one ever was,
    by more than the gain that is worth while; `seconds`: of each way in every round, if it could be run."""
    timed = sorted((way for way in seconds if way), key=max)
    return all(max(timed[0]) * (1 + WORTHWHILE_GAIN) < min(way) for way in timed[1:])


def outside_band(
    own: tuple[float, float], reference: tuple[float, float], difference: float = 0.0, *, name: str = "fp32"
) -> str:
    """Why a pass is outside the numeric band of a reference, a precision of this `name`, "" where it is inside; of both
    the loss and the gradient norm. `difference`: norm of the gradient's difference from the reference's, relative to
    its norm, if known, since a loss shows less than the next steps."""
    (loss, norm), (reference_loss, reference_norm) = own, reference
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return "the loss or gradient is not finite"
    if abs(loss - reference_loss) > LOSS_TOLERANCE * abs(reference_loss):
        return f"the loss is {loss:.6g} where {name} has {reference_loss:.6g}"
    if reference_norm > 0 and not NORM_BAND[0] <= norm / reference_norm <= NORM_BAND[1]:
        return f"the gradient norm is {norm / reference_norm:.3g} times {name}'s"
    if reference_norm > 0 and difference > 1 - NORM_BAND[0]:
        return f"the gradient differs from {name}'s by {difference:.0%}"
    return ""
