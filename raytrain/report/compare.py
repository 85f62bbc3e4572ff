"""The page that compares several runs: what differs in their jobs, whether their losses can be compared, and how they
did, relative to the first."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any
from urllib.parse import quote

from cluster.wording import counted
from raytrain.report.figures import loss_text, measured, rate_text, seconds, size, summarise
from raytrain.report.page.charts import Curve, chart, smoothed
from raytrain.report.page.page import TONES
from raytrain.report.page.style import esc, page
from raytrain.report.page.tables import label, shown, table
from raytrain.report.records import RunRecords, read_records, series
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join, open_store

_RESULTS = (
    "status", "final_loss", "best_eval_loss", "best_eval_step", "perplexity", "accuracy", "steps", "epochs", "wall_s",
    "tokens_per_s_median", "samples_per_s_median", "step_ms_p50", "step_ms_p95", "peak_memory_bytes",
)  # fmt: skip
"""What the runs achieved: shown first, also where it is the same."""
_REST = (
    "tokens_per_s_run", "samples_per_s_run", "compute_s", "data_s", "communication_s", "mode", "devices", "strategy",
    "precision", "effective_batch", "micro_batch", "accumulation", "parameters", "experts_last",
)  # fmt: skip
"""Folded where it is the same in all runs."""
_LESS_IS_BETTER = (
    "wall_s", "step_ms_p50", "step_ms_p95", "peak_memory_bytes", "final_loss", "best_eval_loss", "perplexity"
)  # fmt: skip
_MORE_IS_BETTER = ("samples_per_s_median", "tokens_per_s_median", "accuracy")
_OF_EQUAL_STEPS = ("wall_s",)
"""Better or worse only than a run of as many steps."""
_CHOICES = {
    "device": "", "workers": "scale.workers", "strategy": "scale.strategy", "precision": "precision.dtype",
    "micro_batch_size": "loop.micro_batch_size", "accumulation": "loop.micro_batch_size", "storage": "data.storage",
    "loader_workers": "data.loader_workers", "threads": "scale.threads", "overlap": "scale.overlap",
    "hosts": "experts.hosts", "optimizer_impl": "optim.fused",
}  # fmt: skip
"""Decision of the plan -> the key that sets it; runs of one job can differ in what `auto` chose."""
_ABOUT_EQUAL = 0.01
"""A smaller relative difference is not marked."""
_OF_A_REPEAT = ("name", "seed", "save.dir")
"""Keys in which repeats of a run may differ."""
_FOUND = "tune.found"
"""What a search wrote down about its measurements; no setting."""
_FOLDER, _LONGEST = "comparisons", 120
_HEAD_KEYS, _HEAD_LENGTH = 2, 32
"""Most differing keys, and characters of their values, that name a run in the heads of the columns."""


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
    links = [_link(run.path, beside) for run in runs]
    store.write_bytes(f"{name}.html", compare_page(records, links).encode("utf-8", "replace"))
    return join(beside, f"{_FOLDER}/{name}.html")


def _link(path: str, beside: str) -> str:
    """The report of a run as seen from the folder of comparisons; "" where it is not in the same folder of runs."""
    parent, _, name = path.rstrip("/").rpartition("/")
    return f"../{quote(name)}/report/report.html" if parent == beside else ""


def compare_page(runs: Sequence[RunRecords], links: Sequence[str] = ()) -> str:
    """Several runs on one page; figures that no run has are left out. `links` are the addresses of their reports."""
    names = _distinct([records.name for records in runs])
    heads = _heads(runs) or names
    summaries = [summarise(records) for records in runs]
    notes = "".join(
        f'<article class="card finding warning"><span class="badge">warning</span><b>{esc(title)}</b>'
        f"<p>{esc(text)}</p></article>"
        for title, text in not_comparable(runs, names)
    )
    linked = [_titled(name, link) for name, link in zip_longest(names, links[: len(names)], fillvalue="")]
    meta = "".join(
        f"<span>{'' if heads is names else f'{esc(head)}: '}{link}</span>"
        for head, link in zip(heads, linked, strict=True)
    )
    body = (
        f'<header><p class="brand">raytrain report</p><h1>{len(runs)} runs compared</h1>'
        f'<p class="meta">{meta}</p></header>'
        + (f'<section><div class="findings tiles-gap">{notes}</div></section>' if notes else "")
        + f"<section><h2>What differs in their jobs</h2>{_differences(runs, heads)}</section>"
        + f"<section><h2>Key figures</h2>{_figures(summaries, heads)}</section>"
        + f'<section><h2>Loss</h2><div class="charts">{_charts(runs, heads)}</div></section>'
        + _repeats(runs, summaries)
    )
    return page("Runs compared - raytrain", body)


def _titled(name: str, link: str) -> str:
    return f'<a href="{esc(link)}">{esc(name)}</a>' if link else esc(name)


def _heads(runs: Sequence[RunRecords]) -> list[str]:
    """Names of the runs by what differs in their jobs, such as `lr 0.003`; [] where that is much or not distinct."""
    keys = [key for key in differing_keys(runs) if key not in ("name", "save.dir")]
    if not 1 <= len(keys) <= _HEAD_KEYS:
        return []
    heads = [", ".join(f"{key.rpartition('.')[2]} {shown(run.configured(key))}" for key in keys) for run in runs]
    return heads if len(set(heads)) == len(heads) and max(map(len, heads)) <= _HEAD_LENGTH else []


def differing_keys(runs: Sequence[RunRecords]) -> list[str]:
    """The keys of the jobs whose values are not the same in all runs, in the order of the first that has them."""
    keys = dict.fromkeys(line.key for records in runs for line in records.config if not line.key.startswith(_FOUND))
    return [key for key in keys if len({repr(records.configured(key)) for records in runs}) > 1]


def not_comparable(runs: Sequence[RunRecords], names: Sequence[str]) -> list[tuple[str, str]]:
    """(title, text) of each reason for which a lower loss does not mean a better model."""
    found = []
    vocabularies = [records.vocab_size for records in runs]
    if len(set(vocabularies)) > 1:
        listed = ", ".join(f"{name} {size or 'unknown'}" for name, size in zip(names, vocabularies, strict=True))
        why = "A loss per token depends on what a token is; compare the loss per byte of text instead."
        found.append(("Different vocabularies: their losses are not comparable", f"{listed}. {why}"))
    split = [key for key in differing_keys(runs) if key.startswith("data.") or key == "loop.eval_batches"]
    split = [key for key in split if key not in ("data.storage", "data.loader_workers", "data.prefetch")]
    rows = [records.eval_rows for records in runs]
    if split or len(set(rows)) > 1:
        counts = ["unknown" if count is None else f"{count:,}" for count in rows]
        listed = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        keys = f" They differ in {', '.join(split)}." if split else ""
        found.append(("Different evaluation data: eval losses are not comparable", f"Rows held out: {listed}.{keys}"))
    return found


def _differences(runs: Sequence[RunRecords], heads: Sequence[str]) -> str:
    """The keys in which their jobs differ, and what was chosen differently for them."""
    keys = [key for key in differing_keys(runs) if key not in ("name", "save.dir")]
    rows = [[f"<code>{esc(key)}</code>", *(shown(records.configured(key)) for records in runs)] for key in keys]
    for name, key in _CHOICES.items():
        values = [shown(records.planned(name), name) for records in runs]
        if key not in keys and len(set(values)) > 1 and all(records.plan for records in runs):
            chosen = f'{esc(name.replace("_", " "))} <span class="badge info">chosen</span>'
            rows.append([chosen, *values])
    if not rows:
        return '<p class="note">Nothing: all keys have the same values.</p>'
    columns = [("Key", "k"), *((head, "v") for head in heads)]
    return f'<div class="card">{table(columns, rows, heads=True)}</div>'


def _charts(runs: Sequence[RunRecords], heads: Sequence[str]) -> str:
    train, evals, are_smoothed = [], [], False
    for index, (name, records) in enumerate(zip(heads, runs, strict=True)):
        colour, points = f"c{index % 8 + 1}", series(records.train, "loss")
        are_smoothed |= (long := len(points) > 30)
        train.append(Curve(name, smoothed(points) if long else points, colour))
        evals.append(Curve(name, series(records.evals, "loss"), colour, "dots"))
    first = f"Training loss{' (smoothed)' if are_smoothed else ''}"
    return "".join(
        chart(title, curves, wide=True, write=loss_text, note=note)
        for title, (curves, note) in ((first, _apart(train)), ("Eval loss", _apart(evals)))
    )


def _apart(curves: Sequence[Curve]) -> tuple[list[Curve], str]:
    """The curves, those that would hide an earlier one dashed, and a sentence that says so."""
    drawn, equal = [], []
    for index, curve in enumerate(curves):
        same = next((other for other in curves[:index] if _covers(curve, other)), None)
        drawn.append(curve if same is None else replace(curve, style="dashed"))
        equal += [f"{curve.label}: the same losses as {same.label}, dashed."] if same is not None else []
    return drawn, " ".join(equal)


def _covers(curve: Curve, other: Curve) -> bool:
    """Whether the curves are the same wherever both have points."""
    known = dict(other.points)
    common = [(known[x], y) for x, y in curve.points if x in known]
    return bool(common) and all(math.isclose(one, y, rel_tol=1e-6) for one, y in common)


def _figures(summaries: Sequence[dict[str, Any]], heads: Sequence[str]) -> str:
    """What the runs achieved, then what else differs; what is the same in all of them is folded."""
    if any(summary.get("tokens_per_s_median") for summary in summaries):
        summaries = [{key: row[key] for key in row if not key.startswith("samples_per_s")} for row in summaries]
    known = [key for key in (*_RESULTS, *_REST) if any(summary.get(key) is not None for summary in summaries)]
    cells = {key: [_cell(key, summary) for summary in summaries] for key in known}
    folded = [key for key in known if key in _REST and len(set(cells[key])) == 1]
    rows = [
        [
            esc(label(key)),
            *(cell + _relative(key, row, summaries[0]) for cell, row in zip(cells[key], summaries, strict=True)),
        ]
        for key in known
        if key not in folded
    ]
    note = "Percentages are relative to the first run; green is better."
    columns = [("Figure", "k"), *((head, "v") for head in heads)]
    body = f'<div class="card">{table(columns, rows, heads=True)}</div><p class="note">{note}</p>'
    if not folded:
        return body
    same = table([("Figure", "k"), ("All runs", "v")], [[esc(label(key)), cells[key][0]] for key in folded])
    summary = f"<summary>{counted(len(folded), 'figure is', 'figures are')} the same in all runs</summary>"
    return f'{body}<details>{summary}<div class="card">{same}</div></details>'


def _relative(key: str, summary: dict[str, Any], first: dict[str, Any]) -> str:
    """How much better or worse than the first run, as a coloured badge."""
    value, base = summary.get(key), first.get(key)
    if summary is first or key not in (*_LESS_IS_BETTER, *_MORE_IS_BETTER):
        return ""
    if key in _OF_EQUAL_STEPS and summary.get("steps") != first.get("steps"):
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
    columns = [("Runs", "k"), ("best eval loss", "v"), ("final loss", "v"), ("step time (p50)", "v")]
    note = '<p class="note">The median, and in brackets the smallest and the largest.</p>'
    return f'<section><h2>Repeats</h2><div class="card">{table(columns, rows, heads=True)}</div>{note}</section>'


def _cell(key: str, summary: dict[str, Any]) -> str:
    value = summary.get(key)
    if key == "status":
        return f'<span class="badge {TONES.get(str(value), "")}">{esc(value)}</span>'
    if value is None:
        return "-"
    if not isinstance(value, int | float):
        return shown(value)
    if "_per_s" in key:
        return esc(rate_text(value))
    if key.endswith("_loss"):
        return esc(loss_text(value))
    if key == "accuracy":
        return f"{value:.2%}"
    if key.endswith("_s") or "_ms_" in key:
        return esc(seconds(value / 1000 if "_ms_" in key else value))
    return esc(size(value) if key.endswith("_bytes") else measured(value))


def _distinct(names: Sequence[str]) -> list[str]:
    """Numbers the names that occur more than once (runs of different directories)."""
    return [f"{name} ({index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)]
