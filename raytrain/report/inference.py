"""The report page of batch inference: from `manifest.json` and `summary.json` of an output folder, HTML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.wording import counted, measured, rate_text, seconds, size
from raytrain.report.charts import Curve, Point, chart
from raytrain.report.style import card, esc, header, page, sections, tiles
from raytrain.report.tables import table
from raytrain.runs.storage import join, open_store

MANIFEST, SUMMARY = "manifest.json", "summary.json"
PAGE = "report/report.html"
#: Points of the curve of rows per second.
POINTS = 60


def is_inference(path: str) -> bool:
    """Whether a folder holds the complete output of batch inference."""
    store = open_store(path)
    return store.exists(MANIFEST) and store.exists(SUMMARY)


def build_inference_report(path: str) -> str:
    """Write `report/report.html` of a folder for which `is_inference` holds; returns its path."""
    store = open_store(path)
    manifest, summary = (json.loads(store.read_bytes(name)) for name in (MANIFEST, SUMMARY))
    name = path.rstrip("/").rpartition("/")[2]
    store.write_bytes(PAGE, inference_page(name, manifest, summary).encode("utf-8", "replace"))
    return join(path, PAGE)


def inference_page(name: str, manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The complete page; sections without figures are left out."""
    rows = [
        [esc(name), esc(size(one["bytes"])), f"<code>{esc(one['sha256'])}</code>"]
        for name, one in manifest["files"].items()
    ]
    times = summary.get("times") or []
    curve = Curve("rows/s", rate_over_time(times, points=max(2, min(POINTS, len(times)))))
    named = {"at": seconds, "x_tick": seconds, "x_label": "time since the first unit began", "write": rate_text}
    drawn = chart("Rows per second", [curve], from_zero=True, wide=True, **named)
    parts = [
        ("speed", "Speed", f'<div class="charts">{drawn}</div>' if drawn else ""),
        ("workers", "Workers", _workers(summary)),
        ("failures", "Failures", _failures(manifest, summary)),
        ("quality", "Quality", _quality(summary.get("quality"))),
        ("files", "Files", card(table([("File", "k"), ("Size", "k"), ("SHA-256", "soft")], rows))),
    ]
    links, body = sections(parts)
    done, failed = manifest["rows"] - manifest["failed"], manifest["failed"]
    tone, state = ("warning", "done, with failed rows") if failed else ("good", "done")
    lead = f"{done:,} of {manifest['rows']:,} rows have a prediction."
    if summary["computed_now"] < manifest["rows"]:
        lead += f" The last command computed {summary['computed_now']:,} of them; its times are shown."
    head = header("inference", name, state, tone, lead)
    return page(f"{name} - raytrain", f"{head}{links}{_tiles(manifest, summary)}{body}")


def _tiles(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    quality, latency = summary.get("quality") or {}, summary["latency_s"]
    load = max((one["load_s"] for one in summary["workers"]), default=0.0)
    accuracy, f1 = quality.get("accuracy"), quality.get("f1")
    figures = [
        ("Rows", f"{manifest['rows']:,}", counted(manifest["units"], "unit")),
        ("Failed", f"{manifest['failed']:,}", f"{summary['computed_again']:,} computed again"),
        ("Rows per second", rate_text(summary["rows_per_s"]), "model load apart"),
        ("Tokens per second", rate_text(summary["tokens_per_s"]), f"{summary['tokens']:,} tokens"),
        ("Wall time", seconds(summary["wall_s"]) if summary["wall_s"] else "", "of the units"),
        ("Latency of a batch", seconds(latency["p50"]), f"p95 {seconds(latency['p95'])}"),
        ("Model load", seconds(load) if load else "", "slowest worker"),
        ("Accuracy", f"{accuracy:.2%}" if accuracy is not None else "", f"F1 {f1:.4f}" if f1 is not None else ""),
        ("Mean absolute error", measured(quality.get("mean_absolute_error")),
         f"RMSE {measured(quality['rmse'])}" if "rmse" in quality else ""),
    ]  # fmt: skip
    return tiles(figures)


def rate_over_time(times: Sequence[Mapping[str, Any]], *, points: int = POINTS) -> list[Point]:
    """(seconds, rows/s) at the middle of equal intervals; the rows of a unit are spread over its time."""
    end = max((one["end_s"] for one in times), default=0.0)
    if end <= 0:
        return []
    width, rows = end / points, [0.0] * points
    for one in times:
        begin, length = one["begin_s"], max(one["end_s"] - one["begin_s"], 1e-9)
        for number in range(int(begin / width), min(points, int(one["end_s"] / width) + 1)):
            inside = min((number + 1) * width, one["end_s"]) - max(number * width, begin)
            rows[number] += one["rows"] * max(inside, 0.0) / length
    return [((number + 0.5) * width, count / width) for number, count in enumerate(rows)]


def _workers(summary: Mapping[str, Any]) -> str:
    rows = [
        [
            esc(one["worker"]), f"{one['units']:,}", f"{one['rows']:,}", esc(rate_text(one["rows_per_s"])),
            esc(seconds(one["busy_s"])), f"{one['busy_s'] / summary['wall_s']:.0%}" if summary["wall_s"] else "-",
            esc(seconds(one["load_s"])),
        ]
        for one in summary["workers"]
    ]  # fmt: skip
    names = ("Units", "Rows", "Rows per second", "Busy", "Busy share", "Model load")
    columns = [("Worker", "k"), *((name, "n") for name in names)]
    return card(table(columns, rows)) if rows else ""


def _failures(manifest: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    rows = [[esc(one["id"]), esc(one["error"])] for one in summary.get("failures") or []]
    if not rows:
        return ""
    kinds = ", ".join(f"{count:,} {name}" for name, count in summary["errors"].items())
    left = manifest["failed"] - len(rows)
    more = f" The first {len(rows)} are listed." if left else ""
    return f'<p class="note">{esc(kinds)}.{more}</p>{card(table([("Row", "k"), ("Error", "")], rows))}'


def _quality(quality: Mapping[str, Any] | None) -> str:
    if not quality or not quality.get("classes"):
        return ""
    columns = [("Class", "k"), ("Rows", "n"), ("Precision", "n"), ("Recall", "n"), ("F1", "n")]
    rows = [
        [esc(name), f"{one['rows']:,}", *(f"{one[key]:.4f}" for key in ("precision", "recall", "f1"))]
        for name, one in quality["classes"].items()
    ]
    counts = quality["confusion"]
    wide = [("Right answer", "k"), *((str(name), "n") for name in counts["predictions"])]
    lines = [
        [esc(name), *(f"{count:,}" for count in row)]
        for name, row in zip(counts["labels"], counts["rows"], strict=True)
    ]
    return card(table(columns, rows) + table(wide, lines))
