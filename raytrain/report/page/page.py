"""The report page of one run: records in, HTML out. Every text from a record is escaped with `esc`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cluster.wording import counted, loss_text, measured, plain_number, rate_text, seconds, size
from raytrain.report.figures import outcome, summarise
from raytrain.report.findings.finding import Finding
from raytrain.report.findings.rules import diagnose
from raytrain.report.page.charts import Curve, Mark, chart, smoothed
from raytrain.report.page.devices import telemetry_charts
from raytrain.report.page.style import esc, page, picture
from raytrain.report.page.tables import configuration, epochs, machine, plan_table, sample, time_table
from raytrain.report.page.timeline import timeline
from raytrain.report.records import RunRecords, listed, number, series, values

TONES = {"done": "good", "failed": "error", "interrupted": "warning", "running": "info", "lost": "warning"}
_ROUGH = 30
"""Number of points from which a curve is drawn smoothed, with the raw curve faint behind it."""


def report_page(records: RunRecords, pictures: Mapping[str, bytes] | None = None) -> str:
    """The complete page of a run; sections without records are left out. `pictures` are PNG files by name."""
    summary = summarise(records)
    findings = diagnose(records)
    sections = [
        ("findings", "What stands out", _findings(findings)),
        ("curves", "Curves", _curves(records)),
        ("devices", "Devices", telemetry_charts(records, restarts(records))),
        ("experts", "Experts", _pictures(pictures or {})),
        ("sample", "A sample of its text", sample(records)),
        ("time", "Where the time went", time_table(records)),
        ("plan", "The plan and its reasons", plan_table(records.plan)),
        ("timeline", "Timeline", timeline(records.events)),
        ("epochs", "Epochs", epochs(records)),
        ("machine", "Machine", machine(records)),
        ("config", "Configuration", configuration(records)),
    ]
    shown = [(key, title, body) for key, title, body in sections if body]
    links = "".join(f'<a href="#{key}">{esc(title)}</a>' for key, title, _ in shown)
    body = "".join(f'<section id="{key}"><h2>{esc(title)}</h2>{body}</section>' for key, title, body in shown)
    head = f"{_head(records, summary)}<nav>{links}</nav>{_tiles(records, summary)}"
    return page(f"{records.name} - raytrain", f"{head}{body}{_foot(records)}")


def _head(records: RunRecords, summary: dict[str, Any]) -> str:
    state = outcome(records)
    tone = TONES.get(state.status, "info")
    began = next((number(row.get("time")) for row in records.events), None) or number(records.environment.get("time"))
    facts = [
        f"started {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M:%S} UTC" if began else "",
        f"host {records.environment['host']}" if records.environment.get("host") else "",
        str(summary["devices"]) if records.plan else "",
        f"{summary['attempts']} attempts" if (summary["attempts"] or 0) > 1 else "",
        f"{plain_number(number(summary['parameters']))} parameters" if summary["parameters"] else "",
    ]
    meta = "".join(f"<span>{esc(fact)}</span>" for fact in facts if fact)
    return (
        f'<header><p class="brand">raytrain report</p><div class="head"><h1>{esc(records.name)}</h1>'
        f'<span class="pill {tone}">{esc(state.status)}</span></div>'
        f'<p class="lead">{esc(state.sentence)}</p><p class="meta">{meta}</p></header>'
    )


def _tiles(records: RunRecords, summary: dict[str, Any]) -> str:
    rate = "tokens" if summary["tokens_per_s_median"] else "samples"
    whole = summary[f"{rate}_per_s_run"]
    best_at = f"step {summary['best_eval_step']:,}" if summary["best_eval_step"] else ""
    accuracy = f"{summary['accuracy']:.2%}" if summary["accuracy"] is not None else ""
    p50, p95 = (seconds(ms / 1000) if ms is not None else "" for ms in (summary["step_ms_p50"], summary["step_ms_p95"]))
    tiles = [
        ("Final loss", loss_text(summary["final_loss"]), f"first {loss_text(summary['first_loss'])}"),
        ("Best eval loss", loss_text(summary["best_eval_loss"]), best_at),
        ("Perplexity", measured(summary["perplexity"]), "best eval, per token"),
        ("Accuracy", accuracy, "eval"),
        (
            "Steps",
            f"{summary['steps']:,}",
            f"{summary['epochs']} epochs" if (summary["epochs"] or 0) > 1 else "",
        ),
        ("Wall time", seconds(summary["wall_s"]) if summary["wall_s"] else "", _spent(records, summary)),
        (
            f"{rate.capitalize()} per second",
            rate_text(summary[f"{rate}_per_s_median"]),
            "median" if whole is None else f"median; whole run {rate_text(whole)}",
        ),
        ("Step time", p50, f"p95 {p95}"),
        (
            "Peak memory",
            size(summary["peak_memory_bytes"]) if summary["peak_memory_bytes"] else "",
            "per worker",
        ),
    ]
    cells = "".join(
        f'<dl class="tile"><dt>{esc(name)}</dt><dd>{esc(value)}<small>{esc(note)}</small></dd></dl>'
        for name, value, note in tiles
        if value and value != "-"
    )
    return f'<div class="tiles">{cells}</div>'


def _spent(records: RunRecords, summary: dict[str, Any]) -> str:
    """What the wall time is the sum of, or how much of it a single attempt needed to start."""
    commands = len(records.of_kind("driver_start"))
    if commands > 1:
        return f"over {counted(commands, 'command')}"
    return "all attempts" if (summary["attempts"] or 0) > 1 else f"{seconds(summary.get('startup_s'))} of it start-up"


def _findings(findings: Sequence[Finding]) -> str:
    cards = (
        f'<article class="card finding {item.severity}"><span class="badge">{item.severity}</span>'
        f"<b>{esc(item.title)}</b><p>{esc(item.evidence)}</p>"
        f"{f'<p class=remedy>{esc(item.remedy)}</p>' if item.remedy else ''}{_options(item.options)}</article>"
        for item in findings
    )
    inner = "".join(cards)
    return f'<div class="findings">{inner}</div>' if inner else ""


def _options(options: Sequence[str]) -> str:
    return f"<ol>{''.join(f'<li>{esc(one)}</li>' for one in options)}</ol>" if options else ""


def restarts(records: RunRecords) -> list[Mark]:
    """Attempts after the first as marks on the step axis."""
    again = [row for row in records.of_kind("attempt")[1:] if number(row.get("from_step")) is not None]
    return [Mark(float(row["from_step"]), f"attempt {row.get('attempt', '')}", "restart") for row in again]


def marks(records: RunRecords) -> list[Mark]:
    """Restarts and checkpoints as marks on the step axis."""
    saved = [row for row in records.of_kind("checkpoint", "save") if number(row.get("step")) is not None]
    return restarts(records) + [Mark(float(row["step"]), "checkpoint") for row in saved]


def rough(label: str, points: Sequence[tuple[float, float]], colour: str) -> list[Curve]:
    """A noisy curve: smoothed, with its raw points faint behind."""
    if len(points) < _ROUGH:
        return [Curve(label, points, colour)]
    return [Curve(label, points, colour, "faint"), Curve(f"{label} (smoothed)", smoothed(points), colour)]


def _curves(records: RunRecords) -> str:
    losses = rough("train", series(records.train, "loss"), "c1")
    losses.append(Curve("eval", series(records.evals, "loss"), "c2", "dots"))
    figures = [chart("Loss", losses, marks=marks(records), wide=True), *_trends(records)]
    inner = "".join(figures)
    return f'<div class="charts">{inner}</div>' if inner else ""


def _trends(records: RunRecords) -> list[str]:
    """The smaller charts; one with a single point is left out, since a tile shows that value already."""
    rows = records.train
    norms, loads = series(rows, "grad_norm"), series(rows, "load_imbalance")
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
        ("Gradient norm", rough("gradient norm", norms, "c4") + _clip_line(records, norms), {}),
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
    return [chart(title, curves, **how) for title, curves, how in found if any(len(c.points) > 1 for c in curves)]


def _pictures(pictures: Mapping[str, bytes]) -> str:
    """The pictures, embedded so that the page is a single file."""
    return "".join(
        f'<div class="card scroll">{picture(_ALT.get(name, name), data)}</div>' for name, data in pictures.items()
    )


_ALT = {
    "expert_activations": "how many rows each expert of each layer received, and when it was used last",
    "expert_device_distribution": "how many experts each host has, with bytes and rows of each host",
}


def _clip_line(records: RunRecords, norms: Sequence[tuple[float, float]]) -> list[Curve]:
    """The gradient clip as a dashed line, if the norms come close to it."""
    limit = number(records.configured("optim.max_grad_norm"))
    if not limit or not norms or max(norm for _, norm in norms) < 0.5 * limit:
        return []
    return [Curve("clip", [(norms[0][0], limit), (norms[-1][0], limit)], "c8", "dashed")]


def _foot(records: RunRecords) -> str:
    torn = "".join(f"<p>Could not be read: {esc(line)}</p>" for line in records.unreadable)
    files = "history.csv, training_metrics.png and .json, performance_summary.txt and .json"
    files += ", expert_activations.png and .json" if records.loads else ""
    return f"<footer>{torn}<p>{esc(records.path)}</p><p>In the same directory: {files}.</p></footer>"
