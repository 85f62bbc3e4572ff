"""Charts of the report as inline SVG that stretches with the page; `panel` and `line` describe those of `plots`.

Used by all pages: run, comparison, search and inference.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import linear_regression
from typing import Any, Literal

from cluster.wording import counted, measured
from raytrain.report.records import percentile
from raytrain.report.style import esc

Point = tuple[float, float]
_BANDS = 90
_BUCKETS = 400


@dataclass(frozen=True)
class Curve:
    """One series. `colour` is a class of the page (c1 to c12). The line is interrupted before the first point at or
    beyond each x of `gaps`, which are in order."""

    label: str
    points: Sequence[Point]
    colour: str = "c1"
    style: Literal["line", "faint", "dots", "dashed"] = "line"
    gaps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Mark:
    """Something that happened at a step: a `restart` is a vertical line, a `checkpoint` a short one."""

    x: float
    label: str
    kind: Literal["restart", "checkpoint"] = "checkpoint"


def panel(
    title: str, y_label: str, series: list[dict[str, Any]], *, x_label: str = "step", kind: str = "line", **more: Any
) -> dict[str, Any]:
    return {"title": title, "x_label": x_label, "y_label": y_label, "kind": kind, "series": series, **more}


def line(label: str, points: Sequence[tuple[Any, Any]], **more: Any) -> dict[str, Any]:
    return {"label": label, "x": [x for x, _ in points], "y": [y for _, y in points], **more}


def smoothed(points: Sequence[Point]) -> list[Point]:
    """A centred mean over about a thirtieth of the curve. At the ends, where the window loses one half, it is the
    straight line through what is left of it: a mean would lag there, and a narrower window would be noise."""
    reach = max(1, len(points) // 60)
    sums = list(accumulate((y for _, y in points), initial=0.0))
    out = []
    for index, (x, _) in enumerate(points):
        first, last = max(0, index - reach), min(len(points), index + reach + 1)
        value = (sums[last] - sums[first]) / (last - first)
        if last - first < 2 * reach + 1:
            places = range(first, last)
            fitted = linear_regression(places, [y for _, y in points[first:last]]) if len(places) > 1 else (0.0, value)
            value = fitted[0] * index + fitted[1]
        out.append((x, value))
    return out


def chart(
    title: str,
    curves: Sequence[Curve],
    *,
    marks: Sequence[Mark] = (),
    from_zero: bool = False,
    write: Callable[[float], str] = measured,
    tick: Callable[[float], str] | None = None,
    wide: bool = False,
    at: Callable[[float], str] | None = None,
    x_label: str = "step",
    x_tick: Callable[[float], str] | None = None,
) -> str:
    """A figure with axes, gridlines, legend and tooltips; "" if no curve has a point.

    Args:
        write, tick: format a y value in a tooltip, and at the axis.
        wide: span both columns of the page.
        at, x_tick: format an x value in a tooltip, and at the axis; None where x counts steps.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    steps = sorted({x for curve in curves for x, _ in curve.points})
    left, right = steps[0], steps[-1]
    if left == right:
        left, right = left - 0.5, right + 0.5
    low, high, above = _y_range(curves, from_zero=from_zero)

    def x_of(value: float) -> float:
        return 1000 * (value - left) / (right - left)  # in the SVG, from 0 to 1000

    def y_of(value: float) -> float:
        return 1000 * (1 - (min(value, high) - low) / (high - low))  # values above the axis are clamped to it

    x_ticks = [x for x in ticks(left, right, 6) if at is not None or float(x).is_integer()]
    y_ticks = ticks(low, high, 5)
    note = f"<p class=note>{counted(above, 'point')} above the axis.</p>" if above else ""
    lines = "".join(_svg_curve(curve, x_of, y_of) for curve in curves)
    grid = "".join(f'<path class="grid" d="M0 {y_of(y):.1f}H1000"/>' for y in y_ticks)
    marks = [mark for mark in marks if left <= mark.x <= right]
    tops = {"restart": 0, "checkpoint": 970}
    stems = "".join(f'<path class="{mark.kind}" d="M{x_of(mark.x):.1f} {tops[mark.kind]}V1000"/>' for mark in marks)
    drawn = [curve for curve in curves if curve.style != "faint"]
    named = [(f"{curve.colour} {curve.style}", curve.label) for curve in drawn]
    named += sorted({(mark.kind, mark.kind) for mark in marks})
    tick, x_tick = tick or short, x_tick or short
    labels = [f'<span class="yt" style="top:{y_of(y) / 10:.2f}%">{esc(tick(y))}</span>' for y in y_ticks]
    labels += [f'<span class="xt" style="left:{x_of(x) / 10:.2f}%">{esc(x_tick(x))}</span>' for x in x_ticks]
    values = "; ".join(f"{one.label} from {write(one.points[0][1])} to {write(one.points[-1][1])}" for one in drawn)
    legend = "".join(f'<span><i class="key {kind}"></i>{esc(label)}</span>' for kind, label in named)
    return (
        f'<figure class="chart{" wide" if wide else ""}"><figcaption><span class="title">{esc(title)}</span>'
        f'<span class="legend">{legend}</span></figcaption>{note}'
        f'<div class="plot"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{esc(title)}: {esc(values)}">{grid}<path class="axis" d="M0 1000H1000"/>'
        f"{stems}{lines}</svg>{''.join(labels)}"
        f'<span class="xl">{esc(x_label)}</span>'
        f"{_bands(drawn, steps, marks, x_of, write, at or (lambda x: f'step {int(x):,}'))}</div></figure>"
    )


def ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) inside [low, high], about `count` of them."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def short(value: float) -> str:
    """A tick label: 1,500 as 1.5k, 0.00025 as 2.5e-4."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.4g}{unit}"
    if value and abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.4g}"


def _y_range(curves: Sequence[Curve], *, from_zero: bool) -> tuple[float, float, int]:
    """(low, high, number of points above), chosen so that a few outliers do not flatten the rest of the curve."""
    ys = [y for curve in curves for _, y in curve.points]
    low, high = min(ys), max(ys)
    usual = percentile(ys, 0.95) or 0.0
    above = 0
    if len(ys) > 20 and low >= 0 and usual > 0 and high > 10 * usual:
        high = 2 * usual
        above = sum(y > high for y in ys)
    if from_zero or (low >= 0 and low < 0.25 * high):
        low = min(0.0, low)
    if high - low <= 1e-12 * max(abs(high), 1e-300):
        pad = 0.5 * abs(high) or 1.0
        return (low if from_zero and high > 0 else low - pad), high + pad, above
    pad = 0.06 * (high - low)
    return (low if low == 0 else low - pad), high + pad, above


def _svg_curve(curve: Curve, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> str:
    thinned = list(curve.points)
    if len(thinned) > 2 * _BUCKETS:  # of each bucket the lowest point and the highest, so that no spike is lost
        edges = [bucket * len(thinned) // _BUCKETS for bucket in range(_BUCKETS + 1)]
        buckets = [thinned[start:end] for start, end in pairwise(edges)]
        thinned = [
            one
            for part in buckets
            for one in sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
        ]
    places = [(x_of(x), y_of(y)) for x, y in thinned]
    dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
    path = f'<path class="dot {curve.colour}" d="{dots}"/>' if curve.style == "dots" or len(places) == 1 else ""
    if len(places) > 1:
        ends = [0, *(bisect_left(thinned, gap, key=lambda point: point[0]) for gap in curve.gaps), len(places)]
        parts = ["L".join(f"{x:.1f} {y:.1f}" for x, y in places[start:end]) for start, end in pairwise(ends)]
        joined = "".join(f"M{part}{'' if 'L' in part else 'h0'}" for part in parts if part)
        path = f'<path class="{"line" if curve.style == "dots" else curve.style} {curve.colour}" d="{joined}"/>{path}'
    return path


def _bands(
    curves: Sequence[Curve], steps: Sequence[float], marks: Sequence[Mark],
    x_of: Callable[[float], float], write: Callable[[float], str], at: Callable[[float], str],
) -> str:  # fmt: skip
    """Hover bands over the plot, each with a vertical line and the values at its step."""
    if len(steps) > _BANDS:
        steps = [steps[round(index * (len(steps) - 1) / (_BANDS - 1))] for index in range(_BANDS)]
    places = [x_of(step) / 10 for step in steps]
    out = []
    for index, (step, place) in enumerate(zip(steps, places, strict=True)):
        start = (places[index - 1] + place) / 2 if index else 0.0
        end = (place + places[index + 1]) / 2 if index + 1 < len(places) else 100.0
        side = "r" if place > 50 else "l"
        rows = ""  # of each curve the value at its last point up to the step
        for curve in curves:
            if at_least := bisect_right(curve.points, step, key=lambda point: point[0]):
                value = write(curve.points[at_least - 1][1])
                rows += f'<br><i class="key {curve.colour}"></i>{esc(curve.label)} {esc(value)}'
        hair = 100 * (place - start) / (end - start) if end > start else 0
        near = [mark.label for mark in marks if start <= x_of(mark.x) / 10 < end]
        events = "".join(f"<br>{esc(label)}" for label in near[:2])
        out.append(
            f'<div class="hit {side}" style="left:{start:.2f}%;width:{end - start:.2f}%">'
            f'<i style="left:{hair:.1f}%"></i><span class="tip">{esc(at(step))}{rows}{events}</span></div>'
        )
    return "".join(out)
