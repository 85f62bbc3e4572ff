"""A run as a piece of HTML for the output of a notebook's cell: its figures and its loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytrain.report.figures import plain_number
from raytrain.report.page.charts import Curve, chart, smoothed
from raytrain.report.page.style import STYLE, esc
from raytrain.report.records import Row, series

_SMOOTHED_FROM = 30


def result_snippet(figures: Mapping[str, Any], history: Sequence[Row]) -> str:
    """HTML without scripts, whose styles apply inside it only.

    Args:
        figures: name -> value; None and "" are left out.
        history: rows of metrics.jsonl.
    """
    losses = series([row for row in history if row.get("kind") == "train"], "loss")
    losses = smoothed(losses) if len(losses) >= _SMOOTHED_FROM else losses
    evals = series([row for row in history if row.get("kind") == "eval"], "loss")
    curves = chart("Loss", [Curve("train", losses, "c1"), Curve("eval", evals, "c2", "dots")])
    pairs = "".join(
        f"<dt>{esc(name)}</dt><dd>{esc(_written(value))}</dd>"
        for name, value in figures.items()
        if value not in (None, "")
    )
    return f'<div class="raytrain"><style>{_scoped()}</style><dl class="pairs">{pairs}</dl>{curves}</div>'


def _written(value: Any) -> str:
    return plain_number(value) if isinstance(value, int | float) else str(value)


#: A notebook has a theme of its own, whatever the browser prefers: its colour for text, nothing behind it, and curves
#: that can be seen on white and on black. Notebooks also lay lists out in columns that are too narrow for the names.
_THEMELESS = (
    "--bg:transparent;--card:transparent;--ink:currentColor;--soft:currentColor;--line:#8886;--grid:#8884;"
    "--c1:#4287f5;--c2:#e07a1f;--tip:#18212c;--tipink:#fff;padding-bottom:4px;"
    "& dl.pairs{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:6px 22px;margin-bottom:10px}"
    "& dl.pairs dt{float:none;clear:none;width:auto;margin:0;font-weight:600;white-space:nowrap;opacity:.75}"
    "& dl.pairs dd{float:none;width:auto;margin:0;padding:0}"
)


def _scoped() -> str:
    """The style sheet of the pages, nested so that it leaves the notebook alone."""
    return f".raytrain{{{STYLE.replace(':root{', '&{')}}}.raytrain{{{_THEMELESS}}}"
