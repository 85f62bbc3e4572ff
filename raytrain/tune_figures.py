"""Plot specs of a sweep: rows of trials in, a JSON mapping with exactly the plotted numbers out. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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
        "title": f"{name}: {len(rows)} trials, trial {best} taken",
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
    values = [f"{key.rpartition('.')[2]} {value:.4g}" if isinstance(value, float) else f"{key.rpartition('.')[2]} {value}"
              for key, value in row["values"].items()]  # fmt: skip
    return ", ".join(values) + (", ended early" if row["outcome"] == "stopped" else "")


def _line(label: str, points: Sequence[tuple[float, float]], *, faint: bool = False) -> dict[str, Any]:
    return {"label": label, "x": [x for x, _ in points], "y": [y for _, y in points], "faint": faint}
