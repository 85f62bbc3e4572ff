"""The page of a search (`raytrain tune`): what was chosen and why, its curves, and every trial."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raytrain.report.figures import loss_text, measured, rate_text, seconds, size
from raytrain.report.page.charts import Curve, chart, short
from raytrain.report.page.style import esc, page
from raytrain.report.page.tables import label, shown, table
from raytrain.report.records import listed, mapping, number
from raytrain.runs.commands import shell_command
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join, open_store

TRIALS, OUTCOME, PLOT, BEST = "trials.jsonl", "tune.json", "tune_plot.json", "best.yaml"
#: Columns of the trials that are complete runs.
_OF_RUNS = ("trial", "outcome", "eval_loss", "samples_per_s", "steps", "wall_s")
#: Units whose axis begins at zero.
FROM_ZERO = ("rows/s", "MiB", "seconds")


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
    panels, hues = [mapping(panel) for panel in listed(plot.get("panels"))], []
    inner = "".join(_chart(panel, hues) for panel in panels)
    return f'<div class="charts">{inner}</div>' if inner else ""


def _chart(panel: Mapping[str, Any], hues: list[str]) -> str:
    """One panel of the plot spec, drawn as the other charts; sizes that double are a power of two apart on the axis.
    `hues` are what has a colour so far; those of the panel are added."""
    doubling, name, unit = (
        bool(panel.get("doubling")),
        str(panel.get("x_label") or "x"),
        str(panel.get("y_label") or ""),
    )
    place = (lambda x: math.log2(x)) if doubling else (lambda x: x)
    curves = [
        _curve(mapping(line), number, kind=panel.get("kind"), place=place, hues=hues)
        for number, line in enumerate(listed(panel.get("series")), 1)
    ]
    curves = [curve for curve in curves if curve.points]
    limit, xs = mapping(panel.get("limit")), [x for curve in curves for x, _ in curve.points]
    if (bound := number(limit.get("y"))) is not None and xs:
        curves.append(Curve(str(limit.get("text") or "limit"), [(min(xs), bound), (max(xs), bound)], "c8", "dashed"))
    back = (lambda x: 2**x) if doubling else (lambda x: x)
    whole = doubling or panel.get("kind") == "dot"
    title, notes = str(panel.get("title") or ""), [str(panel.get("note") or "")]
    notes += [f"{mark.get('text')}: {name} {short(float(mark['x']))}" for mark in _marks(panel)]
    return chart(
        f"{title[:1].upper()}{title[1:]}{', MiB' if unit == 'MiB' else ''}", curves, x_label=name,
        at=lambda x: f"{name} {short(back(x))}",
        x_tick=lambda x: short(back(x)) if not whole or float(x).is_integer() else "", wide=True,
        note="; ".join(note for note in notes if note), from_zero=unit in FROM_ZERO,
    )  # fmt: skip


def _curve(
    line: Mapping[str, Any], place_in_panel: int, *, kind: object, place: Callable[[float], float], hues: list[str]
) -> Curve:
    """A series as a curve: what has the same hue has one colour in all panels; a missing point interrupts the line."""
    label = str(line.get("label") or f"series {place_in_panel}")
    hue = str(line.get("hue", label))
    if hue not in hues:
        hues.append(hue)
    xs, ys = (map(number, listed(line.get(axis))) for axis in ("x", "y"))
    points, gaps, missing = [], [], False
    for x, y in zip(xs, ys, strict=False):
        if x is None or y is None or x <= 0:
            missing = bool(points)
            continue
        gaps += [place(x)] if missing else []
        points.append((place(x), y))
        missing = False
    ends = [[end for one in listed(each) if (end := number(one)) is not None] for each in listed(line.get("intervals"))]
    bars = [(place(x), low, high) for x, low, high in (each for each in ends if len(each) == 3) if x > 0]
    style = "points" if line.get("kind", kind) == "dot" else "dots"
    if line.get("faint") and style == "dots":
        style = "dashed" if "hue" in line else style if line.get("label") else "faint"
    return Curve(label, points, f"c{hues.index(hue) % 8 + 1}", style, tuple(gaps), bars)


def _marks(panel: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [mark for one in listed(panel.get("marks")) if number((mark := mapping(one)).get("x")) is not None]


def _trials(trials: Sequence[Mapping[str, Any]], outcome: Mapping[str, Any]) -> str:
    decision = mapping(outcome.get("decision"))
    sizes = [mapping(row) for row in listed(decision.get("table"))]
    if sizes:
        return _sizes(sizes, mapping(outcome.get("values")))
    keys = list(dict.fromkeys(key for row in trials for key in mapping(row.get("values"))))
    chosen = mapping(outcome.get("best")).get("trial")
    return _rows(trials, _OF_RUNS, values=keys, chosen=chosen)


def _sizes(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any]) -> str:
    """The sizes that a batch search measured."""
    columns: list[tuple[str, str, Callable[[Mapping[str, Any]], str]]] = [
        ("precision", "k", lambda row: esc(row.get("precision"))),
        ("micro-batch size", "n", lambda row: _cell("", row.get("micro_batch_size"))),
        ("passes", "n", lambda row: _cell("", row.get("passes"))),
        ("rows per second", "n", lambda row: _cell("rows_per_s", row.get("rows_per_s"))),
        ("least to most", "n", _interval),
        ("peak memory", "n", lambda row: _cell("peak_bytes", row.get("measured_peak"))),
        ("predicted peak", "n", lambda row: _cell("peak_bytes", row.get("predicted_peak"))),
        ("", "k", lambda row: '<span class="badge good">chosen</span>' if _is_chosen(row, chosen) else ""),
        ("note", "soft", lambda row: esc(row.get("note") or "")),
    ]
    cells = [[write(row) for row in rows] for *_, write in columns]
    kept = [index for index, texts in enumerate(cells) if any(text not in ("", "-", "None") for text in texts)]
    heads = [columns[index][:2] for index in kept]
    return (
        f'<div class="card">{table(heads, list(zip(*(cells[index] for index in kept), strict=True)), heads=True)}</div>'
    )


def _interval(row: Mapping[str, Any]) -> str:
    """The range of a rate, in earlier versions an interval; a rate is never negative."""
    low, high = number(row.get("low")), number(row.get("high"))
    return "-" if low is None or high is None else esc(f"{measured(max(0.0, low))} to {measured(high)}")


def _is_chosen(row: Mapping[str, Any], chosen: Mapping[str, Any]) -> bool:
    pairs = (("precision", "precision.dtype"), ("micro_batch_size", "loop.micro_batch_size"))
    return all(row.get(name) == chosen.get(key) for name, key in pairs)


def _rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str], *, values: Sequence[str], chosen: Any = None) -> str:
    kept = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    reasons = [row.get("reason") for row in rows]
    columns = [*((label(name), "v") for name in kept), *((key, "v") for key in values)]
    columns += [("reason", "soft")] if any(reasons) else []
    cells = []
    for row in rows:
        written = [_cell(name, row.get(name)) for name in kept]
        if chosen is not None and row.get("trial") == chosen:
            written[0] += ' <span class="badge good">chosen</span>'
        why = [esc(row.get("reason") or "")] if any(reasons) else []
        cells.append([*written, *(shown(mapping(row.get("values")).get(key)) for key in values), *why])
    return f'<div class="card">{table(columns, cells, heads=True)}</div>' if cells and columns else ""


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float) and not isinstance(value, bool):
        if name.endswith("_bytes"):
            return esc(size(value))
        written = {"wall_s": seconds, "eval_loss": loss_text, "rows_per_s": rate_text, "samples_per_s": rate_text}
        return esc(written.get(name, measured)(value))
    return esc(value)


def _best(path: str, text: str) -> str:
    if not text:
        return ""
    use = f'<p class="note">Train with it: <code>{esc(shell_command("train", "--from-tune", path))}</code></p>'
    return f'<div class="card"><pre>{esc(text.rstrip())}</pre></div>{use}'
