"""How many processes of a worker read its data. Pure: measured rates in, the next count to measure or the answer out.

More processes help until the model no longer waits for data; then they only occupy cores. Counts double until two in
succession bring nothing; then the intervals next to the best are halved until the smallest count near it is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain.autotune.search.measurement import Candidate
from raytrain.autotune.search.throughput import NEAR
from raytrain.plan.choice import Resolved


@dataclass(frozen=True)
class LoaderRate:
    """Micro-batches that went through the model with `count` processes reading; 0: the training process reads."""

    count: int
    batches: int
    seconds: float

    @property
    def per_s(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds


@dataclass(frozen=True)
class LoaderRates:
    """What was measured for one candidate, with 0 to `most` processes."""

    candidate: Candidate
    most: int
    rates: tuple[LoaderRate, ...]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> LoaderRates:
        """What `to_json` wrote."""
        rates = tuple(LoaderRate(**one) for one in row["rates"])
        return cls(Candidate(**row["candidate"]), row["most"], rates)


def next_count(measured: Sequence[LoaderRate], *, most: int) -> int | None:
    """How many processes to measure next, of 0 to `most`; None if the answer is known."""
    rates = {one.count: one.per_s for one in measured}
    known: list[float] = []
    for count in _doubling(most):
        if len(known) > 2 and max(known[-2:]) <= (1 + NEAR) * max(known[:-2]):
            break
        if count not in rates:
            return count
        known.append(rates[count])
    near, top = _smallest_near(rates), max(rates, key=lambda count: rates[count])
    below = max((count for count in rates if count < near), default=near)
    above = min((count for count in rates if count > top), default=top)
    if (below + near) // 2 not in rates:
        return (below + near) // 2
    falls = rates[above] < (1 - NEAR) * rates[top]  # the best may lie between
    return (top + above) // 2 if falls and (top + above) // 2 not in rates else None


def choose_count(found: LoaderRates) -> Resolved:
    """The smallest count within `NEAR` of the best rate, with its reason."""
    rates = {one.count: one.per_s for one in found.rates}
    count, best = _smallest_near(rates), max(rates, key=lambda one: rates[one])
    reason = f"{rates[count]:.3g} batches/s of {found.candidate.micro_batch_size} rows"
    if count != best:
        reason += f", within {NEAR:.0%} of the best"
    others = ", ".join(f"{one}: {rates[one]:.3g}" for one in sorted(rates) if one != count)
    return Resolved(count, f"{reason}; {others} (0 to {found.most} processes, measured with the model)")


def _smallest_near(rates: Mapping[int, float]) -> int:
    best = max(rates.values())
    return min(count for count, rate in rates.items() if rate >= (1 - NEAR) * best)


def _doubling(most: int) -> list[int]:
    counts = [0]
    while counts[-1] < most:
        counts.append(min(most, max(1, 2 * counts[-1])))
    return counts
