"""The telemetry of a run as curves over its steps, beside the throughput: a chart per figure, a curve per device."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain.report.page.charts import Curve, chart, smoothed
from raytrain.report.records import Row, RunRecords, listed, mapping, number, series, values

MOST_CURVES = 8
"""Devices drawn; of more, those whose figure is highest at the end."""
POINTS = 400
"""Most points of a curve; of more, every nth is drawn."""
CHARTS = (
    ("Utilisation", "utilisation", 1.0, "%"),
    ("Memory in use", "memory_used", 2**30, "GiB"),
    ("Memory of the run", "memory_run", 2**30, "GiB"),
    ("Temperature", "temperature_c", 1.0, "°C"),
    ("Power", "power_w", 1.0, "W"),
    ("Clock", "clock_mhz", 1.0, "MHz"),
)
"""Title, key of a device, divisor and unit."""


def telemetry_charts(records: RunRecords) -> str:
    """The charts; "" for a run without telemetry."""
    rows = [row for row in records.telemetry if number(row.get("step")) is not None]
    if not rows:
        return ""
    rate = "tokens" if values(records.train, "tokens_per_s") else "samples"
    speed = [Curve(f"{rate} per second", series(records.train, f"{rate}_per_s"), "c6")]
    found = [chart("Throughput", speed, from_zero=True)]
    for title, key, divisor, unit in CHARTS:
        curves = device_curves(rows, key, divisor=divisor)
        found.append(chart(f"{title} ({unit})", curves, from_zero=key != "temperature_c"))
    inner = "".join(found)
    slowed = sorted({reason for row in rows for one in listed(row.get("devices")) for reason in throttled(one)})
    note = f"<p>Devices were slowed down by: {', '.join(slowed)}.</p>" if slowed else ""
    return f'<div class="charts">{inner}</div>{note}'


def device_curves(rows: Sequence[Row], key: str, *, divisor: float = 1.0) -> list[Curve]:
    """A curve over the steps for each device that reports the figure."""
    points: dict[str, list[tuple[float, float]]] = {}
    several = len({row.get("node") for row in rows}) > 1
    for row in rows:
        for device in map(mapping, listed(row.get("devices"))):
            value, step = number(device.get(key)), number(row.get("step"))
            if value is not None and step is not None:
                name = str(device.get("device"))
                name = f"{row.get('node')} {name}" if several else name
                points.setdefault(name, []).append((step, value / divisor))
    drawn = sorted(points, key=lambda name: -points[name][-1][1])[:MOST_CURVES]
    return [
        Curve(name, _thinned(points[name]), f"c{place % 8 + 1}")
        for place, name in enumerate(sorted(drawn))
        if len(points[name]) > 1
    ]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) <= POINTS:
        return points
    return smoothed(points)[:: -(-len(points) // POINTS)]


def throttled(device: Row) -> list[str]:
    """The reasons for which a device of a row is slowed down."""
    return [f"{reason} ({device.get('device')})" for reason in map(str, listed(mapping(device).get("throttle")))]
