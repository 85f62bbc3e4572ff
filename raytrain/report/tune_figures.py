"""Plot specs of a sweep: rows of trials in, a JSON mapping with exactly the plotted numbers out. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

MIB = 2**20
NAMED = 8
"""So many trials have a line with a name; of more, the best alone."""


def whole_spec(
    rows: Sequence[Mapping[str, Any]], curves: Mapping[int, Sequence[tuple[int, float]]], *, best: int, metric: str,
    name: str,
) -> dict[str, Any]:  # fmt: skip
    """Trials that are whole runs: evaluation losses by step, and the metric of each trial.

    Args:
        rows: of trials.jsonl.
        curves: trial -> (step, loss) of each evaluation.
        best: number of the trial that was taken.
        metric: "eval_loss" or "samples_per_s".
    """
    words = {"eval_loss": "least eval loss", "samples_per_s": "samples a second"}[metric]
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
        _line("ran to its end", [(row["trial"], row[metric]) for row in ended if row["outcome"] == "ok"]),
        _line("ended early", [(row["trial"], row[metric]) for row in ended if row["outcome"] != "ok"], faint=True),
    ]
    taken = next(row for row in rows if row["trial"] == best)
    return {
        "title": f"{name}: {len(rows)} {'trial' if len(rows) == 1 else 'trials'}, trial {best} taken",
        "panels": [
            {"title": "evaluation loss", "x_label": "step", "y_label": "loss", "kind": "line", "series": lines},
            {
                "title": words,
                "x_label": "trial",
                "y_label": words,
                "kind": "dot",
                "series": [bar for bar in bars if bar["x"]],
                "marks": [{"x": best, "y": taken[metric], "text": "taken"}],
            },
        ],
    }


def _label(row: Mapping[str, Any]) -> str:
    named = [(key.rpartition(".")[2], value) for key, value in row["values"].items()]
    values = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in named]
    return ", ".join(values) + (", ended early" if row["outcome"] == "stopped" else "")


def _line(label: str, points: Sequence[tuple[float | None, float | None]], *, faint: bool = False) -> dict[str, Any]:
    return {"label": label, "x": [x for x, _ in points], "y": [y for _, y in points], "faint": faint}


def batch_spec(
    table: Sequence[Mapping[str, Any]], *, sizes: Sequence[int], chosen: tuple[str, int], budget: int | None,
    name: str, goodput: bool,
) -> dict[str, Any]:  # fmt: skip
    """A search over batch size and precision: throughput and peak memory by micro-batch size.

    Args:
        table: `BatchDecision.table` as mappings; where there are several kinds of devices, "precision" begins with the
            kind's name.
        sizes: all that the search could try; a line joins neighbours among them alone, and not over what is unmeasured.
        chosen: (precision, micro-batch size) that was taken: the knee.
        budget: bytes that a process may take.
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
    taken = next(row for row in table if (row["precision"], row["micro_batch_size"]) == chosen)
    what = "rows a second, weighed by what they are worth" if goodput else "rows a second, one worker"
    left = {"title": f"{what} (95 %)", "x_label": "micro-batch size", "y_label": "rows/s", "kind": "line",
            "doubling": True, "series": speeds,
            "marks": [{"x": chosen[1], "y": taken["rows_per_s"], "text": "taken"}]}  # fmt: skip
    right = {"title": "peak memory of one process", "x_label": "micro-batch size", "y_label": "MiB", "kind": "line",
             "doubling": True, "series": peaks}  # fmt: skip
    highest = max((y for line in peaks for y in line["y"]), default=0.0)
    if budget is not None and budget / MIB < 3 * highest:
        right["limit"] = {"y": budget / MIB, "text": "memory budget"}
    elif budget is not None:
        right["title"] += f" (the budget, {budget / MIB:,.0f} MiB, lies above)"
    rows = f"{chosen[1]} row" if chosen[1] == 1 else f"{chosen[1]} rows"
    return {"title": f"{name}: {chosen[0]} with micro-batches of {rows}", "panels": [left, right]}


def _gapped(points: Sequence[tuple[int, float]], sizes: Sequence[int]) -> list[tuple[int | None, float | None]]:
    """`points` with (None, None) between two that are no neighbours among `sizes`."""
    found: list[tuple[int | None, float | None]] = []
    for place, (size, value) in enumerate(points):
        if place and any(points[place - 1][0] < other < size for other in sizes):
            found.append((None, None))
        found.append((size, value))
    return found
