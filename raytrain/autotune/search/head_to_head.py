"""The best candidates of a search measured once more in alternating rounds, in one process, so that other work on the
machine affects all of them alike. Their ratios decide; measurements from other moments only select who takes part.
Pure, without torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.precision import told_apart

#: Timed rounds, after one round that is dropped.
ROUNDS = 3


@dataclass(frozen=True)
class HeadToHead:
    """A contest: rounds in each of which every contender runs one pass and one update.

    Attributes:
        measurements: one of each contender, the leader first; pass i of all of them is from round i.
    """

    measurements: tuple[Measurement, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """Plain mappings; `from_json` of them equals this."""
        return [one.to_json() for one in self.measurements]

    @classmethod
    def from_json(cls, rows: list[Mapping[str, Any]]) -> HeadToHead:
        """What `to_json` wrote."""
        return cls(tuple(Measurement.from_json(row) for row in rows))

    @property
    def valid(self) -> bool:
        """Whether all contenders succeeded."""
        return all(one.outcome == "ok" and one.pass_s for one in self.measurements)

    def of(self, candidate: Candidate) -> Measurement | None:
        """The measurement of a candidate; None if it took no part."""
        return next((one for one in self.measurements if one.candidate == candidate), None)

    def pass_s(self, candidate: Candidate) -> float:
        """Seconds of a pass: the first contender's median, times the median ratio to it, round by round."""
        first, own = self.measurements[0], self.of(candidate)
        assert own is not None, "a contender"
        ratios = [one / other for one, other in zip(own.pass_s, first.pass_s, strict=True)]
        return statistics.median(ratios) * statistics.median(first.pass_s)

    def gains(self, candidate: Candidate, other: Candidate, *, rows: int | None) -> list[float]:
        """The ratio of rows per second to those of `other`, in each round.

        Args:
            rows: of a step; None where a step is one micro-batch.
        """
        own, theirs = self.of(candidate), self.of(other)
        assert own is not None and theirs is not None, "two contenders"
        return [a / b for a, b in zip(_speeds(own, rows), _speeds(theirs, rows), strict=True)]

    def told_apart(self, candidate: Candidate, other: Candidate, *, rows: int | None) -> bool:
        """Whether the rounds are enough to say that the first is faster (`precision.told_apart`)."""
        own, theirs = self.of(candidate), self.of(other)
        assert own is not None and theirs is not None, "two contenders"
        return told_apart(*([1 / speed for speed in _speeds(one, rows)] for one in (own, theirs)))

    def comparison(self, candidate: Candidate, other: Candidate, *, rows: int | None) -> str:
        """The median of those ratios with the least and the greatest, as text."""
        gains = self.gains(candidate, other, rows=rows)
        at = f"{statistics.median(gains):.2f} [{min(gains):.2f}, {max(gains):.2f}] times as fast as"
        return f"measured in turn {at} {other.precision} x {other.micro_batch_size}"

    def record(self) -> dict[str, Any]:
        """The contenders with their rounds, as a decision keeps them."""
        return {"contenders": [asdict(one.candidate) for one in self.measurements],
                "pass_s": [one.pass_s for one in self.measurements]}  # fmt: skip


def _speeds(one: Measurement, rows: int | None) -> list[float]:
    size = one.candidate.micro_batch_size
    update = statistics.median(one.update_s) if one.update_s else 0.0
    whole = rows or size
    return [whole / (-(-whole // size) * seconds + update) for seconds in one.pass_s]
