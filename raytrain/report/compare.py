"""The page that compares several runs: what differs in their jobs, whether their losses can be compared, and how they
did, relative to the first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any
from urllib.parse import quote

from cluster.wording import loss_text
from raytrain.report.charts import Curve, chart, smoothed
from raytrain.report.figures import summarise
from raytrain.report.page import TONES
from raytrain.report.records import RunRecords, read_records, series
from raytrain.report.style import card, esc, finding, page
from raytrain.report.tables import figure, label, shown, table
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
"""Left out where it is the same in all runs."""
_LESS_IS_BETTER = (
    "wall_s", "step_ms_p50", "step_ms_p95", "peak_memory_bytes", "final_loss", "best_eval_loss", "perplexity"
)  # fmt: skip
_MORE_IS_BETTER = ("samples_per_s_median", "tokens_per_s_median", "accuracy")
_CHOICES = {
    "device": "", "workers": "scale.workers", "strategy": "scale.strategy", "precision": "precision.dtype",
    "micro_batch_size": "loop.micro_batch_size", "accumulation": "loop.micro_batch_size", "storage": "data.storage",
    "loader_workers": "data.loader_workers", "threads": "scale.threads", "overlap": "scale.overlap",
    "hosts": "experts.hosts", "optimizer_impl": "optim.fused",
}  # fmt: skip
"""Decision of the plan -> the key that sets it; runs of one job can differ in what `auto` chose."""
_ABOUT_EQUAL = 0.01
"""A smaller relative difference is not marked."""
_FOUND = "tune.found"
"""What a search wrote down about its measurements; no setting."""
_FOLDER, _LONGEST = "comparisons", 120


def compare(runs: Sequence[RunFolder]) -> str:
    """Writes the page into `comparisons/` beside the first run, and returns its path. Raises RunError if the folder
    cannot be written."""
    records = [read_records(run) for run in runs]
    beside, _, first = runs[0].path.rstrip("/").rpartition("/")
    others = "-".join(run.path.rstrip("/").rpartition("/")[2] for run in runs[1:])
    name = f"{first}-{others}"[:_LONGEST]
    store = open_store(join(beside, _FOLDER))
    store.make_dir("")
    places = [run.path.rstrip("/").rpartition("/") for run in runs]
    # the reports as seen from the folder of comparisons; "" where a run is not in the same folder of runs
    links = [f"../{quote(name)}/report/report.html" if parent == beside else "" for parent, _, name in places]
    store.write_bytes(f"{name}.html", compare_page(records, links).encode("utf-8", "replace"))
    return join(beside, f"{_FOLDER}/{name}.html")


def compare_page(runs: Sequence[RunRecords], links: Sequence[str] = ()) -> str:
    """Several runs on one page; figures that no run has are left out. `links` are the addresses of their reports."""
    names = [records.name for records in runs]  # those of different directories may be the same
    names = [f"{name} ({index + 1})" if names.count(name) > 1 else name for index, name in enumerate(names)]
    notes = "".join(finding("warning", title, text) for title, text in not_comparable(runs, names))
    meta = "".join(
        f'<span><a href="{esc(link)}">{esc(name)}</a></span>' if link else f"<span>{esc(name)}</span>"
        for name, link in zip_longest(names, links[: len(names)], fillvalue="")
    )
    train, evals = [], []
    for index, (name, records) in enumerate(zip(names, runs, strict=True)):
        colour, points = f"c{index % 8 + 1}", series(records.train, "loss")
        train.append(Curve(name, smoothed(points) if len(points) > 30 else points, colour))
        evals.append(Curve(name, series(records.evals, "loss"), colour, "dots"))
    curves = chart("Training loss", train, wide=True, write=loss_text)
    curves += chart("Eval loss", evals, wide=True, write=loss_text)
    body = (
        f'<header><p class="brand">raytrain report</p><h1>{len(runs)} runs compared</h1>'
        f'<p class="meta">{meta}</p></header>'
        + (f'<section><div class="findings tiles-gap">{notes}</div></section>' if notes else "")
        + f"<section><h2>What differs in their jobs</h2>{_differences(runs, names)}</section>"
        + f"<section><h2>Key figures</h2>{_figures([summarise(records) for records in runs], names)}</section>"
        + f'<section><h2>Loss</h2><div class="charts">{curves}</div></section>'
    )
    return page("Runs compared - raytrain", body)


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
    return card(table(columns, rows))


def _figures(summaries: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """What the runs achieved, then what else differs."""
    if any(summary.get("tokens_per_s_median") for summary in summaries):
        summaries = [{key: row[key] for key in row if not key.startswith("samples_per_s")} for row in summaries]
    rows = []
    for key in (*_RESULTS, *_REST):
        cells = [figure(key, summary.get(key)) for summary in summaries]
        if key == "status":
            cells = [f'<span class="badge {TONES.get(cell, "")}">{cell}</span>' for cell in cells]
        if set(cells) == {"-"} or (key in _REST and len(set(cells)) == 1):
            continue
        relative = (_relative(key, summary, summaries[0]) for summary in summaries)
        rows.append([esc(label(key)), *(cell + change for cell, change in zip(cells, relative, strict=True))])
    note = "Percentages are relative to the first run; green is better."
    columns = [("Figure", "k"), *((name, "v") for name in names)]
    return f'{card(table(columns, rows))}<p class="note">{note}</p>'


def _relative(key: str, summary: dict[str, Any], first: dict[str, Any]) -> str:
    """How much better or worse than the first run, as a coloured badge."""
    value, base = summary.get(key), first.get(key)
    if summary is first or key not in (*_LESS_IS_BETTER, *_MORE_IS_BETTER):
        return ""
    if key == "wall_s" and summary.get("steps") != first.get("steps"):  # comparable for as many steps only
        return ""
    if not isinstance(value, int | float) or not isinstance(base, int | float) or not base:
        return ""
    change = value / base - 1
    if abs(change) < _ABOUT_EQUAL:
        return ""
    better = (change < 0) == (key in _LESS_IS_BETTER)
    return f' <span class="badge {"good" if better else "error"}">{change:+.0%}</span>'
