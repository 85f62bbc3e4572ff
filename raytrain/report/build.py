"""Builds the report of a run from its folder.

Every file is built before the first one is written, and `report.html` is written last.
"""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from raytrain.report.experts import activation_spec, device_spec
from raytrain.report.figures import (
    HISTORY_COLUMNS,
    history,
    summarise,
    summary_text,
    training_spec,
)
from raytrain.report.page.page import report_page
from raytrain.report.records import RunRecords, read_records
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join


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


def history_csv(records: RunRecords) -> bytes:
    """history.csv: a header and one row per epoch, in full precision, empty where nothing was measured."""
    buffer = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(buffer, HISTORY_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(history(records))
    return buffer.getvalue().encode()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
