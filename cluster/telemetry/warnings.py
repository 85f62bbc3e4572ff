"""Warnings about memory from the rows of one node: nearly full, or growing without end (a trend test over samples).

The telemetry of a run checks every row with them; `raytrain check JOB.yaml` uses the same limits.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.wording import counted, size

# ---------------------------------------------------------------- trend

#: Samples before the first verdict. A third of them is left out as warm-up, and 10 are what the test needs.
FIRST_VERDICT = 16
#: The next verdict comes after this many times as many samples: few verdicts, so that noise has few chances.
NEXT_VERDICT = 1.5
#: Of the Mann-Kendall test, one-sided: noise alone exceeds it once in 20,000 verdicts.
SIGNIFICANT = 3.9
#: Between the medians of its four quarters a leak grows by the same amount; the least of the three must be at least
#: this fraction of their mean. A warm-up (allocator caches, a filling pool) decays: it fails once it has lasted 2.3
#: times its time constant. A single step, such as that of the first evaluation, fails at once.
STEADY = 0.65
#: The same with fewer than `FEW` samples, which show less of a warm-up's decay.
FEW, STEADY_OF_FEW = 24, 0.88
#: Growth below this many bytes, or this fraction of the level, is not reported, however steady.
LEAST_BYTES, LEAST_FRACTION = 16 * 2**20, 0.03
#: Most samples that are kept; beyond it every second one is dropped.
KEPT = 512


@dataclass(frozen=True)
class Growth:
    """A trend: `bytes_per_s` (the median of all slopes) over `seconds`, from `first` to `last` bytes."""

    bytes_per_s: float
    seconds: float
    first: float
    last: float


class TrendTest:
    """Collects (time, bytes) of one process or device, and says once that it grows."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._seen = 0
        self._next = FIRST_VERDICT
        self._stride = 1

    def add(self, time: float, used: float, *, ready: bool = True) -> Growth | None:
        """Add a sample; returns the growth if a verdict is due (later, where `ready` is false) and the memory grows."""
        if self._seen % self._stride == 0:
            self.points.append((time, used))
        self._seen += 1
        if self._seen < self._next or not ready:
            return None
        self._next = math.ceil(self._seen * NEXT_VERDICT)
        found = growth(self.points)
        if len(self.points) > KEPT:
            self.points, self._stride = self.points[::2], 2 * self._stride
        return found


