"""`Measurement`: what a probe measured of one candidate, and what decisions are made from. Pure, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

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
        candidate: what was measured.
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
        passes = math.ceil(rows / self.candidate.micro_batch_size)
        return passes * median(self.pass_s) + (median(self.update_s) if self.update_s else 0.0)

    @property
    def is_steady(self) -> bool:
        """Whether its timed passes took about the same time; true for a memory reading alone."""
        return are_steady(self.pass_s)

    def to_json(self) -> dict[str, Any]:
        """A plain mapping; `from_json` of it equals this."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measurement:
        """What `to_json` wrote; lists become tuples."""
        fields = {**row, "candidate": Candidate(**row["candidate"])}
        return cls(**{**fields, "pass_s": tuple(row["pass_s"]), "update_s": tuple(row["update_s"])})


def are_steady(seconds: Sequence[float]) -> bool:
    """Whether passes of one kind took about the same time, so that the machine did no other work meanwhile."""
    return not seconds or max(seconds) - min(seconds) <= STEADY * median(seconds)


def nearly_equal(seconds: Sequence[float]) -> bool:
    """Whether the last two passes took about the same time."""
    one, other = seconds[-2:]
    return abs(one - other) <= ALIKE * min(one, other)
