"""A plan as a job file: what was set, and what was decided, each with its source or reason (`plan --print yaml`)."""

from __future__ import annotations

import json
import re
from typing import Any

from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.plan.text import reason_of

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
        if key.startswith("tune.found"):  # what a search found is a record of it, no setting
            continue
        section, _, name = key.rpartition(".")
        value, comment = _value(plan, key), source
        if value == AUTO and key in DECIDED and DECIDED[key] in plan.choices():
            value, comment = _decided(plan, DECIDED[key])
        elif source == "default":
            continue
        if value is not None or source != "default":
            sections.setdefault(section, []).append(_line(name, value, comment, indented=bool(section)))
    lines = [f"# {plan.inventory['source']}: {plan.inventory['summary']}", *sections.pop("", [])]
    for section, rows in sections.items():
        lines += ["", f"{section}:", *rows]
    return "\n".join(lines) + "\n"


def _value(plan: Plan, key: str) -> Any:
    found: Any = plan.config
    for part in key.split("."):
        found = found[part]
    return found


def _decided(plan: Plan, name: str) -> tuple[Any, str]:
    """What stands in the place of `auto`, and the reason."""
    choice = plan.choices()[name]
    if not isinstance(choice, Resolved):
        return AUTO, reason_of(choice)
    return (None if choice.value == "none" else choice.value), choice.reason


def _line(name: str, value: Any, comment: str, *, indented: bool) -> str:
    short = " ".join(comment.split())
    short = short if len(short) <= MOST_COMMENT else short[: MOST_COMMENT - 3] + "..."
    return f"{'  ' * indented}{name}: {_written(value)}  # {short}"


def _written(value: Any) -> str:
    """A value as YAML: JSON is a part of it, and plain words need no quotes."""
    if isinstance(value, str) and PLAIN.fullmatch(value) and value not in RESERVED:
        return value
    return json.dumps(value)
