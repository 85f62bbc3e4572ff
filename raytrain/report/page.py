"""The report page of one run: records in, HTML out; its short form for a notebook; `build_report` writes it.

Called at the end of a run, by `raytrain report`, and for each run of a comparison.
"""

from __future__ import annotations

import csv
import io
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from cluster.wording import counted, loss_text, measured, plain_number, rate_text, seconds, size
from raytrain.report.charts import Curve, Mark, Point, chart, smoothed
from raytrain.report.experts import activation_spec, device_spec
from raytrain.report.figures import HISTORY_COLUMNS, history, outcome, summarise, summary_text, training_spec
from raytrain.report.findings import diagnose
from raytrain.report.lifecycle import drift_spec, graph_specs, lives_spec, sleep_spec
from raytrain.report.records import Row, RunRecords, listed, mapping, number, read_records, series, values
from raytrain.report.style import STYLE, esc, finding, header, page, picture, sections, tiles
from raytrain.report.tables import configuration, epochs, machine, plan_table, sample, table, time_table, timeline
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join

MOST_CURVES = 8
"""Devices drawn; of more, those whose figure is highest at the end."""
STEADY = 0.005
"""Figures that differ by less than this from each other are listed in a line below the charts."""
FIGURES = {
    "utilisation": ("Utilisation", "%", 1.0), "memory_used": ("Memory in use", "GiB", 2.0**30),
    "memory_run": ("Memory of the run", "GiB", 2.0**30), "temperature_c": ("Temperature", "°C", 1.0),
    "power_w": ("Power", "W", 1.0), "clock_mhz": ("Clock", "MHz", 1.0),
}  # fmt: skip
"""Key of a device in telemetry -> the title of its chart, the unit, and the divisor to it."""


def telemetry_charts(records: RunRecords, marks: Sequence[Mark] = ()) -> str:
    """The charts; "" for a run without telemetry. `marks` are drawn in each of them."""
    rows = [row for row in records.telemetry if number(row.get("step")) is not None]
    starts = {row.get("attempt"): number(row.get("from_step")) or 0.0 for row in records.of_kind("attempt")}
    found, notes = [], []
    for key, (title, unit, _) in FIGURES.items():
        curves = device_curves(rows, key, starts=starts)
        values = [y for curve in curves for _, y in curve.points]
        if values and max(values) - min(values) <= STEADY * abs(max(values)):
            notes.append(f"{title}: {measured(max(values))} {unit} throughout")
            continue
        if any(curve.style == "faint" for curve in curves) and not found:
            notes.append("Faint: steps that were lost with a worker and repeated")
        found.append(chart(f"{title} ({unit})", curves, marks=marks, from_zero=key != "temperature_c"))
    slowed = {f"{why} ({device.get('device')})" for row in rows for device in map(mapping, listed(row.get("devices")))
              for why in listed(device.get("throttle"))}  # fmt: skip
    notes += [f"Devices were slowed down by: {', '.join(sorted(slowed))}"] if slowed else []
    inner, note = "".join(found), f'<p class="note">{esc(". ".join(notes))}.</p>' if notes else ""
    return f'<div class="charts devices">{inner}</div>{note}' if inner else note


def device_curves(rows: Sequence[Row], key: str, *, starts: Mapping[Any, float]) -> list[Curve]:
    """A curve over the steps for each device that reports the figure, after those of the steps that it lost. `starts`:
    attempt -> the step that it started from."""
    several = len({row.get("node") for row in rows}) > 1
    samples: dict[str, list[tuple[float, object, float]]] = {}
    for row in rows:
        # a sample from before the state was loaded counts at the start of its attempt
        step = max(number(row.get("step")) or 0.0, starts.get(row.get("attempt"), 0.0))
        for device in map(mapping, listed(row.get("devices"))):
            if (value := number(device.get(key))) is not None:
                name = f"{row.get('node')} {device.get('device')}" if several else str(device.get("device"))
                samples.setdefault(name, []).append((step, row.get("attempt"), value / FIGURES[key][2]))
    traces = {name: _trace(seen, largest=key.startswith("memory")) for name, seen in samples.items()}
    highest = sorted(traces, key=lambda name: -traces[name][0][-1][1])[:MOST_CURVES]
    curves = []
    for place, name in enumerate(sorted(highest)):
        kept, lost, gaps = traces[name]
        colour = f"c{place % 8 + 1}"
        curves += [Curve(name, part, colour, "faint") for part in lost if len(part) > 1]
        curves += [Curve(name, kept, colour, gaps=gaps)] if len(kept) > 1 else []
    return curves


