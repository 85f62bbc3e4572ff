"""The page of a search (`raytrain tune`): what was chosen and why, its picture, and every trial."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.wording import loss_text, measured, rate_text, seconds, size
from raytrain.report.page.style import esc, page, picture
from raytrain.report.page.tables import label, shown, table
from raytrain.report.records import listed, mapping, number
from raytrain.runs.commands import shell_command
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join, open_store

TRIALS, OUTCOME, PLOT, PICTURE, BEST = "trials.jsonl", "tune.json", "tune_plot.json", "tune.png", "best.yaml"
OF_RUNS = ("trial", "outcome", "eval_loss", "samples_per_s", "steps", "wall_s")
"""Columns of the trials that are complete runs."""
OF_SIZES = ("precision", "micro_batch_size", "passes", "rows_per_s", "low", "high", "measured_peak", "predicted_peak")
"""Columns of the sizes that a batch search measured."""
TITLES = {"low": "least", "high": "most", "measured_peak": "peak memory", "predicted_peak": "predicted peak"}
CHOSEN = ' <span class="badge good">chosen</span>'


def is_sweep(path: str) -> bool:
    """Whether this is the folder of a search."""
    store = open_store(path)
    return store.exists(TRIALS) and not store.exists("metrics.jsonl")


def build_sweep_report(sweep: RunFolder) -> str:
    """Writes `report/report.html` of a search in any state; returns its path.

    Errors: RunError if the folder cannot be written.
    """
    html = sweep_page(
        sweep.path, trials=sweep.read_rows(TRIALS), outcome=_json(sweep, OUTCOME),
        title=str(_json(sweep, PLOT).get("title") or ""),
        drawn=sweep.store.read_bytes(PICTURE) if sweep.store.exists(PICTURE) else b"",
        best=sweep.read_text(BEST) if sweep.exists(BEST) else "",
    )  # fmt: skip
    sweep.store.write_bytes("report/report.html", html.encode("utf-8", "replace"))
    return join(sweep.report_dir, "report.html")


def _json(sweep: RunFolder, name: str) -> Mapping[str, Any]:
    try:
        return mapping(json.loads(sweep.read_text(name))) if sweep.exists(name) else {}
    except json.JSONDecodeError:  # the writer was killed
        return {}


def sweep_page(
    path: str, *, trials: Sequence[Mapping[str, Any]], outcome: Mapping[str, Any], title: str = "", drawn: bytes = b"",
    best: str = "",
) -> str:  # fmt: skip
    """The page; sections without records are left out. `drawn` is tune.png."""
    name = path.rstrip("/").rpartition("/")[2]
    done = outcome.get("status") == "done"
    spent = f" in {seconds(number(outcome.get('wall_s')))}" if outcome.get("wall_s") else ""
    head = (
        f'<header><p class="brand">raytrain search</p><div class="head"><h1>{esc(name)}</h1>'
        f'<span class="pill {"good" if done else "info"}">{"done" if done else "not finished"}</span></div>'
        f'<p class="lead">{esc(title)}</p><p class="meta"><span>{len(trials)} trials{esc(spent)}</span></p></header>'
    )
    use = f'<p class="note">Train with it: <code>{esc(shell_command("train", "--from-tune", path))}</code></p>'
    sections = [
        ("What was chosen", _chosen(outcome)),
        ("Curves", f'<div class="card scroll">{picture("measurements of the trials", drawn)}</div>' if drawn else ""),
        ("Trials", _trials(trials, outcome)),
        ("best.yaml", f'<div class="card"><pre>{esc(best.rstrip())}</pre></div>{use}' if best else ""),
    ]
    body = "".join(f"<section><h2>{esc(title)}</h2>{inner}</section>" for title, inner in sections if inner)
    return page(f"{name} - raytrain", f"{head}{body}<footer><p>{esc(path)}</p></footer>")


def _chosen(outcome: Mapping[str, Any]) -> str:
    decision, winner = mapping(outcome.get("decision")), mapping(outcome.get("best"))
    reasons = {"precision.dtype": "precision", "loop.micro_batch_size": "micro_batch_size"}
    chosen = mapping(winner.get("values")) or mapping(outcome.get("values"))
    rows = []
    for index, (key, value) in enumerate(chosen.items()):
        own = mapping(decision.get(reasons.get(str(key), ""))).get("reason")
        why = own or ("" if index else outcome.get("reason"))
        rows.append([f"<code>{esc(key)}</code>", shown(value), esc(why or "")])
    columns = [("Key", "k"), ("Value", "v"), ("Why", "soft")]
    return f'<div class="card">{table(columns, rows)}</div>' if rows else ""


def _trials(trials: Sequence[Mapping[str, Any]], outcome: Mapping[str, Any]) -> str:
    """The sizes that a batch search measured, or the complete runs of a search over other keys."""
    sizes = [mapping(row) for row in listed(mapping(outcome.get("decision")).get("table"))]
    rows, names, note = (sizes, OF_SIZES, "note") if sizes else (trials, OF_RUNS, "reason")
    kept = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    keys = [] if sizes else list(dict.fromkeys(key for row in trials for key in mapping(row.get("values"))))
    told = any(row.get(note) for row in rows)
    columns = [*((TITLES.get(name) or label(name), "v") for name in kept), *((key, "v") for key in keys)]
    cells = []
    for row in rows:
        written = [_cell(name, row.get(name)) for name in kept]
        written[0] += CHOSEN if _is_chosen(row, outcome, sizes=bool(sizes)) else ""
        written += [shown(mapping(row.get("values")).get(key)) for key in keys]
        cells.append([*written, *([esc(row.get(note) or "")] if told else [])])
    columns += [(note, "soft")] if told else []
    return f'<div class="card">{table(columns, cells)}</div>' if cells else ""


def _is_chosen(row: Mapping[str, Any], outcome: Mapping[str, Any], *, sizes: bool) -> bool:
    if not sizes:
        return row.get("trial") == mapping(outcome.get("best")).get("trial")
    chosen = mapping(outcome.get("values"))
    pairs = (("precision", "precision.dtype"), ("micro_batch_size", "loop.micro_batch_size"))
    return all(row.get(name) == chosen.get(key) for name, key in pairs)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float) and not isinstance(value, bool):
        written = {"wall_s": seconds, "eval_loss": loss_text, "rows_per_s": rate_text, "samples_per_s": rate_text,
                   "measured_peak": size, "predicted_peak": size}  # fmt: skip
        return esc(written.get(name, measured)(value))
    return esc(value)
