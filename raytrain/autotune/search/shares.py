"""How a global batch is shared out among workers of unequal speed, so that the slowest is done as early as can be.

Pure, without torch. Rows are dealt in whole micro-batches; a worker whose device has room for more than one of them
takes several in a pass. Who takes what follows from the measured seconds and the number of rows alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from raytrain.plan.choice import Choice, Resolved

WORTHWHILE = 0.05
"""Shares that save less than this part of a step stay equal: they would follow noise."""

SPLITS = 8
"""Micro-batches that `loop.micro_batch_size: auto` makes of an equal share, so that shares can differ by an eighth."""

SIZE_GAIN = 0.03
"""A larger micro-batch must have this part more rows a second, or the smaller one is kept."""


@dataclass(frozen=True)
class Shares:
    """How fast every worker is; one entry for each rank.

    Attributes:
        micro_batch: `loop.micro_batch_size` as it was when this was measured: rows are dealt in so many at a time.
            Where it shrinks later, `rows` shrink alike.
        rows: of one pass of each worker, at most.
        pass_s: seconds of one such pass; only their ratios matter.
    """

    micro_batch: int
    rows: tuple[int, ...]
    pass_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.pass_s) > 0 or min(self.rows) < 1 or min(self.pass_s) <= 0:
            raise ValueError(f"shares of {self.rows} rows in {self.pass_s} seconds")

    @property
    def row_s(self) -> tuple[float, ...]:
        """Seconds of a row of each worker."""
        return tuple(seconds / rows for seconds, rows in zip(self.pass_s, self.rows, strict=True))

    def spans(self, total: int, *, micro_batch: int) -> list[range]:
        """Rows of each rank in a window of so many; they follow each other. The last micro-batch may be shorter."""
        taken = apportion(-(-total // micro_batch), self.row_s)
        ends = [min(total, micro_batch * units) for units in accumulate(taken)]
        return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]

    def passes(self, total: int, *, rank: int, micro_batch: int) -> list[range]:
        """This rank's rows in a window of so many, pass by pass: as few as can be, of whole micro-batches, alike."""
        mine = self.spans(total, micro_batch=micro_batch)[rank]
        size = max(1, self.rows[rank] * micro_batch // self.micro_batch)
        number = -(-len(mine) // size)
        each = max(1, min(size, micro_batch * -(-len(mine) // (max(1, number) * micro_batch))))
        return [mine[begin : begin + each] for begin in range(0, len(mine), each)]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping; `from_json` of it equals this."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Shares:
        """The inverse of `to_json`."""
        return cls(row["micro_batch"], tuple(row["rows"]), tuple(row["pass_s"]))


@lru_cache(maxsize=64)
def apportion(units: int, unit_s: tuple[float, ...]) -> tuple[int, ...]:
    """Of `units` alike each worker's number, so that the last one is done as early as can be.

    They are handed out one by one, each to the worker that would be the first to finish it (of equal ones the lowest
    rank): when the last one is handed out, no other division could have been done by then.

    Args:
        unit_s: seconds of one unit on each worker; only their ratios matter.
    """
    taken = [0] * len(unit_s)
    ready = [(seconds, rank) for rank, seconds in enumerate(unit_s)]
    heapq.heapify(ready)
    for _ in range(units):
        _, rank = heapq.heappop(ready)
        taken[rank] += 1
        heapq.heappush(ready, ((taken[rank] + 1) * unit_s[rank], rank))
    return tuple(taken)


def slowest_s(number: Sequence[int], each_s: Sequence[float]) -> float:
    """Seconds until the last worker is done, of so many units each."""
    return max(count * seconds for count, seconds in zip(number, each_s, strict=True))


def gain_over_equal(shares: Shares, *, total: int, plain_s: Sequence[float]) -> float:
    """How many times as fast a window of `total` rows is as with equal shares.

    Args:
        plain_s: of each worker, seconds of a pass of `shares.micro_batch` rows.
    """
    units = -(-total // shares.micro_batch)
    equal = slowest_s(apportion(units, (1.0,) * len(plain_s)), plain_s)
    own = tuple(shares.micro_batch * seconds for seconds in shares.row_s)
    return equal / slowest_s(apportion(units, shares.row_s), own)


@dataclass(frozen=True)
class WorkerPace:
    """One worker's seconds for a pass of each size; infinite where it did not fit. `kind` names its device."""

    kind: str
    pass_s: Mapping[int, float]

    def to_json(self) -> dict[str, Any]:
        """A plain mapping, for the record; null is what did not fit."""
        fitting = {str(size): seconds if seconds < float("inf") else None for size, seconds in self.pass_s.items()}
        return {"kind": self.kind, "pass_s": fitting}


def choose_shares(paces: Sequence[WorkerPace], *, total: int, micro_batch: int) -> Resolved:
    """The shares of a global batch of `total` rows for workers of these paces, in the order of the ranks.

    Each kind of device has one size of pass: `micro_batch`, or a larger one that all its workers had room for and that
    was worth it.

    Returns:
        `Shares.to_json()`, or "equal" where unequal shares would save less than `WORTHWHILE`.
    """
    sizes = {kind: _best_size([p for p in paces if p.kind == kind], micro_batch) for kind in {p.kind for p in paces}}
    rows = tuple(sizes[pace.kind] for pace in paces)
    chosen = Shares(micro_batch, rows, tuple(pace.pass_s[size] for pace, size in zip(paces, rows, strict=True)))
    gain = gain_over_equal(chosen, total=total, plain_s=[pace.pass_s[micro_batch] for pace in paces])
    ratio = max(chosen.row_s) / min(chosen.row_s)
    told = f"the slowest worker needs {ratio:.2f} times as long for a row as the fastest"
    if gain < 1 + WORTHWHILE:
        return Resolved("equal", f"{told}: unequal shares of {total} rows would save {max(0.0, 1 - 1 / gain):.0%}")
    return Resolved(chosen.to_json(), f"{told}; {shown(chosen, total)}: {gain:.2f} times as fast as equal shares")


def shares_in_force(choice: Choice | None) -> Shares | None:
    """What a plan says; None while nothing is measured, and where it came out equal."""
    if not isinstance(choice, Resolved) or choice.value == "equal":
        return None
    return Shares.from_json(choice.value)


def _best_size(paces: Sequence[WorkerPace], micro_batch: int) -> int:
    """Of the sizes that all of them had room for the smallest within `SIZE_GAIN` of the most rows a second."""
    slowest = {size: max(pace.pass_s[size] for pace in paces) for size in paces[0].pass_s}
    rates = {size: size / seconds for size, seconds in slowest.items() if seconds < float("inf")}
    good = [size for size, rate in rates.items() if rate * (1 + SIZE_GAIN) >= max(rates.values())]
    return min(good, default=micro_batch)


def shown(shares: Shares, total: int) -> str:
    """Rows and passes of the ranks, equal neighbours together: "ranks 0-3: 48 rows in 6 passes, rank 4: 8 rows in 2".

    Args:
        total: rows of the window.
    """
    groups: list[tuple[int, int, str]] = []
    for rank in range(len(shares.rows)):
        passes = shares.passes(total, rank=rank, micro_batch=shares.micro_batch)
        text = f"{sum(map(len, passes))} rows in {len(passes)}"
        if groups and groups[-1][2] == text:
            groups[-1] = (groups[-1][0], rank, text)
        else:
            groups.append((rank, rank, text))
    named = [(f"rank {first}" if first == last else f"ranks {first}-{last}", text) for first, last, text in groups]
    return ", ".join(f"{name}: {text}{'' if n else ' passes'}" for n, (name, text) in enumerate(named))
