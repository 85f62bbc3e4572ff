"""Workers that differ or change: shares of a batch by speed, and the number of workers of an elastic run.

`Shares` travels in the plan to `raytrain.data.rows.batches`, which divides each batch by it; the driver asks
`ElasticWorkers` when nodes come or go.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from cluster.devices.inventory import Inventory
from cluster.wording import counted
from raytrain.config.decode import JsonRecord
from raytrain.config.sections import LoopConfig, ScaleConfig
from raytrain.errors import WorkersChange
from raytrain.plan.choice import Choice, Deferred, Resolved
from raytrain.plan.machines import DevicePool, spread

SPLITS = 8
"""Micro-batches per equal share with `loop.micro_batch_size: auto`, so that shares can differ by an eighth."""


@dataclass(frozen=True)
class Shares(JsonRecord):
    """The measured speed of every worker, one entry per rank.

    `micro_batch` is `loop.micro_batch_size` at the time of the measurement: rows are assigned in units of it. If it
    shrinks later, `rows` shrink in proportion.
    """

    micro_batch: int
    rows: tuple[int, ...]  # the most rows of one pass of each worker
    pass_s: tuple[float, ...]  # seconds of one such pass; only their ratios matter

    def __post_init__(self) -> None:
        if not len(self.rows) == len(self.pass_s) > 0 or min(self.rows) < 1 or min(self.pass_s) <= 0:
            raise ValueError(f"shares of {self.rows} rows in {self.pass_s} seconds")

    @property
    def row_s(self) -> tuple[float, ...]:
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


@lru_cache(maxsize=64)
def apportion(units: int, unit_s: tuple[float, ...]) -> tuple[int, ...]:
    """Divides `units` equal units among the workers so that the last worker finishes as early as possible.

    Units are assigned one by one, each to the worker that would finish it first (of equals the lowest rank). No other
    division finishes earlier. `unit_s` are the seconds of one unit on each worker; only their ratios matter.
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
    return max(count * seconds for count, seconds in zip(number, each_s, strict=True))


def gain_over_equal(shares: Shares, *, total: int, plain_s: Sequence[float]) -> float:
    """How many times as fast a window of `total` rows is as with equal shares, where each worker takes `plain_s` for a
    pass of `shares.micro_batch` rows."""
    units = -(-total // shares.micro_batch)
    equal = slowest_s(apportion(units, (1.0,) * len(plain_s)), plain_s)
    own = tuple(shares.micro_batch * seconds for seconds in shares.row_s)
    return equal / slowest_s(apportion(units, shares.row_s), own)


def shares_of(value: Any) -> Shares | None:
    """The shares of a resolved choice, from their JSON; None for "equal"."""
    return None if value == "equal" else Shares.from_json(value)


# ---- what the plan says of them

MEASURED = "measured at the start, on all workers at the same time"
EVENLY = "shares follow the measurement, and stay equal if unequal ones would save less than 5 %"


def splits(scale: ScaleConfig, *, workers: int, hosts: Resolved) -> int:
    """Number of micro-batches into which `loop.micro_batch_size: auto` cuts a worker's equal share."""
    if scale.strategy == "fsdp":
        return 1
    return SPLITS if scale.shares == "auto" and workers > 1 and hosts.value in ("none", 0) else 1


def choose_shares(
    scale: ScaleConfig, loop: LoopConfig, machines: DevicePool, inventory: Inventory, choices: Mapping[str, Choice], *,
    hosts: Resolved,
) -> Choice | None:  # fmt: skip
    """Micro-batches of each worker; None if `scale.shares` is equal."""
    if scale.shares == "equal":
        return None
    if scale.strategy == "fsdp":
        return Resolved("equal", "scale.strategy fsdp: every block of every pass is a collective of all workers")
    workers, accumulation = (choices[name].value_or(1) for name in ("workers", "accumulation"))
    if workers == 1:
        return Resolved("equal", "there is one worker")
    if hosts.value not in ("none", 0):
        return Resolved(
            "equal", "with experts outside the workers each pass waits for all workers: more passes on one worker would"
            " make the others wait; experts.hosts 0 keeps the experts in every worker",
        )  # fmt: skip
    if loop.micro_batch_size != "auto" and accumulation == 1:
        return Resolved("equal", "each worker has at most one micro-batch: lower loop.micro_batch_size")
    counts = spread(workers, machines, inventory)
    here = {host: [gpu for node, found in machines.pool if node.host == host for gpu in found] for host in counts}
    kinds = Counter(gpu.name for host, number in counts.items() for gpu in here[host][:number])
    there = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    return Deferred(MEASURED, (), f"{EVENLY}; {there or 'CPUs of unknown speed'}")


# ---- scale.workers: [min, max]

#: Room for more workers must last this long, so that nodes which arrive together cause one restart.
GROW_AFTER_S = 10.0
#: Ray releases what a lost group of workers held within this time.
SHRINK_AFTER_S = 5.0


class ElasticWorkers:
    """Decides when a run of `workers` within the bounds (min, max) continues with another number of them."""

    def __init__(self, bounds: tuple[int, int], workers: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._least, self._most, self._workers, self._clock = *bounds, workers, clock
        self._fits, self._since = workers, clock()

    def decide(self, *, room: int, waiting: bool) -> WorkersChange | None:
        """The number to continue with, once the cluster has had room for it for a while: for `room` workers, where
        `waiting` means that none has started, as there is no room for all of them."""
        fits = min(self._most, room if waiting else self._workers + room)
        changes = self._least <= fits < self._workers if waiting else fits > self._workers
        now = self._clock()
        if not changes or fits != self._fits:
            self._fits, self._since = fits if changes else self._workers, now
            return None
        if now - self._since < (SHRINK_AFTER_S if waiting else GROW_AFTER_S):
            return None
        what = "the cluster has no more room" if waiting else "the cluster has room for more"
        workers = counted(fits, "worker")
        same = "on the same samples, with losses equal to rounding"
        return WorkersChange(fits, f"{what}: the run continues with {workers} instead of {self._workers}, {same}")
