"""The telemetry of a run as curves over its steps: a chart per figure, a curve per device.

Steps that were lost and repeated after a restart are drawn faint beside the line, which is interrupted there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from statistics import fmean

from cluster.wording import measured
from raytrain.report.page.charts import Curve, Mark, Point, chart
from raytrain.report.page.style import esc
from raytrain.report.records import Row, RunRecords, listed, mapping, number

MOST_CURVES = 8
"""Devices drawn; of more, those whose figure is highest at the end."""
STEADY = 0.005
"""Figures that differ by less than this from each other are listed in a line below the charts."""
FIGURES = {
    "utilisation": ("Utilisation", "%", 1.0), "memory_used": ("Memory in use", "GiB", 2.0**30),
    "memory_run": ("Memory of the run", "GiB", 2.0**30), "temperature_c": ("Temperature", "°C", 1.0),
    "power_w": ("Power", "W", 1.0), "clock_mhz": ("Clock", "MHz", 1.0),
}  # fmt: skip
"""Key of a device in telemetry -> the title of its chart, the unit, and the divisor to it."""


def telemetry_charts(records: RunRecords, marks: Sequence[Mark] = ()) -> str:
    """The charts; "" for a run without telemetry. `marks` are drawn in each of them."""
    rows = [row for row in records.telemetry if number(row.get("step")) is not None]
    starts: dict[object, float] = {
        row.get("attempt"): number(row.get("from_step")) or 0.0 for row in records.of_kind("attempt")
    }
    found, notes = [], []
    for key, (title, unit, _) in FIGURES.items():
        curves = device_curves(rows, key, starts=starts)
        values = [y for curve in curves for _, y in curve.points]
        if values and max(values) - min(values) <= STEADY * abs(max(values)):
            notes.append(f"{title}: {measured(max(values))} {unit} throughout")
            continue
        if any(curve.style == "faint" for curve in curves) and not found:
            notes.append("Faint: steps that were lost with a worker and repeated")
        found.append(chart(f"{title} ({unit})", curves, marks=marks, from_zero=key != "temperature_c"))
    slowed = {f"{why} ({device.get('device')})" for row in rows for device in _devices(row)
              for why in listed(device.get("throttle"))}  # fmt: skip
    notes += [f"Devices were slowed down by: {', '.join(sorted(slowed))}"] if slowed else []
    inner, note = "".join(found), f'<p class="note">{esc(". ".join(notes))}.</p>' if notes else ""
    return f'<div class="charts devices">{inner}</div>{note}' if inner else note


def _devices(row: Row) -> list[Row]:
    return [mapping(device) for device in listed(row.get("devices"))]


def device_curves(rows: Sequence[Row], key: str, *, starts: Mapping[object, float]) -> list[Curve]:
    """A curve over the steps for each device that reports the figure, after those of the steps that it lost.

    Args:
        starts: attempt -> the step that it started from.
    """
    several = len({row.get("node") for row in rows}) > 1
    samples: dict[str, list[tuple[float, object, float]]] = {}
    for row in rows:
        # a sample from before the state was loaded counts at the start of its attempt
        step = max(number(row.get("step")) or 0.0, starts.get(row.get("attempt"), 0.0))
        for device in _devices(row):
            if (value := number(device.get(key))) is not None:
                name = f"{row.get('node')} {device.get('device')}" if several else str(device.get("device"))
                samples.setdefault(name, []).append((step, row.get("attempt"), value / FIGURES[key][2]))
    traces = {name: _trace(seen, largest=key.startswith("memory")) for name, seen in samples.items()}
    highest = sorted(traces, key=lambda name: -traces[name][0][-1][1])[:MOST_CURVES]
    curves = []
    for place, name in enumerate(sorted(highest)):
        kept, lost, gaps = traces[name]
        colour = f"c{place % 8 + 1}"
        curves += [Curve(name, part, colour, "faint") for part in lost if len(part) > 1]
        curves += [Curve(name, kept, colour, gaps=gaps)] if len(kept) > 1 else []
    return curves


def _trace(
    samples: Sequence[tuple[float, object, float]], *, largest: bool
) -> tuple[list[Point], list[list[Point]], tuple[float, ...]]:
    """(points of the run's own steps, parts that a restart repeated, steps at which the line is interrupted) from
    samples (step, attempt, value) in order of time; those of one step are one point, their largest value or mean."""
    kept: list[tuple[float, object, list[float]]] = []
    lost: list[list[Point]] = []
    gaps: list[float] = []
    value_of = max if largest else fmean
    for step, attempt, value in samples:
        if kept and step < kept[-1][0]:
            first = bisect_left(kept, step, key=lambda point: point[0])
            lost.append([(at, value_of(seen)) for at, _, seen in kept[first:]])
            del kept[first:]
            gaps.append(step)
        elif kept and attempt != kept[-1][1]:
            gaps.append(step)
        if kept and kept[-1][0] == step:
            if attempt != kept[-1][1]:  # of a step, the later attempt counts
                kept[-1] = (step, attempt, [])
            kept[-1][2].append(value)
        else:
            kept.append((step, attempt, [value]))
    return [(at, value_of(seen)) for at, _, seen in kept], lost, tuple(gaps)
