"""The loss of a run against its steps, its training time, and the tokens or samples it has seen; also in log scale."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raytrain.report.figures import seconds
from raytrain.report.page.charts import Curve, Mark, chart, short, tabs
from raytrain.report.records import Row, RunRecords, number

#: A loss that falls by this factor is easier to read in log scale.
LOG_RANGE = 1.5


@dataclass(frozen=True)
class Progress:
    """How far a run was at each logged step: seconds of training, without evaluations and saves, and tokens or samples.

    Attributes:
        unit: "tokens" or "samples"; "" where the rows have neither.
    """

    steps: tuple[float, ...]
    spent_s: tuple[float, ...]
    seen: tuple[float, ...]
    unit: str

    def time(self, step: float) -> float:
        """Seconds of training until `step`."""
        return _between(step, self.steps, self.spent_s)

    def data(self, step: float) -> float:
        """Tokens or samples until `step`."""
        return _between(step, self.steps, self.seen)


def progress_of(rows: Sequence[Row]) -> Progress | None:
    """From the train rows, each of which has the mean of the steps since the one before; None without two of them."""
    unit = next((unit for unit in ("tokens", "samples") if any(number(row.get(f"{unit}_per_s")) for row in rows)), "")
    steps, spent, seen = [0.0], [0.0], [0.0]
    for row in rows:
        step, each = number(row.get("step")), number(row.get("step_time_s"))
        if step is None or each is None or step <= steps[-1]:
            continue
        took = each * (step - steps[-1])
        rate = number(row.get(f"{unit}_per_s")) or 0.0
        steps.append(step)
        spent.append(spent[-1] + took)
        seen.append(seen[-1] + rate * took)
    return Progress(tuple(steps), tuple(spent), tuple(seen), unit) if len(steps) > 2 else None


def loss_chart(curves: Sequence[Curve], *, marks: Sequence[Mark], records: RunRecords) -> str:
    """The chart of the losses over the steps, and where it is known over time and data, and in log scale, as tabs."""
    panes = [("by step", chart("Loss", curves, marks=marks, wide=True))]
    known = progress_of(records.train)
    if known is not None:
        moved, times = _moved(curves, known.time), [replace(mark, x=known.time(mark.x)) for mark in marks]
        named = {"at": seconds, "x_tick": seconds, "x_label": "training time"}
        panes.append(("by time", chart("Loss", moved, marks=times, wide=True, **named)))
        if known.unit and known.seen[-1]:
            moved, places = _moved(curves, known.data), [replace(mark, x=known.data(mark.x)) for mark in marks]
            named = {"at": lambda x: f"{short(x)} {known.unit}", "x_label": known.unit}
            panes.append((f"by {known.unit}", chart("Loss", moved, marks=places, wide=True, **named)))
    values = [y for curve in curves for _, y in curve.points if math.isfinite(y)]
    if values and min(values) > 0 and max(values) > LOG_RANGE * min(values):
        panes.append(("log scale", chart("Loss", curves, marks=marks, wide=True, log=True)))
    return tabs("loss", [pane for pane in panes if pane[1]])


def _moved(curves: Sequence[Curve], to: Callable[[float], float]) -> list[Curve]:
    return [replace(curve, points=[(to(x), y) for x, y in curve.points]) for curve in curves]


def _between(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Linear interpolation, and beyond the last point as steep as before it."""
    index = min(max(1, bisect_left(xs, x)), len(xs) - 1)
    left, right = xs[index - 1], xs[index]
    return ys[index - 1] + (ys[index] - ys[index - 1]) * (x - left) / (right - left)
