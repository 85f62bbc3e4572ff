"""Reads the records of a run folder, tolerating files that are missing, truncated or not yet written.

A report must work for a run that ended at any moment, so nothing here raises for the content of a file: what cannot be
read is listed in `RunRecords.unreadable`, and every figure may be None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cluster.wording import counted
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join, split

Row = Mapping[str, Any]


@dataclass(frozen=True)
class PlanRow:
    """One decision: made by the plan, still `deferred` to a measurement, or resolved during the run (`settled`)."""

    name: str
    value: Any
    reason: str
    deferred: bool = False
    settled: bool = False


@dataclass(frozen=True)
class ConfigRow:
    """One key of the job, its value, and where it came from: default, file or command line."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class RunRecords:
    """Everything that a run folder holds, as plain values; empty or None for what is missing.

    `gpus` are those that the plan's machines have and can use; `train_rows` and `eval_rows` are sizes of splits;
    `train`, `evals` and `loads` are rows of the metrics, `telemetry` those of all nodes in order of time.
    """

    name: str
    path: str
    job_text: str | None = None
    plan: list[PlanRow] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    gpus: int = 0
    config: list[ConfigRow] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    preflight: list[Row] = field(default_factory=list)
    train_rows: int | None = None
    eval_rows: int | None = None
    vocab_size: int | None = None
    train: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    loads: list[Row] = field(default_factory=list)
    telemetry: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    result: dict[str, Any] | None = None
    sample: dict[str, Any] | None = None
    alive: dict[str, Any] | None = None
    unreadable: list[str] = field(default_factory=list)

    def planned(self, name: str) -> Any:
        return next((line.value for line in self.plan if line.name == name and not line.deferred), None)

    def configured(self, key: str) -> Any:
        return next((line.value for line in self.config if line.key == key), None)

    def of_kind(self, *kinds: str) -> list[Row]:
        return [row for row in self.events if row.get("kind") in kinds]


def read_records(run: RunFolder) -> RunRecords:
    """Reads a full run folder. Changes no file, and does not raise for files that are missing or truncated."""
    unreadable: list[str] = []
    plan = _mapping(run, run.plan, unreadable)
    metrics = _rows(run, run.metrics, unreadable)
    job_text = _text(run, run.job, unreadable)
    preflight = _json(run, run.preflight, unreadable)
    checks = preflight.get("checks") if isinstance(preflight, Mapping) else preflight
    events = _events(run, unreadable)
    inventory, facts = mapping(plan.get("inventory")), mapping(plan.get("data_facts"))
    nodes = [mapping(node) for node in listed(inventory.get("nodes"))]
    known_facts = {name: number(facts.get(name)) for name in ("train_rows", "eval_rows", "vocab_size")}
    sources = mapping(plan.get("sources"))
    leaves = dotted_leaves(mapping(plan.get("config")), "")
    files = [entry.name for entry in run.store.entries("telemetry") if entry.name.endswith(".jsonl")]
    rows = [row for name in files for row in _rows(run, join(run.path, f"telemetry/{name}"), unreadable)]
    known = [row for row in rows if isinstance(row.get("devices"), list) and number(row.get("time")) is not None]
    alive = None
    try:
        alive = run.alive()
    except (OSError, ValueError, KeyError) as error:
        unreadable.append(f"attempts: {error!r}")
    return RunRecords(
        name=run.path.rstrip("/").rsplit("/", 1)[-1],
        path=run.path,
        job_text=job_text,
        plan=_plan_lines(mapping(plan.get("choices")), _mapping(run, run.memory_probe, unreadable), events),
        warnings=[str(line) for line in listed(plan.get("warnings"))],
        unusable=[str(line) for line in listed(inventory.get("unusable"))],
        gpus=sum(mapping(device).get("kind") != "cpu" for node in nodes for device in listed(node.get("devices"))),
        config=[ConfigRow(key, value, str(sources.get(key, "default"))) for key, value in leaves],
        environment=_mapping(run, run.environment, unreadable),
        preflight=[row for row in listed(checks) if isinstance(row, Mapping)],
        **{name: None if value is None else int(value) for name, value in known_facts.items()},
        train=_by_step(row for row in metrics if row.get("kind") == "train"),
        evals=_by_step(row for row in metrics if row.get("kind") == "eval"),
        loads=_by_step(row for row in _rows(run, run.experts, unreadable) if row.get("kind") == "load"),
        telemetry=sorted(known, key=lambda row: number(row.get("time")) or 0.0),
        events=events,
        result=_mapping(run, run.result, unreadable) or None,
        sample=_mapping(run, run.sample, unreadable) or None,
        alive=alive,
        unreadable=unreadable,
    )


