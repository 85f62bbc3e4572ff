"""A plan as text: the table of `raytrain plan`, the first lines of a training, and a job file with reasons.

Only text is made here; `jobs.plan` and the start of a run print it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from cluster.wording import counted
from jobs.driver.printing import print_line, print_row, print_warning
from jobs.job.facts import path_from_here
from raytrain.plan.choice import Resolved, reason_of, size_text
from raytrain.plan.plan import Plan

# ---------------------------------------------------------------- the table, and the lines with which a training begins

Row = tuple[str, str, str]
"""A name, a value and a reason."""

GROUPS = {
    "machine": (
        "mode", "device", "accelerator", "workers", "placement", "strategy", "backend", "processes_per_gpu", "overlap",
        "threads", "hosts", "inflight", "experts",
    ),
    "model": (
        "parameters", "precision", "fp32_layers", "sync_batchnorm", "optimizer_impl", "compile", "cudnn_benchmark",
        "deterministic",
    ),
    "batch": (
        "global_batch_size", "micro_batch_size", "accumulation", "effective_batch", "shares", "steps_per_epoch",
        "max_steps", "lr", "warmup_steps",
    ),
    "memory": ("memory", "host_memory"),
    "data": ("storage", "resident_rows", "loader_workers"),
    "saving": ("eval_every", "checkpoint_every", "best_saves", "checkpoint_bytes", "export", "files"),
}  # fmt: skip
"""The decisions of each part of the table, in its order."""

LABELS = {
    "placement": "worker placement",
    "storage": "data storage",
    "resident_rows": "data rows kept",
    "micro_batch_size": "micro-batch size",
    "hosts": "expert hosts",
    "host_memory": "expert host memory",
    "inflight": "micro-batches in flight",
    "optimizer_impl": "optimizer kernels",
    "lr": "learning rate",
    "memory": "worker memory",
    "checkpoint_bytes": "checkpoint size",
}
"""Names of decisions in the printed table, where plan.json has another one."""

WARNINGS = 2
"""So many are printed before a training begins; the rest is counted."""


def print_plan(plan: Plan, console: Console, *, full: bool = False) -> None:
    """Print the machines, the decisions with their reasons by subject, the warnings, and the other keys that were set;
    with `full` also the defaults. A terminal gets tables, a pipe a line `name: value  # reason` for each row."""
    machines, rows = plan.inventory, _rows(plan)
    print_line(console, f"{machines['source']}: {machines['summary']}")
    stated = " ".join(reason for _, _, reason in rows.values())
    for note in machines["notes"]:
        if note not in stated:
            print_line(console, f"  {note}", style="dim")
    for group, names in GROUPS.items():
        _print_rows(console, group, [rows[name] for name in names if name in rows])
    shown = {row[2].partition(" (")[0] for row in rows.values()}
    given = [row for row in config_rows(plan) if full or (row[2] != "default" and row[0] not in shown)]
    _print_rows(console, "keys", given)
    left = sum(source == "default" for source in plan.sources.values())
    if left and not full:
        console.print(f"and {counted(left, 'key')} with their defaults (--full lists them)", style="dim")
    if plan.warnings:
        console.print()
    for warning in plan.warnings:
        print_warning(console, warning)


@dataclass(frozen=True)
class ResumedFrom:
    step: int | None  # of the newest complete checkpoint; None: there is none yet
    attempt: int  # number of the command's first attempt
    measured: Mapping[str, Any]  # choice -> the value that an earlier attempt measured, of those that still hold

    @property
    def text(self) -> str:
        if self.step is None:
            return f"from step 0, as there is no checkpoint yet; attempt {self.attempt}"
        return f"from step {self.step:,} (checkpoints/step_{self.step:08d}), attempt {self.attempt}"


def print_start(
    plan: Plan, console: Console, *, warnings: Sequence[str], every: bool = False, resumed: ResumedFrom | None = None
) -> None:
    """Print what a training is about to do, in at most six lines, one more if it resumes, and `WARNINGS` warnings, or
    `every` one."""
    for name, text in _start_rows(plan, {} if resumed is None else resumed.measured):
        print_row(console, f"{name:<10}", text)
    if resumed is not None:
        print_line(console, f"{'resuming':<10}{resumed.text}")
    shown = len(warnings) if every or len(warnings) <= WARNINGS else WARNINGS - 1
    for warning in warnings[:shown]:
        print_warning(console, warning)
    if shown < len(warnings):
        print_warning(console, f"and {len(warnings) - shown} more (-v, or the report)")


def config_rows(plan: Plan) -> list[Row]:
    """(dotted key, value, source) for every key of the configuration."""
    values = {key: _lookup(plan.config, key) for key in plan.sources}
    texts = {key: value if isinstance(value, str) and value else json.dumps(value) for key, value in values.items()}
    return [(key, texts[key], source) for key, source in plan.sources.items()]


def _rows(plan: Plan) -> dict[str, Row]:
    """The decisions by name, as they are printed. A fact stands in one row: what follows from another row, or cannot
    differ with a single worker, is left out."""
    found = {name: (name, value, reason) for name, value, reason in plan.rows()}
    hidden = {name for name in ("device", "accelerator") if name in found and found[name][2].startswith("mode ")}
    if plan.value("workers", 0) == 1:
        hidden |= {"placement", "strategy"} | ({"backend"} if plan.value("hosts", 0) in (0, "none") else set())
    if plan.value("effective_batch", 0) == plan.value("global_batch_size", None):
        hidden.add("effective_batch")
    if plan.value("accumulation", 0) == 1:
        hidden.add("accumulation")
    if plan.value("hosts", 0) == "none":
        hidden |= {"hosts", "experts"}
    shown = dict[str, Row]()
    for name, (_, value, reason) in found.items():
        if name not in hidden:
            given = plan.sources.get(reason, "default") != "default"  # the reason is the name of a key
            reason = f"{reason} ({plan.sources[reason]})" if given else reason
            shown[name] = LABELS.get(name, name.replace("_", " ")), value, reason
    return shown


def _print_rows(console: Console, title: str, rows: Sequence[Row]) -> None:
    """Print one part of the table on a terminal, and otherwise one line for each row."""
    if not rows:
        return
    console.print()
    if not console.is_terminal:
        print_line(console, f"# {title}")
        for name, value, comment in rows:
            print_line(console, f"{name}: {value}  # {comment}")
        return
    from rich.table import Table

    console.print(title, style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(min_width=19, overflow="fold")
    table.add_column(min_width=16, max_width=24, overflow="fold")
    table.add_column(style="dim", overflow="fold")
    for name, value, comment in rows:
        table.add_row(f"  {name}", value, comment)
    console.print(table, markup=False, highlight=False)


def _start_rows(plan: Plan, measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    value = {name: text for name, text, _ in plan.rows()}
    workers, threads = plan.value("workers", 0), value.get("threads")
    source = f"{plan.inventory['source']}: " if plan.inventory["source"].startswith("Ray ") else ""
    machine = [source + _machines(plan.inventory), counted(workers, "worker")]
    if plan.value("device", "") == "cpu" and threads is not None:
        machine[1] += f" of {_of(threads, 'thread')}"
    if plan.value("hosts", 0) not in (0, "none"):
        machine.append(f"expert hosts: {value['hosts']}")
    builder = str(plan.config["model"].get("builder") or "the module given from Python")
    model = [builder.rpartition(":")[2], f"{_count(plan.value('parameters', 0))} parameters"]
    if plan.value("hosts", "none") != "none":
        model.append(f"experts: {value['experts']}")
    data, facts = [str(plan.config["data"].get("source") or "given from Python")], plan.data_facts
    if facts is not None and facts.train_rows:
        each = f" of {facts.tokens_per_row:,} tokens" if facts.tokens_per_row else ""
        data += [f"{facts.train_rows:,} rows{each}", f"{facts.eval_rows:,} held out", size_text(facts.total_bytes)]
        data.append(value["storage"])
    micro = f"{measured['micro_batch']}, as before" if "micro_batch" in measured else value["micro_batch_size"]
    batch = [_of(value["global_batch_size"], "row"), f"micro-batches of {micro}"]
    batch.append(f"{_of(value['max_steps'], 'step')}, {value['steps_per_epoch']} per epoch")
    later = ", measured at the start" if " or " in value["precision"] else f" ({reason_of(plan.precision)})"
    precision = f"{measured['precision']}, as before" if "precision" in measured else value["precision"] + later
    found = {
        "machine": machine, "model": model, "data": data, "batch": batch, "precision": [precision],
        "run": [path_from_here(str(plan.value("files", "")))],
    }  # fmt: skip
    return [(name, ", ".join(parts)) for name, parts in found.items()]


def _of(text: str, noun: str) -> str:
    """`1 row`, `32 rows`; a value that is known after the start is written as it is."""
    return counted(int(text), noun) if text.isdecimal() else f"{text} {noun}s"


def _machines(inventory: Mapping[str, Any]) -> str:
    """Nodes, cores and GPUs: `4 nodes, 64 CPU cores, 16 x H100`."""
    nodes = inventory["nodes"]
    gpus = Counter(device["name"] for node in nodes for device in node["devices"] if device["kind"] != "cpu")
    if len(nodes) == 1 and sum(gpus.values()) <= 1:
        return str(inventory["summary"])
    parts = [f"{len(nodes)} nodes"] if len(nodes) > 1 else []
    parts.append(counted(sum(node["cpus"] for node in nodes), "CPU core"))
    return ", ".join([*parts, *(f"{number} x {name}" for name, number in gpus.items())] + ([] if gpus else ["no GPU"]))


def _count(number: Any) -> str:
    if not isinstance(number, int) or not number:
        return "an unknown number of"
    for limit, unit in ((1_000_000_000, "B"), (1_000_000, "M")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:,}"


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    found, rest = config, key
    while rest not in found:  # a key may itself contain dots
        part, _, rest = rest.partition(".")
        found = found[part]
    return found[rest]


# ---------------------------------------------------------------- plan --print yaml

AUTO = "auto"
#: Key of a job that may be `auto` -> the decision that stands in its place.
DECIDED = {
    "scale.mode": "mode", "scale.workers": "workers", "scale.threads": "threads", "scale.strategy": "strategy",
    "scale.overlap": "overlap", "precision.dtype": "precision", "loop.micro_batch_size": "micro_batch_size",
    "loop.global_batch_size": "global_batch_size", "loop.eval_every": "eval_every",
    "loop.cudnn_benchmark": "cudnn_benchmark", "optim.warmup_steps": "warmup_steps", "data.storage": "storage",
    "data.loader_workers": "loader_workers", "save.every": "checkpoint_every", "save.export": "export",
    "experts.hosts": "hosts", "experts.inflight": "inflight",
}  # fmt: skip
MOST_COMMENT = 90
PLAIN = re.compile(r"[A-Za-z_./][\w./:-]*[\w/]")
"""Strings that YAML reads as themselves."""
RESERVED = ("true", "false", "null", "True", "False", "Null", "TRUE", "FALSE", "NULL")


def job_text(plan: Plan) -> str:
    """A job file that decides as this plan does: keys with their default are left out, each `auto` is replaced by what
    was decided for these machines. What a run measures at its start stays `auto`."""
    sections: dict[str, list[str]] = {}
    for key, source in plan.sources.items():
        section, _, name = key.rpartition(".")
        value, comment = _lookup(plan.config, key), source
        if value == AUTO and key in DECIDED and DECIDED[key] in plan.choices():
            choice = plan.choices()[DECIDED[key]]
            comment = reason_of(choice)
            if isinstance(choice, Resolved):
                value = None if choice.value == "none" else choice.value
        elif source == "default":
            continue
        if value is not None or source != "default":
            sections.setdefault(section, []).append(_line(name, value, comment, indented=bool(section)))
    lines = [f"# {plan.inventory['source']}: {plan.inventory['summary']}", *sections.pop("", [])]
    for section, rows in sections.items():
        lines += ["", f"{section}:", *rows]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any, comment: str, *, indented: bool) -> str:
    short = " ".join(comment.split())
    short = short if len(short) <= MOST_COMMENT else short[: MOST_COMMENT - 3] + "..."
    plain = isinstance(value, str) and PLAIN.fullmatch(value) and value not in RESERVED
    text = value if plain else json.dumps(value)  # which is YAML too
    return f"{'  ' * indented}{name}: {text}  # {short}"