def _trace(
    samples: Sequence[tuple[float, object, float]], *, largest: bool
) -> tuple[list[Point], list[list[Point]], tuple[float, ...]]:
    """(points of the run's own steps, parts that a restart repeated, steps at which the line is interrupted) from
    samples (step, attempt, value) in order of time; those of one step are one point, their largest value or mean."""
    kept: list[tuple[float, object, list[float]]] = []
    lost: list[list[Point]] = []
    gaps: list[float] = []
    value_of = max if largest else fmean
    for step, attempt, value in samples:
        if kept and step < kept[-1][0]:
            first = bisect_left(kept, step, key=lambda point: point[0])
            lost.append([(at, value_of(seen)) for at, _, seen in kept[first:]])
            del kept[first:]
            gaps.append(step)
        elif kept and attempt != kept[-1][1]:
            gaps.append(step)
        if kept and kept[-1][0] == step:
            if attempt != kept[-1][1]:  # of a step, the later attempt counts
                kept[-1] = (step, attempt, [])
            kept[-1][2].append(value)
        else:
            kept.append((step, attempt, [value]))
    return [(at, value_of(seen)) for at, _, seen in kept], lost, tuple(gaps)


# ---------------------------------------------------------------- page


TONES = {"done": "good", "failed": "error", "interrupted": "warning", "running": "info", "lost": "warning"}
_ROUGH = 30
"""Number of points from which a curve is drawn smoothed, with the raw curve faint behind it."""


def report_page(records: RunRecords, pictures: Mapping[str, bytes] | None = None) -> str:
    """The complete page of a run; sections without records are left out. `pictures` are PNG files by name."""
    summary = summarise(records)
    inner = "".join(finding(**vars(one)) for one in diagnose(records))
    curves = _curves(records)
    shown = (pictures or {}).items()  # embedded, so that the page is a single file
    drawn = "".join(f'<div class="card scroll">{picture(_ALT.get(name, name), data)}</div>' for name, data in shown)
    parts = [
        ("findings", "What stands out", f'<div class="findings">{inner}</div>' if inner else ""),
        ("curves", "Curves", f'<div class="charts">{curves}</div>' if curves else ""),
        ("devices", "Devices", telemetry_charts(records, restarts(records))),
        ("experts", "Experts", drawn),
        ("sample", "A sample of its text", sample(records)),
        ("time", "Where the time went", time_table(records)),
        ("plan", "The plan and its reasons", plan_table(records.plan)),
        ("timeline", "Timeline", timeline(records.events)),
        ("epochs", "Epochs", epochs(records)),
        ("machine", "Machine", machine(records)),
        ("config", "Configuration", configuration(records)),
    ]
    links, body = sections(parts)
    state = outcome(records)
    began = next((number(row.get("time")) for row in records.events), None) or number(records.environment.get("time"))
    facts = [
        f"started {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M:%S} UTC" if began else "",
        f"host {records.environment['host']}" if records.environment.get("host") else "",
        str(summary["devices"]) if records.plan else "",
        f"{summary['attempts']} attempts" if (summary["attempts"] or 0) > 1 else "",
        f"{plain_number(number(summary['parameters']))} parameters" if summary["parameters"] else "",
    ]
    head = header("report", records.name, state.status, TONES.get(state.status, "info"), state.sentence, facts)
    head += f"{links}{_tiles(records, summary)}"
    torn = "".join(f"<p>Could not be read: {esc(line)}</p>" for line in records.unreadable)
    files = "history.csv, training_metrics.png and .json, performance_summary.txt and .json"
    files += ", expert_activations.png and .json" if records.loads else ""
    foot = f"<footer>{torn}<p>{esc(records.path)}</p><p>In the same directory: {files}.</p></footer>"
    return page(f"{records.name} - raytrain", f"{head}{body}{foot}")


