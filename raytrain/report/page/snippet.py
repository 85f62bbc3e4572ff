"""A run as a piece of HTML for the output of a notebook's cell: its figures and its loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.wording import plain_number
from raytrain.report.page.charts import Curve, chart
from raytrain.report.page.style import STYLE, esc
from raytrain.report.page.tables import table
from raytrain.report.records import Row, series

#: A notebook has a theme of its own, whatever the browser prefers: its colour for text, nothing behind it, and curves
#: that can be seen on white and on black.
_THEMELESS = (
    "--bg:transparent;--card:transparent;--ink:currentColor;--soft:currentColor;--line:#8886;--grid:#8884;"
    "--c1:#4287f5;--c2:#e07a1f;--tip:#18212c;--tipink:#fff;padding-bottom:4px"
)


def result_snippet(figures: Mapping[str, Any], history: Sequence[Row]) -> str:
    """HTML without scripts, whose styles apply inside it only.

    Args:
        figures: name -> value; None and "" are left out.
        history: rows of metrics.jsonl.
    """
    losses, evals = (series([row for row in history if row.get("kind") == kind], "loss") for kind in ("train", "eval"))
    curves = chart("Loss", [Curve("train", losses, "c1"), Curve("eval", evals, "c2", "dots")])
    rows = [
        [esc(name), esc(plain_number(value) if isinstance(value, int | float) else value)]
        for name, value in figures.items()
        if value not in (None, "")
    ]
    scoped = f".raytrain{{{STYLE.replace(':root{', '&{')}}}.raytrain{{{_THEMELESS}}}"  # leaves the notebook alone
    shown = table([("Run", "k"), ("", "v")], rows)
    return f'<div class="raytrain"><style>{scoped}</style>{shown}{curves}</div>'
