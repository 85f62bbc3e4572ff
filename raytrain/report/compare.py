"""The page that compares several runs: what differs in their jobs, whether their losses can be compared, and how they
did, relative to the first."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from raytrain.report.figures import plain_number, seconds, size, summarise
from raytrain.report.page.charts import Curve, chart, smoothed
from raytrain.report.page.page import TONES
from raytrain.report.page.style import esc, page
from raytrain.report.page.tables import label, shown, table
from raytrain.report.records import RunRecords, read_records, series
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join, open_store

_COMPARED = (
    "status", "mode", "devices", "strategy", "precision", "effective_batch", "micro_batch", "accumulation",
    "parameters", "experts_last", "steps", "epochs", "wall_s", "compute_s", "data_s", "communication_s",
    "step_ms_p50", "step_ms_p95", "samples_per_s_median", "samples_per_s_run",
    "tokens_per_s_median", "tokens_per_s_run", "peak_memory_bytes", "final_loss",
    "best_eval_loss", "best_eval_step", "perplexity", "accuracy",
)  # fmt: skip
_LESS_IS_BETTER = (
    "wall_s", "step_ms_p50", "step_ms_p95", "peak_memory_bytes", "final_loss", "best_eval_loss", "perplexity"
)  # fmt: skip
_MORE_IS_BETTER = ("samples_per_s_median", "samples_per_s_run", "tokens_per_s_median", "tokens_per_s_run", "accuracy")
_ABOUT_EQUAL = 0.01
"""A smaller relative difference is not marked."""
_OF_A_REPEAT = ("name", "seed", "save.dir")
"""Keys in which repeats of a run may differ."""
_FOLDER, _LONGEST = "comparisons", 120


def compare(runs: Sequence[RunFolder]) -> str:
    """Writes the page into `comparisons/` beside the first run, and returns its path.

    Errors: RunError if the folder cannot be written.
    """
    records = [read_records(run) for run in runs]
    beside, _, first = runs[0].path.rstrip("/").rpartition("/")
    others = "-".join(run.path.rstrip("/").rpartition("/")[2] for run in runs[1:])
    name = f"{first}-{others}"[:_LONGEST]
    store = open_store(join(beside, _FOLDER))
    store.make_dir("")
    store.write_bytes(f"{name}.html", compare_page(records).encode("utf-8", "replace"))
    return join(beside, f"{_FOLDER}/{name}.html")


def compare_page(runs: Sequence[RunRecords]) -> str:
    """Several runs on one page; figures that no run has are left out."""
    names = _distinct([records.name for records in runs])
    summaries = [summarise(records) for records in runs]
    warnings = not_comparable(runs, names)
    notes = "".join(
        f'<article class="card finding warning"><span class="badge">warning</span><b>{esc(title)}</b>'
        f"<p>{esc(text)}</p></article>"
        for title, text in warnings
    )
    body = (
        f'<header><p class="brand">raytrain report</p><h1>{len(runs)} runs compared</h1></header>'
        + (f'<section><div class="findings tiles-gap">{notes}</div></section>' if notes else "")
        + f"<section><h2>What differs in their jobs</h2>{_differences(runs, names)}</section>"
        + f'<section><h2>Loss</h2><div class="charts">{_charts(runs, names)}</div></section>'
        + f"<section><h2>Key figures</h2>{_figures(summaries, names)}</section>"
        + _repeats(runs, summaries)
    )
    return page("Runs compared - raytrain", body)


def differing_keys(runs: Sequence[RunRecords]) -> list[str]:
    """The keys of the jobs whose values are not the same in all runs, in the order of the first that has them."""
    keys = dict.fromkeys(line.key for records in runs for line in records.config)
    return [key for key in keys if len({repr(records.configured(key)) for records in runs}) > 1]


def not_comparable(runs: Sequence[RunRecords], names: Sequence[str]) -> list[tuple[str, str]]:
    """(title, text) of each reason for which a lower loss does not mean a better model."""
    found = []
    vocabularies = [records.vocab_size for records in runs]
    if len(set(vocabularies)) > 1:
        told = ", ".join(f"{name} {size or 'unknown'}" for name, size in zip(names, vocabularies, strict=True))
        why = "A loss per token depends on what a token is; compare the loss per byte of text instead."
        found.append(("Different vocabularies: their losses are not comparable", f"{told}. {why}"))
    split = [key for key in differing_keys(runs) if key.startswith("data.") or key == "loop.eval_batches"]
    split = [key for key in split if key not in ("data.storage", "data.loader_workers", "data.prefetch")]
    rows = [records.eval_rows for records in runs]
    if split or len(set(rows)) > 1:
        counts = ["unknown" if count is None else f"{count:,}" for count in rows]
        told = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        keys = f" They differ in {', '.join(split)}." if split else ""
        found.append(("Different evaluation data: eval losses are not comparable", f"Rows held out: {told}.{keys}"))
    return found


def _differences(runs: Sequence[RunRecords], names: Sequence[str]) -> str:
    rows = [
        [f"<code>{esc(key)}</code>", *(shown(records.configured(key)) for records in runs)]
        for key in differing_keys(runs)
        if key != "name"
    ]
    if not rows:
        return '<p class="note">Nothing: all keys have the same values.</p>'
    return f'<div class="card">{table([("Key", "k"), *((name, "v") for name in names)], rows)}</div>'


def _charts(runs: Sequence[RunRecords], names: Sequence[str]) -> str:
    train, evals = [], []
    for index, (name, records) in enumerate(zip(names, runs, strict=True)):
        colour, points = f"c{index % 8 + 1}", series(records.train, "loss")
        train.append(Curve(name, smoothed(points) if len(points) > 30 else points, colour))
        evals.append(Curve(name, series(records.evals, "loss"), colour, "dots"))
    return chart("Training loss", train, wide=True) + chart("Eval loss", evals, wide=True)


def _figures(summaries: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    rows = [
        [esc(label(key)), *(_cell(key, summary) + _relative(key, summary, summaries[0]) for summary in summaries)]
        for key in _COMPARED
        if any(summary.get(key) is not None for summary in summaries)
    ]
    note = '<p class="note">Percentages are relative to the first run; green is better.</p>'
    return f'<div class="card">{table([("Figure", "k"), *((name, "v") for name in names)], rows)}</div>{note}'


def _relative(key: str, summary: dict[str, Any], first: dict[str, Any]) -> str:
    """How much better or worse than the first run, as a coloured badge."""
    value, base = summary.get(key), first.get(key)
    if summary is first or key not in (*_LESS_IS_BETTER, *_MORE_IS_BETTER):
        return ""
    if not isinstance(value, int | float) or not isinstance(base, int | float) or not base:
        return ""
    change = value / base - 1
    if abs(change) < _ABOUT_EQUAL:
        return ""
    better = (change < 0) == (key in _LESS_IS_BETTER)
    return f' <span class="badge {"good" if better else "error"}">{change:+.0%}</span>'


def _repeats(runs: Sequence[RunRecords], summaries: Sequence[dict[str, Any]]) -> str:
    """Runs that differ in their seed only: the median and the range of what they reached."""
    groups: dict[str, list[int]] = {}
    for index, records in enumerate(runs):
        same = repr(sorted((line.key, repr(line.value)) for line in records.config if line.key not in _OF_A_REPEAT))
        groups.setdefault(same, []).append(index)
    repeated = [members for members in groups.values() if len(members) > 1]
    if not repeated:
        return ""
    rows = []
    for members in repeated:
        cells = [esc(", ".join(runs[index].name for index in members))]
        for key in ("best_eval_loss", "final_loss", "step_ms_p50"):
            found = [summaries[index][key] for index in members if isinstance(summaries[index].get(key), int | float)]
            if not found:
                cells.append("-")
                continue
            ends = (min(found), statistics.median(found), max(found))
            low, middle, high = (_cell(key, {key: value}) for value in ends)
            cells.append(f'{middle} <span class="soft">[{low}, {high}]</span>')
        rows.append(cells)
    columns = [("Runs", ""), ("best eval loss", "v"), ("final loss", "v"), ("step p50", "v")]
    note = '<p class="note">The median, and in brackets the smallest and the largest.</p>'
    return f'<section><h2>Repeats</h2><div class="card">{table(columns, rows)}</div>{note}</section>'


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
