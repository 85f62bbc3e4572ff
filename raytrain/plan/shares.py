"""`Shares`: how the rows of a global batch are divided among workers of unequal speed. Pure, without torch.

Rows are assigned in full micro-batches; a worker whose device has memory for several of them computes several in one
pass. The assignment follows from the measured seconds and the number of rows alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

SPLITS = 8
"""Micro-batches per equal share with `loop.micro_batch_size: auto`, so that shares can differ by an eighth."""


@dataclass(frozen=True)
class Shares:
    """The measured speed of every worker, one entry per rank.

    Attributes:
        micro_batch: `loop.micro_batch_size` at the time of the measurement: rows are assigned in units of it. If it
            shrinks later, `rows` shrink in proportion.
        rows: the most rows of one pass of each worker.
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
        """Seconds per row of each worker."""
        return tuple(seconds / rows for seconds, rows in zip(self.pass_s, self.rows, strict=True))

    def spans(self, total: int, *, micro_batch: int) -> list[range]:
        """The consecutive rows of each rank in a global batch of `total` rows. The last micro-batch may be shorter."""
        assigned = apportion(-(-total // micro_batch), self.row_s)
        ends = [min(total, micro_batch * units) for units in accumulate(assigned)]
        return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]

    def passes(self, total: int, *, rank: int, micro_batch: int) -> list[range]:
        """The rows of each pass of this rank: as few passes as possible, of full micro-batches, of equal size."""
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
    """Divides `units` equal units among the workers so that the last worker finishes as early as possible.

    Units are assigned one by one, each to the worker that would finish it first (of equals the lowest rank). No other
    division finishes earlier.

    Args:
        unit_s: seconds of one unit on each worker; only their ratios matter.
    """
    assigned = [0] * len(unit_s)
    ready = [(seconds, rank) for rank, seconds in enumerate(unit_s)]
    heapq.heapify(ready)
    for _ in range(units):
        _, rank = heapq.heappop(ready)
        assigned[rank] += 1
        heapq.heappush(ready, ((assigned[rank] + 1) * unit_s[rank], rank))
    return tuple(assigned)


def slowest_s(number: Sequence[int], each_s: Sequence[float]) -> float:
    """Seconds until the last worker has finished its units."""
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


def shares_of(value: Any) -> Shares | None:
    """The shares of a resolved choice, from their JSON; None for "equal"."""
    return None if value == "equal" else Shares.from_json(value)