def growth(points: Sequence[tuple[float, float]]) -> Growth | None:
    """The growth of (seconds, bytes); None if the samples after the warm-up (the first third) do not grow steadily."""
    late = points[len(points) // 3 :]
    if len(late) < 2 * FIRST_VERDICT // 3 or late[-1][0] <= late[0][0]:
        return None
    values = [used for _, used in late]
    if _mann_kendall(values) < SIGNIFICANT:
        return None
    edges = [len(values) * quarter // 4 for quarter in range(5)]
    levels = [statistics.median(values[begin:end]) for begin, end in itertools.pairwise(edges)]
    rises = [later - before for before, later in itertools.pairwise(levels)]
    if min(rises) < (STEADY if len(points) >= FEW else STEADY_OF_FEW) * statistics.fmean(rises):
        return None
    seconds, rate = late[-1][0] - late[0][0], _slope(late)
    if rate * seconds < max(LEAST_BYTES, LEAST_FRACTION * values[0]):
        return None
    return Growth(rate, seconds, values[0], values[-1])


def _mann_kendall(values: Sequence[float]) -> float:
    """The statistic z: about standard normal for values without a trend, large for rising ones; ties are accounted."""
    number = len(values)
    rises = sum((b > a) - (b < a) for i, a in enumerate(values) for b in values[i + 1 :])
    ties = [values.count(value) for value in set(values)]
    variance = (number * (number - 1) * (2 * number + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    if variance <= 0 or rises == 0:
        return 0.0
    return (rises - math.copysign(1, rises)) / math.sqrt(variance)


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope between all pairs (Theil-Sen), which single outliers do not move."""
    slopes = [
        (later - before) / (at - earlier)
        for i, (earlier, before) in enumerate(points)
        for at, later in points[i + 1 :]
        if at > earlier
    ]
    return statistics.median(slopes) if slopes else 0.0


# ---------------------------------------------------------------- warnings

#: A device is nearly full above this fraction of its memory: the default of `cluster.memory_fraction`, up to which a
#: run plans. What lies above is for the driver, the kernel and other processes.
HIGH = 0.9
#: Growth is looked for after this many steps of an attempt: the allocator's caches, the optimizer's state and the first
#: evaluation come before. And over at least this many, since a few steps show no trend.
WARM_UP_STEPS, LEAST_STEPS = 20, 40
#: In the title of a worker's process, which compares its own memory with its limit, since it can name its tensors.
WORKER = "RayTrainWorker"


@dataclass(frozen=True)
class MemoryWarning:
    """A warning of the kind `what` ("high_memory" or "memory_growth"), and the `figures` in its text. `key` is the same
    for every warning of one cause, of which a run shows the first only."""

    key: str
    what: str
    text: str
    figures: dict[str, Any] = field(default_factory=dict)


class MemoryWatch:
    """Looks for memory that is nearly full (above the fraction `high` of it) and for memory that grows without end.
    `limit` is that of one process of the run (`cluster.memory_limit`), or None."""

    def __init__(self, *, limit: int | None = None, high: float = HIGH) -> None:
        self._limit, self._high = limit, high
        self._trends: dict[tuple[str, Any], TrendTest] = {}
        self._began: tuple[Any, int] | None = None

    def look(self, row: Mapping[str, Any]) -> list[MemoryWarning]:
        """The warnings that this row of telemetry gives rise to; a caller shows each `key` once."""
        found = []
        steps = self._steps(row)
        for device in row["devices"]:
            used, total = device["memory_used"], device["memory_total"]
            if used and total and used > self._high * total:
                own, other = device["memory_run"], device["memory_other"]
                whose = "" if own is None else f", {size(own)} of it by this run and {size(other)} by others"
                text = (
                    f"{device['device']} of {row['node']} uses {used / total:.0%} of its {size(total)} of memory"
                    f"{whose}: lower loop.micro_batch_size, or end what else runs there"
                )
                figures = {"used": used, "total": total, "run": own, "other": other}
                found.append(MemoryWarning(f"high {row['node']} {device['device']}", "high_memory", text, figures))
            if device["kind"] != "cpu" and device["memory_run"] is not None:
                found += self._growing(row, steps, device["device"], "", device["memory_run"])
        for process in row["processes"]:
            if self._limit and WORKER not in process["name"] and process["rss"] > self._high * self._limit:
                text = (
                    f"{process['name']} (pid {process['pid']}) on {row['node']} uses {size(process['rss'])}, "
                    f"{process['rss'] / self._limit:.0%} of cluster.memory_limit ({size(self._limit)}): "
                    "lower loop.micro_batch_size or raise the limit"
                )
                figures = {"used": process["rss"], "total": self._limit, "pid": process["pid"]}
                found.append(
                    MemoryWarning(f"high {row['node']} process {process['pid']}", "high_memory", text, figures)
                )
            found += self._growing(row, steps, process["pid"], process["name"], process["anonymous"])
        alive = {process["pid"] for process in row["processes"]} | {device["device"] for device in row["devices"]}
        self._trends = {key: trend for key, trend in self._trends.items() if key[1] in alive}
        return found

    def _steps(self, row: Mapping[str, Any]) -> int:
        """Steps of this attempt so far; a new attempt counts from zero."""
        if self._began is None or self._began[0] != row["attempt"]:
            self._began = row["attempt"], row["step"]
            self._trends.clear()
        return row["step"] - self._began[1]

    def _growing(self, row: Mapping[str, Any], steps: int, who: Any, name: str, used: int) -> list[MemoryWarning]:
        if steps < WARM_UP_STEPS:
            return []
        trend = self._trends.setdefault((row["node"], who), TrendTest())
        found = trend.add(row["time"], used, ready=steps >= WARM_UP_STEPS + LEAST_STEPS)
        if found is None:
            return []
        title = f"{name} (pid {who})" if name else str(who)
        device = next((one for one in row["devices"] if one["device"] == who), row["devices"][0])
        free = (device["memory_total"] or 0) - (device["memory_used"] or 0)
        # the other processes of the node whose memory grows fill the same memory
        tests = [test for (node, other), test in self._trends.items() if node == row["node"] and other != who]
        grown = [growth(test.points) for test in tests if name]
        others = [one.bytes_per_s for one in grown if one is not None]
        along = f", with that of {counted(len(others), 'other process', 'other processes')}," if others else ""
        full_s = free / (found.bytes_per_s + sum(others))
        left = f"; at this rate{along} memory is full in {_duration(full_s)}" if free > 0 else ""
        step_s = 1.5 * found.seconds / (steps - WARM_UP_STEPS)  # the trend is of the last two thirds of the steps
        each = found.bytes_per_s * step_s
        text = (
            f"the memory of {title} on {row['node']} grows by {size(60 * found.bytes_per_s)} a minute, "
            f"about {each / 2**20:.2g} MiB a step, from "
            f"{size(found.first)} to {size(found.last)} in {_duration(found.seconds)}{left}: look for tensors that are "
            "kept between steps, such as losses collected in a list without .item()"
        )
        rates = {"bytes_per_s": found.bytes_per_s, "bytes_per_step": each}
        figures = {**rates, "seconds": found.seconds, "first": found.first, "last": found.last}
        figures |= {"pid": who} if name else {}
        return [MemoryWarning(f"growth {row['node']} {who}", "memory_growth", text, figures)]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