def _tiles(records: RunRecords, summary: dict[str, Any]) -> str:
    rate = "tokens" if summary["tokens_per_s_median"] else "samples"
    whole = summary[f"{rate}_per_s_run"]
    best_at = f"step {summary['best_eval_step']:,}" if summary["best_eval_step"] else ""
    accuracy = f"{summary['accuracy']:.2%}" if summary["accuracy"] is not None else ""
    p50, p95 = (seconds(ms / 1000) if ms is not None else "" for ms in (summary["step_ms_p50"], summary["step_ms_p95"]))
    commands = len(records.of_kind("driver_start"))
    if commands > 1:
        spent = f"over {counted(commands, 'command')}"
    elif (summary["attempts"] or 0) > 1:
        spent = "all attempts"
    else:
        spent = f"{seconds(summary.get('startup_s'))} of it start-up"
    figures = [
        ("Final loss", loss_text(summary["final_loss"]), f"first {loss_text(summary['first_loss'])}"),
        ("Best eval loss", loss_text(summary["best_eval_loss"]), best_at),
        ("Perplexity", measured(summary["perplexity"]), "best eval, per token"),
        ("Accuracy", accuracy, "eval"),
        ("Steps", f"{summary['steps']:,}", f"{summary['epochs']} epochs" if (summary["epochs"] or 0) > 1 else ""),
        ("Wall time", seconds(summary["wall_s"]) if summary["wall_s"] else "", spent),
        (f"{rate.capitalize()} per second", rate_text(summary[f"{rate}_per_s_median"]),
         "median" if whole is None else f"median; whole run {rate_text(whole)}"),
        ("Step time", p50, f"p95 {p95}"),
        ("Peak memory", size(summary["peak_memory_bytes"]) if summary["peak_memory_bytes"] else "", "per worker"),
    ]  # fmt: skip
    return tiles(figures)


def restarts(records: RunRecords) -> list[Mark]:
    again = [row for row in records.of_kind("attempt")[1:] if number(row.get("from_step")) is not None]
    return [Mark(float(row["from_step"]), f"attempt {row.get('attempt', '')}", "restart") for row in again]


def marks(records: RunRecords) -> list[Mark]:
    saved = [row for row in records.of_kind("checkpoint", "save") if number(row.get("step")) is not None]
    return restarts(records) + [Mark(float(row["step"]), "checkpoint") for row in saved]


def rough(label: str, points: Sequence[tuple[float, float]], colour: str) -> list[Curve]:
    """A noisy curve: smoothed, with its raw points faint behind."""
    if len(points) < _ROUGH:
        return [Curve(label, points, colour)]
    return [Curve(label, points, colour, "faint"), Curve(f"{label} (smoothed)", smoothed(points), colour)]


def _curves(records: RunRecords) -> str:
    """The loss, and smaller charts; one with a single point is left out, since a tile shows that value already."""
    rows = records.train
    losses = [*rough("train", series(rows, "loss"), "c1"), Curve("eval", series(records.evals, "loss"), "c2", "dots")]
    norms, loads = series(rows, "grad_norm"), series(rows, "load_imbalance")
    limit, clip = number(records.configured("optim.max_grad_norm")), []
    if limit and norms and max(norm for _, norm in norms) >= 0.5 * limit:
        clip = [Curve("clip", [(norms[0][0], limit), (norms[-1][0], limit)], "c8", "dashed")]
    hosts = Curve("busiest host / mean", series(rows, "host_imbalance"), "c2")
    rate = "tokens" if values(rows, "tokens_per_s") else "samples"
    per_s, times = series(rows, f"{rate}_per_s"), series(rows, "step_time_s")
    accuracy = [
        Curve("eval", series(records.evals, "accuracy"), "c2", "dots"),
        Curve("train", series(rows, "accuracy"), "c1"),
    ]
    unit, name = (2**30, "GiB") if max(values(rows, "peak_memory_bytes"), default=0) >= 2**30 else (2**20, "MiB")
    memory = [(step, used / unit) for step, used in series(rows, "peak_memory_bytes")]
    again = {"marks": restarts(records)}
    found = [
        ("Accuracy", accuracy, {"write": lambda y: f"{y:.2%}", "tick": lambda y: f"{y:.3g}"}),
        ("Gradient norm", rough("gradient norm", norms, "c4") + clip, {}),
        ("Learning rate", [Curve("lr", series(rows, "lr"), "c3")], {"from_zero": True}),
        ("Throughput", [Curve(f"{rate} per second", per_s, "c6")], {"from_zero": True, "write": rate_text, **again}),
        ("Step time", rough("step", times, "c5"), {"from_zero": True, "write": seconds, "tick": seconds, **again}),
        ("Expert load", [Curve("busiest / mean", loads, "c7"), hosts], {}),
        ("Peak memory", [Curve(f"{name} per worker", memory, "c8")], {"from_zero": True, **again}),
    ]
    own = dict.fromkeys(name for row in rows for name in listed(row.get("metrics")) if name != "accuracy")
    for name in own:
        evaluated = Curve("eval", series(records.evals, name), "c2", "dots")
        found.append((str(name), [Curve("train", series(rows, name), "c1"), evaluated], {}))
    smaller = [chart(title, curves, **how) for title, curves, how in found if any(len(c.points) > 1 for c in curves)]
    return "".join([chart("Loss", losses, marks=marks(records), wide=True), *smaller])


