"""The page of a search (`raytrain tune`): what was chosen and why, its curves, and every trial.

Both searches write it at their end; `raytrain report` writes it again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.wording import counted, seconds, size
from raytrain.report.charts import line, panel
from raytrain.report.records import listed, mapping, number
from raytrain.report.style import card, esc, header, page, picture
from raytrain.report.tables import figure, label, shown, table
from raytrain.runs.folder import RunFolder, shell_command
from raytrain.runs.storage import join, open_store

MIB = 2**20
NAMED = 8
"""Most trials whose lines are all labelled; with more, only the best one is."""


def whole_spec(
    rows: Sequence[Mapping[str, Any]], curves: Mapping[int, Sequence[tuple[int, float]]], *, best: int, metric: str,
    name: str,
) -> dict[str, Any]:  # fmt: skip
    """The plot spec of trials that are complete runs (`rows` of trials.jsonl): evaluation losses by step (`curves`:
    trial -> (step, loss) of each), and the metric of each trial, of which `best` was chosen."""
    metric_label = {"eval_loss": "lowest eval loss", "samples_per_s": "samples per second"}[metric]
    lines = []
    for row in sorted(rows, key=lambda one: one["trial"] == best):
        points = [(step, loss) for step, loss in curves.get(row["trial"], ()) if math.isfinite(loss)]
        if points:
            named = [(key.rpartition(".")[2], value) for key, value in row["values"].items()]
            values = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in named]
            label = ", ".join(values) + (", stopped early" if row["outcome"] == "stopped" else "")
            if len(rows) > NAMED and row["trial"] != best:
                label = ""
            lines.append(line(label, points, faint=row["trial"] != best))
    ended = [row for row in rows if math.isfinite(row.get(metric) or math.nan)]
    bars = [
        line("completed", [(row["trial"], row[metric]) for row in ended if row["outcome"] == "ok"], faint=False),
        line("stopped early", [(row["trial"], row[metric]) for row in ended if row["outcome"] != "ok"], faint=True),
    ]
    chosen = next(row for row in rows if row["trial"] == best)
    return {
        "title": f"{name}: {len(rows)} {'trial' if len(rows) == 1 else 'trials'}, trial {best} chosen",
        "panels": [
            panel("evaluation loss", "loss", lines),
            panel(
                metric_label, metric_label, [bar for bar in bars if bar["x"]], x_label="trial", kind="dot",
                marks=[{"x": best, "y": chosen[metric], "text": "chosen"}],
            ),
        ],
    }  # fmt: skip


def batch_spec(
    table: Sequence[Mapping[str, Any]], *, sizes: Sequence[int], chosen: tuple[str, int], budget: int | None,
    name: str,
) -> dict[str, Any]:  # fmt: skip
    """The plot spec of a search over batch size and precision: throughput and peak memory by micro-batch size.

    `table` is `BatchDecision.table` as mappings; with several kinds of devices, "precision" begins with the name of the
    kind. A line connects only neighbours among the `sizes` that the search could try, so that it has a gap where a size
    was not measured. `chosen` is (precision, micro-batch size), `budget` the bytes that a process may use.
    """
    precisions = list(dict.fromkeys(row["precision"] for row in table))
    speeds, peaks = [], []
    for index, precision in enumerate(precisions):
        hue = index if any(" " in name for name in precisions) else precision
        own = [row for row in table if row["precision"] == precision]
        timed = [row for row in own if row["rows_per_s"] is not None]
        peak = [(row["micro_batch_size"], row["measured_peak"] / MIB) for row in own if row["measured_peak"]]
        drawn = [(row["micro_batch_size"], row["predicted_peak"] / MIB) for row in own if row["predicted_peak"]]
        if timed:
            points = [(row["micro_batch_size"], row["rows_per_s"]) for row in timed]
            speed: list[tuple[int | None, float | None]] = []
            for place, (x, y) in enumerate(points):
                if place and any(points[place - 1][0] < other < x for other in sizes):
                    speed.append((None, None))
                speed.append((x, y))
            intervals = [(row["micro_batch_size"], max(0.0, row["low"]), row["high"]) for row in timed]
            speeds.append({**line(precision, speed, faint=False), "hue": hue, "intervals": intervals})
        peaks += [{**line(f"{precision} measured", peak, faint=False), "hue": hue, "kind": "dot"}] if peak else []
        peaks += [{**line(f"{precision} predicted", drawn, faint=True), "hue": hue}] if len(drawn) > 1 else []
    chosen_row = next(row for row in table if (row["precision"], row["micro_batch_size"]) == chosen)
    left = panel(
        "rows per second of one worker (least to most)", "rows/s", speeds, x_label="micro-batch size", doubling=True,
        marks=[{"x": chosen[1], "y": chosen_row["rows_per_s"], "text": "chosen"}],
    )  # fmt: skip
    right = panel("peak memory of one process", "MiB", peaks, x_label="micro-batch size", doubling=True)
    highest = max((y for line in peaks for y in line["y"]), default=0.0)
    if budget is not None and budget / MIB < 3 * highest:
        right["limit"] = {"y": budget / MIB, "text": "memory budget"}
    elif budget is not None:
        right["note"] = f"the budget, {size(budget)}, is above it"
    rows = counted(chosen[1], "row")
    return {"title": f"{name}: {chosen[0]} with micro-batches of {rows}", "panels": [left, right]}


TRIALS, OUTCOME, PLOT, PICTURE, BEST = "trials.jsonl", "tune.json", "tune_plot.json", "tune.png", "best.yaml"
OF_RUNS = ("trial", "outcome", "eval_loss", "samples_per_s", "steps", "wall_s")
"""Columns of the trials that are complete runs."""
OF_SIZES = ("precision", "micro_batch_size", "passes", "rows_per_s", "low", "high", "measured_peak", "predicted_peak")
"""Columns of the sizes that a batch search measured."""
TITLES = {"low": "least", "high": "most", "measured_peak": "peak memory", "predicted_peak": "predicted peak"}
CHOSEN = ' <span class="badge good">chosen</span>'


def is_sweep(path: str) -> bool:
    store = open_store(path)
    return store.exists(TRIALS) and not store.exists("metrics.jsonl")


def build_sweep_report(sweep: RunFolder) -> str:
    """Writes `report/report.html` of a search in any state; returns its path."""
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
    state, tone = ("done", "good") if done else ("not finished", "info")
    head = header("search", name, state, tone, title, [f"{len(trials)} trials{spent}"])
    use = f'<p class="note">Train with it: <code>{esc(shell_command("train", "--from-tune", path))}</code></p>'
    decision, winner = mapping(outcome.get("decision")), mapping(outcome.get("best"))
    reasons = {"precision.dtype": "precision", "loop.micro_batch_size": "micro_batch_size"}
    chosen = mapping(winner.get("values")) or mapping(outcome.get("values"))
    rows = []
    for index, (key, value) in enumerate(chosen.items()):
        own = mapping(decision.get(reasons.get(str(key), ""))).get("reason")
        why = own or ("" if index else outcome.get("reason"))
        rows.append([f"<code>{esc(key)}</code>", shown(value), esc(why or "")])
    columns = [("Key", "k"), ("Value", "v"), ("Why", "soft")]
    sections = [
        ("What was chosen", card(table(columns, rows)) if rows else ""),
        ("Curves", f'<div class="card scroll">{picture("measurements of the trials", drawn)}</div>' if drawn else ""),
        ("Trials", _trials(trials, outcome)),
        ("best.yaml", card(f"<pre>{esc(best.rstrip())}</pre>") + use if best else ""),
    ]
    body = "".join(f"<section><h2>{esc(title)}</h2>{inner}</section>" for title, inner in sections if inner)
    return page(f"{name} - raytrain", f"{head}{body}<footer><p>{esc(path)}</p></footer>")


def _trials(trials: Sequence[Mapping[str, Any]], outcome: Mapping[str, Any]) -> str:
    """The sizes that a batch search measured, or the complete runs of a search over other keys."""
    sizes = [mapping(row) for row in listed(mapping(outcome.get("decision")).get("table"))]
    rows, names, note = (sizes, OF_SIZES, "note") if sizes else (trials, OF_RUNS, "reason")
    kept = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    keys = [] if sizes else list(dict.fromkeys(key for row in trials for key in mapping(row.get("values"))))
    chosen, told = mapping(outcome.get("values")), any(row.get(note) for row in rows)
    best = chosen.get("precision.dtype"), chosen.get("loop.micro_batch_size")
    columns = [*((TITLES.get(name) or label(name), "v") for name in kept), *((key, "v") for key in keys)]
    cells = []
    for row in rows:
        written = [figure(name, row.get(name)) for name in kept]
        if sizes:
            is_chosen = (row.get("precision"), row.get("micro_batch_size")) == best
        else:
            is_chosen = row.get("trial") == mapping(outcome.get("best")).get("trial")
        written[0] += CHOSEN if is_chosen else ""
        written += [shown(mapping(row.get("values")).get(key)) for key in keys]
        cells.append([*written, *([esc(row.get(note) or "")] if told else [])])
    columns += [(note, "soft")] if told else []
    return card(table(columns, cells)) if cells else ""
