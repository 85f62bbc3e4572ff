"""training_metrics.png, drawn from a plot spec that holds exactly the plotted numbers.

`training_spec` is pure (records in, a JSON mapping out); `figure` draws it. The only module with matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raytrain.figures import history
from raytrain.reading import RunRecords, series

_COLOURS = {
    "train": "#2f6bd8",
    "eval": "#d2600a",
    "gradient norm": "#8b46c1",
    "epoch": "#15845a",
    "step": "#15845a",
}
_INK, _SOFT, _GRID = "#18212c", "#566170", "#e3e7ec"


def training_spec(records: RunRecords) -> dict[str, Any]:
    """Three panels: loss; accuracy, or gradient norm where there is none; time per epoch, or per step of one.

    Each series holds the `x` and `y` that are drawn, in full precision.
    """
    accuracy = _lines(
        ("train", series(records.train, "accuracy")), ("eval", series(records.evals, "accuracy"))
    )
    norms = _lines(("gradient norm", series(records.train, "grad_norm")))
    second = _panel("Accuracy", "step", "accuracy", accuracy)
    if not accuracy:
        second = _panel("Gradient norm", "step", "global norm", norms)
    epochs = [
        (row["epoch"], row["epoch_time_s"]) for row in history(records) if row["epoch_time_s"] is not None
    ]
    if len(epochs) > 1:
        third = _panel("Epoch time", "epoch", "seconds", _lines(("epoch", epochs)), kind="bar")
    else:
        third = _panel("Step time", "step", "seconds", _lines(("step", series(records.train, "step_time_s"))))
    losses = _lines(("train", series(records.train, "loss")), ("eval", series(records.evals, "loss")))
    return {"title": records.name, "panels": [_panel("Loss", "step", "loss", losses), second, third]}


def figure(spec: Mapping[str, Any]) -> Figure:
    """Draws a spec on a canvas of its own; no global state of matplotlib is touched."""
    drawn = Figure(figsize=(15, 4.6), dpi=120, facecolor="white", layout="constrained")
    FigureCanvasAgg(drawn)
    drawn.suptitle(
        spec["title"], x=0.008, ha="left", fontsize=14, fontweight="bold", color=_INK, parse_math=False
    )
    for axes, panel in zip(drawn.subplots(1, len(spec["panels"])), spec["panels"], strict=True):
        axes.set_title(panel["title"], loc="left", fontsize=13, color=_INK, pad=10)
        axes.set_xlabel(panel["x_label"], fontsize=11.5, color=_SOFT)
        axes.set_ylabel(panel["y_label"], fontsize=11.5, color=_SOFT)
        axes.tick_params(colors=_SOFT, labelsize=11, length=0)
        axes.grid(True, color=_GRID, linewidth=0.9)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color("#c3cad3")
        for line in panel["series"]:
            _draw(axes, line, kind=panel["kind"])
        if len(panel["series"]) > 1:
            axes.legend(frameon=False, fontsize=11, labelcolor=_INK)
        if not panel["series"]:
            axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=_SOFT, fontsize=12)
        elif panel["y_label"] == "seconds":
            axes.set_ylim(bottom=0)
    return drawn


def png(drawn: Figure) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw(axes: Any, line: Mapping[str, Any], *, kind: str) -> None:
    colour = _COLOURS.get(line["label"], _INK)
    if kind == "bar":
        axes.bar(line["x"], line["y"], color=colour, width=0.7, label=line["label"])
        return
    few = len(line["x"]) <= 40
    axes.plot(
        line["x"],
        line["y"],
        color=colour,
        linewidth=1.8,
        marker="o" if few else "",
        markersize=4.5,
        label=line["label"],
    )


def _panel(title: str, x_label: str, y_label: str, lines: list[Any], *, kind: str = "line") -> dict[str, Any]:
    return {"title": title, "x_label": x_label, "y_label": y_label, "kind": kind, "series": lines}


def _lines(*named: tuple[str, Sequence[tuple[float, float]]]) -> list[dict[str, Any]]:
    return [
        {"label": label, "x": [x for x, _ in points], "y": [y for _, y in points]}
        for label, points in named
        if points
    ]