_ALT = {
    "expert_activations": "how many rows each expert of each layer received, and when it was used last",
    "expert_lifecycle": "when each expert was born, merged or pruned, and how many there were",
    "sleep_cycles": "how often the model slept, and what it replayed and changed",
    "concept_drift": "how far the inputs of each layer moved between sleep cycles, and how the loss recovered",
    "expert_device_distribution": "how many experts each host has, with bytes and rows of each host",
}


#: A notebook has a theme of its own, whatever the browser prefers: its colour for text, nothing behind it, and curves
#: that can be seen on white and on black.
_THEMELESS = (
    "--bg:transparent;--card:transparent;--ink:currentColor;--soft:currentColor;--line:#8886;--grid:#8884;"
    "--c1:#4287f5;--c2:#e07a1f;--tip:#18212c;--tipink:#fff;padding-bottom:4px"
)


def result_snippet(figures: Mapping[str, Any], history: Sequence[Row]) -> str:
    """The figures and the loss curves of a run for the output of a notebook's cell: HTML without scripts, whose styles
    apply inside it only. Figures that are None or "" are left out; `history` are rows of metrics.jsonl."""
    losses, evals = (series([row for row in history if row.get("kind") == kind], "loss") for kind in ("train", "eval"))
    curves = chart("Loss", [Curve("train", losses, "c1"), Curve("eval", evals, "c2", "dots")])
    rows = [
        [esc(name), esc(plain_number(value) if isinstance(value, int | float) else value)]
        for name, value in figures.items()
        if value not in (None, "")
    ]
    scoped = f".raytrain{{{STYLE.replace(':root{', '&{')}}}.raytrain{{{_THEMELESS}}}"  # leaves the notebook alone
    shown = table([("Run", "k"), ("", "v")], rows)
    return f'<div class="raytrain"><style>{scoped}</style>{shown}{curves}</div>'


def build_report(run: RunFolder) -> str:
    """Writes `report/` of a run in any state, including failed and running; returns the path of the page. Raises
    RunError if the folder cannot be written."""
    from raytrain.report.plots import activations, devices, figure, knowledge_graph, lives, png  # loads matplotlib

    records = read_records(run)
    summary, spec = summarise(records), training_spec(records)
    drawn = {"expert_activations": (activations, activation_spec(records)),
             "expert_device_distribution": (devices, device_spec(records)),
             "expert_lifecycle": (lives, lives_spec(records)),
             "sleep_cycles": (figure, sleep_spec(records)),
             "concept_drift": (figure, drift_spec(records))}  # fmt: skip
    pictures = {name: png(draw(shown)) for name, (draw, shown) in drawn.items() if shown is not None}
    buffer = io.StringIO()
    writer: csv.DictWriter[str] = csv.DictWriter(buffer, HISTORY_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(history(records))
    files = {
        **{f"{name}.png": data for name, data in pictures.items()},
        **{f"{name}.json": _json(shown) for name, (_, shown) in drawn.items() if shown is not None},
        **{f"knowledge_graph_epoch_{n}.png": png(knowledge_graph(one)) for n, one in graph_specs(records).items()},
        "training_metrics.json": _json(spec),
        "training_metrics.png": png(figure(spec)),
        "history.csv": buffer.getvalue().encode(),
        "performance_summary.json": _json(summary),
        "performance_summary.txt": summary_text(summary).encode("utf-8", "replace"),
        "report.html": report_page(records, pictures).encode("utf-8", "replace"),
    }
    for name, data in files.items():
        run.store.write_bytes(f"report/{name}", data)
    return join(run.report_dir, "report.html")


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
