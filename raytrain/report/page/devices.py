"""The telemetry of a run as curves over its steps: a chart per figure, a curve per device.

Steps that were lost and repeated after a restart are drawn faint beside the line, which is interrupted there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from raytrain.report.figures import measured
from raytrain.report.page.charts import Curve, Mark, Point, chart, smoothed
from raytrain.report.page.style import esc
from raytrain.report.records import Row, RunRecords, listed, mapping, number

MOST_CURVES = 8
"""Devices drawn; of more, those whose figure is highest at the end."""
POINTS = 400
"""Most points of a curve; of more, every nth is drawn."""
STEADY = 0.005
"""Figures that differ by less than this from each other are listed in a line below the charts."""


@dataclass(frozen=True)
class Figure:
    """A figure of a device: its title, its key in telemetry, the divisor to `unit`, what stands for the samples within
    a step, and whether its axis begins at zero."""

    title: str
    key: str
    unit: str
    divisor: float = 1.0
    of_step: Callable[[Sequence[float]], float] = statistics.fmean
    from_zero: bool = True


FIGURES = (
    Figure("Utilisation", "utilisation", "%"),
    Figure("Memory in use", "memory_used", "GiB", 2**30, max),
    Figure("Memory of the run", "memory_run", "GiB", 2**30, max),
    Figure("Temperature", "temperature_c", "°C", from_zero=False),
    Figure("Power", "power_w", "W"),
    Figure("Clock", "clock_mhz", "MHz"),
)


@dataclass
class Trace:
    """The samples of one device, divided where the step went back: `kept` are the parts of the run's own steps, `lost`
    those of steps that a restart repeated. Each part begins where the one before was interrupted."""

    kept: list[list[Point]] = field(default_factory=list)
    lost: list[list[Point]] = field(default_factory=list)

    def curves(self, name: str, colour: str) -> list[Curve]:
        """The lost parts faint, and the line, interrupted between the kept parts."""
        total = sum(map(len, self.kept))
        points = [point for part in self.kept for point in _thinned(part, total)]
        gaps = tuple(part[0][0] for part in self.kept[1:])
        faint = [Curve(name, part, colour, "faint") for part in self.lost if len(part) > 1]
        return [*faint, Curve(name, points, colour, gaps=gaps)] if len(points) > 1 else []


def telemetry_charts(records: RunRecords, marks: Sequence[Mark] = ()) -> str:
    """The charts; "" for a run without telemetry. `marks` are drawn in each of them."""
    rows = [row for row in records.telemetry if number(row.get("step")) is not None]
    starts: dict[object, float] = {
        row.get("attempt"): number(row.get("from_step")) or 0.0 for row in records.of_kind("attempt")
    }
    found, steady, lost = [], [], False
    for figure in FIGURES:
        curves = device_curves(rows, figure, starts=starts)
        values = [y for curve in curves for _, y in curve.points]
        if values and max(values) - min(values) <= STEADY * abs(max(values)):
            steady.append(f"{figure.title}: {measured(max(values))} {figure.unit} throughout")
            continue
        lost |= any(curve.style == "faint" for curve in curves)
        found.append(chart(f"{figure.title} ({figure.unit})", curves, marks=marks, from_zero=figure.from_zero))
    inner = "".join(found)
    slowed = sorted({reason for row in rows for one in listed(row.get("devices")) for reason in throttled(one)})
    notes = ["Faint: steps that were lost with a worker and repeated"] if lost else []
    notes += [*steady, *([f"Devices were slowed down by: {', '.join(slowed)}"] if slowed else [])]
    note = f'<p class="note">{esc(". ".join(notes))}.</p>' if notes else ""
    return f'<div class="charts devices">{inner}</div>{note}' if inner else note


def device_curves(rows: Sequence[Row], figure: Figure, *, starts: Mapping[object, float]) -> list[Curve]:
    """A curve over the steps for each device that reports the figure.

    Args:
        starts: attempt -> the step that it started from.
    """
    traces: dict[str, Trace] = {}
    several = len({row.get("node") for row in rows}) > 1
    for node, own in _by_node(rows).items():
        steps = [max(number(row.get("step")) or 0.0, starts.get(row.get("attempt"), 0.0)) for row in own]
        limits = _limits(own, steps, starts)
        samples: dict[str, list[tuple[float, float, object, bool]]] = {}
        for row, step, limit in zip(own, steps, limits, strict=True):
            for device in map(mapping, listed(row.get("devices"))):
                if (value := number(device.get(figure.key))) is not None:
                    name = f"{node} {device.get('device')}" if several else str(device.get("device"))
                    sample = (step, value / figure.divisor, row.get("attempt"), step > limit)
                    samples.setdefault(name, []).append(sample)
        traces |= {name: _trace(seen, figure) for name, seen in samples.items()}
    drawn = sorted((name for name in traces if traces[name].kept), key=lambda name: -traces[name].kept[-1][-1][1])
    return [
        curve
        for place, name in enumerate(sorted(drawn[:MOST_CURVES]))
        for curve in traces[name].curves(name, f"c{place % 8 + 1}")
    ]


def _by_node(rows: Sequence[Row]) -> dict[object, list[Row]]:
    found: dict[object, list[Row]] = {}
    for row in rows:
        found.setdefault(row.get("node"), []).append(row)
    return found


def _limits(rows: Sequence[Row], steps: Sequence[float], starts: Mapping[object, float]) -> list[float]:
    """For each row the step beyond which the run went on from an earlier one: the lowest that a later attempt started
    from, or that a later row has, since remote state is also rewound within an attempt."""
    limits, lowest, attempt = [], math.inf, None
    for row, step in zip(reversed(rows), reversed(steps), strict=True):
        if row.get("attempt") != attempt:
            attempt = row.get("attempt")
            lowest = min([lowest, *(start for other, start in starts.items() if _follows(other, attempt))])
        limits.append(lowest)
        lowest = min(lowest, step)
    return limits[::-1]


def _follows(other: object, attempt: object) -> bool:
    return isinstance(other, int) and isinstance(attempt, int) and other > attempt


def _trace(samples: Sequence[tuple[float, float, object, bool]], figure: Figure) -> Trace:
    """Samples (step, value, attempt, lost) in order of time; those of one step become one point."""
    trace, previous = Trace(), None
    for (attempt, lost), group in groupby(samples, key=lambda sample: sample[2:]):
        steps = groupby(group, key=lambda sample: sample[0])
        part = [(step, figure.of_step([value for _, value, *_ in same])) for step, same in steps]
        if lost:
            begins = trace.kept[-1][-1:] if trace.kept and previous == (attempt, False) else []
            trace.lost.append([*begins, *part])
        else:
            while trace.kept and trace.kept[-1][-1][0] >= part[0][0]:  # of a step, the later attempt counts
                trace.kept[-1].pop()
                trace.kept = [kept for kept in trace.kept if kept]
            trace.kept.append(part)
        previous = (attempt, lost)
    return trace


def _thinned(points: Sequence[Point], total: int) -> Sequence[Point]:
    if total <= POINTS:
        return points
    return smoothed(points)[:: -(-total // POINTS)]


def throttled(device: Row) -> list[str]:
    """The reasons for which a device of a row is slowed down."""
    return [f"{reason} ({device.get('device')})" for reason in map(str, listed(mapping(device).get("throttle")))]
