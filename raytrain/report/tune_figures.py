"""Plot specs of a search, as JSON mappings with exactly the plotted numbers, built from the trial rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.wording import counted

MIB = 2**20
NAMED = 8
"""Most trials whose lines are all labelled; with more, only the best one is."""


def whole_spec(
    rows: Sequence[Mapping[str, Any]], curves: Mapping[int, Sequence[tuple[int, float]]], *, best: int, metric: str,
    name: str,
) -> dict[str, Any]:  # fmt: skip
    """Trials that are complete runs: evaluation losses by step, and the metric of each trial.

    Args:
        rows: rows of trials.jsonl.
        curves: trial -> (step, loss) of each evaluation.
        best: number of the chosen trial.
        metric: "eval_loss" or "samples_per_s".
    """
    metric_label = {"eval_loss": "lowest eval loss", "samples_per_s": "samples per second"}[metric]
    lines = []
    for row in sorted(rows, key=lambda one: one["trial"] == best):
        points = [(step, loss) for step, loss in curves.get(row["trial"], ()) if math.isfinite(loss)]
        if points:
            label = _label(row)
            if len(rows) > NAMED and row["trial"] != best:
                label = ""
            lines.append(_line(label, points, faint=row["trial"] != best))
    ended = [row for row in rows if math.isfinite(row.get(metric) or math.nan)]
    bars = [
        _line("completed", [(row["trial"], row[metric]) for row in ended if row["outcome"] == "ok"]),
        _line("stopped early", [(row["trial"], row[metric]) for row in ended if row["outcome"] != "ok"], faint=True),
    ]
    chosen = next(row for row in rows if row["trial"] == best)
    return {
        "title": f"{name}: {len(rows)} {'trial' if len(rows) == 1 else 'trials'}, trial {best} chosen",
        "panels": [
            {"title": "evaluation loss", "x_label": "step", "y_label": "loss", "kind": "line", "series": lines},
            {
                "title": metric_label,
                "x_label": "trial",
                "y_label": metric_label,
                "kind": "dot",
                "series": [bar for bar in bars if bar["x"]],
                "marks": [{"x": best, "y": chosen[metric], "text": "chosen"}],
            },
        ],
    }


def _label(row: Mapping[str, Any]) -> str:
    named = [(key.rpartition(".")[2], value) for key, value in row["values"].items()]
    values = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in named]
    return ", ".join(values) + (", stopped early" if row["outcome"] == "stopped" else "")


def _line(label: str, points: Sequence[tuple[float | None, float | None]], *, faint: bool = False) -> dict[str, Any]:
    return {"label": label, "x": [x for x, _ in points], "y": [y for _, y in points], "faint": faint}


def batch_spec(
    table: Sequence[Mapping[str, Any]], *, sizes: Sequence[int], chosen: tuple[str, int], budget: int | None,
    name: str,
) -> dict[str, Any]:  # fmt: skip
    """A search over batch size and precision: throughput and peak memory by micro-batch size.

    Args:
        table: `BatchDecision.table` as mappings; with several kinds of devices, "precision" begins with the name of
            the kind.
        sizes: all sizes that the search could try; a line connects only neighbours among them, so that it has a gap
            where a size was not measured.
        chosen: the chosen (precision, micro-batch size): the knee.
        budget: bytes that a process may use.
    """
    precisions = list(dict.fromkeys(row["precision"] for row in table))
    speeds, peaks = [], []
    for number, precision in enumerate(precisions):
        hue = number if any(" " in name for name in precisions) else precision
        own = [row for row in table if row["precision"] == precision]
        timed = [row for row in own if row["rows_per_s"] is not None]
        peak = [(row["micro_batch_size"], row["measured_peak"] / MIB) for row in own if row["measured_peak"]]
        drawn = [(row["micro_batch_size"], row["predicted_peak"] / MIB) for row in own if row["predicted_peak"]]
        if timed:
            speed = _gapped([(row["micro_batch_size"], row["rows_per_s"]) for row in timed], sizes)
            intervals = [(row["micro_batch_size"], max(0.0, row["low"]), row["high"]) for row in timed]
            speeds.append({**_line(precision, speed), "hue": hue, "intervals": intervals})
        peaks += [{**_line(f"{precision} measured", peak), "hue": hue, "kind": "dot"}] if peak else []
        peaks += [{**_line(f"{precision} predicted", drawn, faint=True), "hue": hue}] if len(drawn) > 1 else []
    chosen_row = next(row for row in table if (row["precision"], row["micro_batch_size"]) == chosen)
    left = {"title": "rows per second of one worker (least to most)", "x_label": "micro-batch size",
            "y_label": "rows/s", "kind": "line", "doubling": True, "series": speeds,
            "marks": [{"x": chosen[1], "y": chosen_row["rows_per_s"], "text": "chosen"}]}  # fmt: skip
    right = {"title": "peak memory of one process", "x_label": "micro-batch size", "y_label": "MiB", "kind": "line",
             "doubling": True, "series": peaks}  # fmt: skip
    highest = max((y for line in peaks for y in line["y"]), default=0.0)
    if budget is not None and budget / MIB < 3 * highest:
        right["limit"] = {"y": budget / MIB, "text": "memory budget"}
    elif budget is not None:
        right["note"] = f"the budget of {budget / MIB:,.0f} MiB is above the chart"
    rows = counted(chosen[1], "row")
    return {"title": f"{name}: {chosen[0]} with micro-batches of {rows}", "panels": [left, right]}


def _gapped(points: Sequence[tuple[int, float]], sizes: Sequence[int]) -> list[tuple[int | None, float | None]]:
    """`points` with (None, None) between two points that are not neighbours among `sizes`."""
    found: list[tuple[int | None, float | None]] = []
    for place, (size, value) in enumerate(points):
        if place and any(points[place - 1][0] < other < size for other in sizes):
            found.append((None, None))
        found.append((size, value))
    return found
