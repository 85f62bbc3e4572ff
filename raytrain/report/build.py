"""Builds report pages from run folders: `build_report` for one run, `compare` for several.

Every file is built before the first one is written, and `report.html` is written last.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from typing import Any

from raytrain.report.experts import activation_spec, device_spec
from raytrain.report.figures import (
    HISTORY_COLUMNS,
    history,
    plain_number,
    seconds,
    size,
    summarise,
    summary_text,
    training_spec,
)
from raytrain.report.page.charts import Curve, chart, smoothed
from raytrain.report.page.page import TONES, report_page
from raytrain.report.page.style import esc, page
from raytrain.report.page.tables import label, shown, table
from raytrain.report.records import RunRecords, read_records, series
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join

_COMPARED = (
    "status", "mode", "devices", "strategy", "precision", "effective_batch", "micro_batch", "accumulation",
    "parameters", "experts_last", "steps", "epochs", "wall_s", "compute_s", "data_s", "communication_s",
    "step_ms_p50", "step_ms_p95", "samples_per_s_median", "samples_per_s_run",
    "tokens_per_s_median", "tokens_per_s_run", "peak_memory_bytes", "final_loss",
    "best_eval_loss", "best_eval_step", "accuracy",
)  # fmt: skip


def build_report(run: RunFolder) -> str:
    """Writes `report/` of a run in any state, including failed and running; returns the path of the page.

    Errors: RunError if the folder cannot be written.
    """
    from raytrain.report.plots import activations, devices, figure, png  # loads matplotlib

    records = read_records(run)
    summary, spec = summarise(records), training_spec(records)
    drawn = {"expert_activations": (activations, activation_spec(records)),
             "expert_device_distribution": (devices, device_spec(records))}  # fmt: skip
    pictures = {name: png(draw(shown)) for name, (draw, shown) in drawn.items() if shown is not None}
    files = {
        **{f"{name}.png": data for name, data in pictures.items()},
        **{f"{name}.json": _json(shown) for name, (_, shown) in drawn.items() if shown is not None},
        "training_metrics.json": _json(spec),
        "training_metrics.png": png(figure(spec)),
        "history.csv": history_csv(records),
        "performance_summary.json": _json(summary),
        "performance_summary.txt": _bytes(summary_text(summary)),
        "report.html": _bytes(report_page(records, pictures)),
    }
    for name, data in files.items():
        run.store.write_bytes(f"report/{name}", data)
    return join(run.report_dir, "report.html")


def compare(runs: Sequence[RunFolder]) -> str:
    """Writes `report/compare.html` in the first run: key figures in columns, loss curves in one chart."""
    records = [read_records(run) for run in runs]
    runs[0].store.write_bytes("report/compare.html", _bytes(compare_page(records)))
    return join(runs[0].report_dir, "compare.html")


def history_csv(records: RunRecords) -> bytes:
    """history.csv: a header and one row per epoch, in full precision, empty where nothing was measured."""
    buffer = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(buffer, HISTORY_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(history(records))
    return buffer.getvalue().encode()


def compare_page(runs: Sequence[RunRecords]) -> str:
    """Several runs on one page; figures that no run has are left out."""
    summaries = [summarise(records) for records in runs]
    names = _distinct([records.name for records in runs])
    rows = [
        [
            esc(label(key)),
            *(_cell(key, s) for s in summaries),
        ]
        for key in _COMPARED
        if any(summary.get(key) is not None for summary in summaries)
    ]
    train, evals = [], []
    for index, (name, records) in enumerate(zip(names, runs, strict=True)):
        colour, points = f"c{index % 8 + 1}", series(records.train, "loss")
        train.append(Curve(name, smoothed(points) if len(points) > 30 else points, colour))
        evals.append(Curve(name, series(records.evals, "loss"), colour, "dots"))
    charts = chart("Training loss", train, wide=True) + chart("Eval loss", evals, wide=True)
    columns = [("Figure", "k"), *((name, "v") for name in names)]
    body = (
        f'<header><p class="brand">raytrain report</p><h1>{len(runs)} runs compared</h1></header>'
        f'<section><h2>Loss</h2><div class="charts">{charts}</div></section>'
        f'<section><h2>Key figures</h2><div class="card">{table(columns, rows)}</div></section>'
    )
    return page("Runs compared - raytrain", body)


def _cell(key: str, summary: dict[str, Any]) -> str:
    value = summary.get(key)
    if key == "status":
        return f'<span class="badge {TONES.get(str(value), "")}">{esc(value)}</span>'
    if value is None:
        return "-"
    if not isinstance(value, int | float):
        return shown(value)
    if "_per_s" in key:
        return esc(plain_number(value))
    if key.endswith("_s") or "_ms_" in key:
        return esc(seconds(value / 1000 if "_ms_" in key else value))
    return esc(size(value) if key.endswith("_bytes") else plain_number(value))


def _distinct(names: Sequence[str]) -> list[str]:
    """Numbers the names that occur more than once (runs of different directories)."""
    return [f"{name} ({index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