def number(value: Any) -> float | None:
    """A finite float, or None: JSON rows hold non-finite values as the strings nan, inf and -inf."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        seen = float(value)
    except (TypeError, ValueError):
        return None
    return seen if math.isfinite(seen) else None


def series(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    points = ((number(row.get("step")), number(row.get(key))) for row in rows)
    return [(step, value) for step, value in points if step is not None and value is not None]


def values(rows: Sequence[Row], key: str) -> list[float]:
    return [value for row in rows if (value := number(row.get(key))) is not None]


def non_finite_steps(rows: Sequence[Row], key: str = "loss") -> list[int]:
    """The steps whose value is written but not finite."""
    return [int(row["step"]) for row in rows if row.get(key) is not None and number(row.get(key)) is None]


def percentile(data: Sequence[float], share: float) -> float | None:
    """Linear interpolation between the two nearest order statistics; None without data."""
    return float(np.quantile(data, share)) if data else None


def first_text(row: Row, *keys: str) -> str:
    """The value of the first key that holds a text, a number or a list, as text; empty if none does."""
    for key in keys:
        seen = row.get(key)
        if isinstance(seen, Mapping):
            seen = first_text(seen, "message", "reason", "error", "type")
        if seen not in (None, "", []):
            return seen if isinstance(seen, str) else json.dumps(seen, default=str)
    return ""


def _by_step(rows: Iterable[Row]) -> list[Row]:
    """Rows in order of step; `step` and `epoch` become int. Of two rows of one step, the last counts."""
    latest: dict[int, Row] = {}
    for row in rows:
        step, epoch = number(row.get("step")), number(row.get("epoch"))
        if step is not None:
            known = {"epoch": int(epoch)} if epoch is not None and 0 <= epoch <= step else {}
            rest = {key: seen for key, seen in row.items() if key != "epoch"}
            latest[int(step)] = {**rest, "step": int(step), **known}
    return [latest[step] for step in sorted(latest)]


def listed(value: Any) -> list[Any]:
    """The value, or an empty list if it is not a list."""
    return value if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    """The value, or an empty mapping if it is not a mapping."""
    return value if isinstance(value, dict) else {}


def _plan_lines(choices: Row, probe: Row, events: Sequence[Row]) -> list[PlanRow]:
    """The plan with the decisions made after the start: by measurements, and in the event log."""
    later = {name: row for name, row in probe.items() if isinstance(row, Mapping) and "value" in row}
    later |= {str(row["what"]): row for row in events if row.get("kind") == "decision" and "what" in row}
    raised = [row for row in events if row.get("kind") == "decision" and row.get("precision")]
    if raised:
        later["precision"] = {**raised[-1], "value": raised[-1]["precision"]}
    lines = []
    for name, row in choices.items():
        row = row if isinstance(row, Mapping) else {"value": row}
        reason = str(row.get("reason", ""))
        if made := later.get(name):
            line = PlanRow(str(name), made.get("value"), first_text(made, "reason") or reason, settled=True)
        elif "how" in row:
            bounds = ", ".join(str(bound) for bound in listed(row.get("bounds")))
            line = PlanRow(str(name), f"{row['how']} ({bounds})" if bounds else str(row["how"]), reason, deferred=True)
        else:
            line = PlanRow(str(name), row.get("value"), reason)
        lines.append(line)
    return lines


def _events(run: RunFolder, unreadable: list[str]) -> list[Row]:
    """The event log in order of time, with the faults from files that no later attempt has logged."""
    rows = []
    for row in _rows(run, run.events, unreadable):
        if row.get("kind") == "fault" and "failed_at" in row:  # logged by the attempt after the one that failed
            row = {**row, "attempt": row.get("failed_attempt"), "time": row["failed_at"]}
        rows.append({key: seen for key, seen in row.items() if key not in ("failed_attempt", "failed_at")})
    known = [(row.get("attempt"), row.get("rank")) for row in rows if row.get("kind") == "fault"]
    for entry in run.store.entries("faults"):
        fault = _mapping(run, join(run.path, f"faults/{entry.name}"), unreadable)
        if fault and (fault.get("attempt"), fault.get("rank")) not in known:
            rows.append({"kind": "fault", **fault})
    attempts = {row.get("attempt"): row for row in rows if row.get("kind") == "attempt"}
    for place, row in enumerate(rows):
        # who recorded a fault, such as the controller of a worker that died, may not know where its attempt started,
        # and the place of its rank: the attempt itself has recorded them
        if row.get("kind") == "fault":
            attempt, rank = attempts.get(row.get("attempt"), {}), number(row.get("rank"))
            ranks = listed(attempt.get("ranks"))
            at = mapping(ranks[int(rank)]) if rank is not None and 0 <= rank < len(ranks) else {}
            facts = {"from_step": attempt.get("from_step"), "node": at.get("node"), "pid": at.get("pid")}
            rows[place] = {**row, **{key: seen for key, seen in facts.items() if seen is not None}}
    return sorted(rows, key=lambda row: number(row.get("time")) or 0.0)


def dotted_leaves(mapping: Row, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield each value of nested mappings with its dotted key; an empty mapping is a value."""
    for key, value in mapping.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from dotted_leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def _text(run: RunFolder, path: str, unreadable: list[str]) -> str | None:
    if not run.exists(path):
        return None
    try:
        return run.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        unreadable.append(f"{split(path)[1]}: {error}")
        return None


def _json(run: RunFolder, path: str, unreadable: list[str]) -> Any:
    text = _text(run, path, unreadable)
    try:
        return None if text is None else json.loads(text)
    except json.JSONDecodeError as error:
        unreadable.append(f"{split(path)[1]}: {error}")
        return None


def _mapping(run: RunFolder, path: str, unreadable: list[str]) -> dict[str, Any]:
    seen = _json(run, path, unreadable)
    return seen if isinstance(seen, dict) else {}


def _rows(run: RunFolder, path: str, unreadable: list[str]) -> list[Row]:
    """The complete rows of a JSONL file; broken lines (the last one of a killed writer) are counted."""
    rows, torn = [], 0
    for line in (_text(run, path, unreadable) or "").splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            torn += 1
            continue
        if isinstance(row, dict):
            rows.append(row)
    if torn:
        unreadable.append(f"{split(path)[1]}: {counted(torn, 'broken line')} left out")
    return rows
