"""The page of a search (`raytrain tune`): what was chosen and why, its curves, and every trial."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from raytrain.report.figures import plain_number, seconds, size
from raytrain.report.page.charts import Curve, chart, short
from raytrain.report.page.style import esc, page
from raytrain.report.page.tables import label, shown, table
from raytrain.report.records import listed, mapping, number
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join, open_store

TRIALS, OUTCOME, PLOT, BEST = "trials.jsonl", "tune.json", "tune_plot.json", "best.yaml"
#: Columns of the trials that are complete runs, and of the measured sizes of a batch search.
_OF_RUNS = ("trial", "outcome", "eval_loss", "samples_per_s", "steps", "wall_s", "reason")
_OF_SIZES = ("precision", "micro_batch_size", "rows_per_s", "low", "high", "peak_bytes", "outcome")


def is_sweep(path: str) -> bool:
    """Whether this is the folder of a search."""
    store = open_store(path)
    return store.exists(TRIALS) and not store.exists("metrics.jsonl")


def build_sweep_report(sweep: RunFolder) -> str:
    """Writes `report/report.html` of a search in any state; returns its path.

    Errors: RunError if the folder cannot be written.
    """
    html = sweep_page(
        sweep.path, trials=sweep.read_rows(TRIALS), outcome=_json(sweep, OUTCOME), plot=_json(sweep, PLOT),
        best=sweep.read_text(BEST) if sweep.exists(BEST) else "",
    )  # fmt: skip
    sweep.store.write_bytes("report/report.html", html.encode("utf-8", "replace"))
    return join(sweep.report_dir, "report.html")


def sweep_page(
    path: str, *, trials: Sequence[Mapping[str, Any]], outcome: Mapping[str, Any], plot: Mapping[str, Any], best: str
) -> str:
    """The page; sections without records are left out."""
    name = path.rstrip("/").rpartition("/")[2]
    done = outcome.get("status") == "done"
    lead = str(plot.get("title") or f"{len(trials)} trials")
    spent = f" in {seconds(number(outcome.get('wall_s')))}" if outcome.get("wall_s") else ""
    head = (
        f'<header><p class="brand">raytrain search</p><div class="head"><h1>{esc(name)}</h1>'
        f'<span class="pill {"good" if done else "info"}">{"done" if done else "not finished"}</span></div>'
        f'<p class="lead">{esc(lead)}</p><p class="meta"><span>{len(trials)} trials{esc(spent)}</span></p></header>'
    )
    sections = [
        ("What was chosen", _chosen(outcome)),
        ("Curves", _charts(plot)),
        ("Trials", _trials(trials, outcome)),
        ("best.yaml", _best(path, best)),
    ]
    body = "".join(f"<section><h2>{esc(title)}</h2>{inner}</section>" for title, inner in sections if inner)
    return page(f"{name} - raytrain", f"{head}{body}<footer><p>{esc(path)}</p></footer>")


def _json(sweep: RunFolder, name: str) -> Mapping[str, Any]:
    try:
        return mapping(json.loads(sweep.read_text(name))) if sweep.exists(name) else {}
    except json.JSONDecodeError:  # the writer was killed
        return {}


def _chosen(outcome: Mapping[str, Any]) -> str:
    decision, winner = mapping(outcome.get("decision")), mapping(outcome.get("best"))
    reasons = {"precision.dtype": "precision", "loop.micro_batch_size": "micro_batch_size"}
    chosen = mapping(winner.get("values")) or mapping(outcome.get("values"))
    rows = []
    for index, (key, value) in enumerate(chosen.items()):
        own = mapping(decision.get(reasons.get(str(key), ""))).get("reason")
        why = own or ("" if index else outcome.get("reason"))
        rows.append([f"<code>{esc(key)}</code>", shown(value), esc(why or "")])
    if not rows:
        return ""
    return f'<div class="card">{table([("Key", "k"), ("Value", "v"), ("Why", "soft")], rows, stack=True)}</div>'


def _charts(plot: Mapping[str, Any]) -> str:
    panels = [mapping(panel) for panel in listed(plot.get("panels"))]
    inner = "".join(_chart(panel) for panel in panels)
    return f'<div class="charts">{inner}</div>' if inner else ""


def _chart(panel: Mapping[str, Any]) -> str:
    """One panel of the plot spec, drawn as the other charts; sizes that double are a power of two apart on the axis."""
    doubling, name = bool(panel.get("doubling")), str(panel.get("x_label") or "x")
    place = (lambda x: math.log2(x)) if doubling else (lambda x: x)
    curves = []
    for index, line in enumerate(mapping(one) for one in listed(panel.get("series"))):
        xs, ys = (map(number, listed(line.get(axis))) for axis in ("x", "y"))
        points = [(place(x), y) for x, y in zip(xs, ys, strict=False) if x is not None and y is not None and x > 0]
        kind = "points" if panel.get("kind") == "dot" else "dots"
        curves.append(Curve(str(line.get("label") or f"series {index + 1}"), points, f"c{index % 8 + 1}", kind))
    back = (lambda x: 2**x) if doubling else (lambda x: x)
    whole = doubling or panel.get("kind") == "dot"
    return chart(
        str(panel.get("title") or ""), [curve for curve in curves if curve.points], x_label=name,
        at=lambda x: f"{name} {short(back(x))}",
        x_tick=lambda x: short(back(x)) if not whole or float(x).is_integer() else "", wide=True,
        note="; ".join(f"{mark.get('text')}: {name} {short(float(mark['x']))}" for mark in _marks(panel)),
    )  # fmt: skip


def _marks(panel: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [mark for one in listed(panel.get("marks")) if number((mark := mapping(one)).get("x")) is not None]


def _trials(trials: Sequence[Mapping[str, Any]], outcome: Mapping[str, Any]) -> str:
    sizes = [mapping(row) for row in listed(mapping(outcome.get("decision")).get("table"))]
    if sizes:
        return _rows(sizes, _OF_SIZES, values=())
    keys = list(dict.fromkeys(key for row in trials for key in mapping(row.get("values"))))
    chosen = mapping(outcome.get("best")).get("trial")
    return _rows(trials, _OF_RUNS, values=keys, chosen=chosen)


def _rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str], *, values: Sequence[str], chosen: Any = None) -> str:
    kept = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    columns = [(label(name), "" if name == "reason" else "k") for name in kept] + [(key, "k") for key in values]
    cells = []
    for row in rows:
        written = [_cell(name, row.get(name)) for name in kept]
        if chosen is not None and row.get("trial") == chosen:
            written[0] += ' <span class="badge good">chosen</span>'
        cells.append([*written, *(shown(mapping(row.get("values")).get(key)) for key in values)])
    return f'<div class="card">{table(columns, cells)}</div>' if cells and columns else ""


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith("_bytes"):
            return esc(size(value))
        return esc(seconds(value) if name == "wall_s" else plain_number(value))
    return esc(value)


def _best(path: str, text: str) -> str:
    if not text:
        return ""
    command = f'<p class="note">Train with it: <code>raytrain train --from-tune {esc(path)}</code></p>'
    return f'<div class="card"><pre>{esc(text.rstrip())}</pre></div>{command}'
