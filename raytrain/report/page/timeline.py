"""The timeline of the report: what happened in a run, in order and in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.wording import counted
from raytrain.report.figures import cause_of, plain_number, seconds, size
from raytrain.report.page.style import esc
from raytrain.report.page.tables import label
from raytrain.report.records import Row, first_text, listed, mapping, number

_EVENTS_SHOWN = 200
_TONES = {
    "failure": "error", "fault": "error", "stop": "error", "restart": "warning", "death": "warning", "attempt": "info",
    "checkpoint": "good", "best": "good", "done": "good", "hang": "error", "node_lost": "error",
    "out_of_memory": "warning", "warning": "warning", "nonfinite": "warning",
}  # fmt: skip


def timeline(events: Sequence[Row]) -> str:
    """The events in order, in seconds since the first; four or more of the same kind in a row become one entry."""
    events = [row for row in events if row.get("kind") not in _ACCOUNTS]
    events = [row for row, then in zip(events, [*events[1:], {}], strict=False) if not _superseded(row, then)]
    decided = {cause_of(row) for row in events if row.get("what") == "recovery"}
    events = [{**row, "reason": ""} if _repeats(row, decided) else row for row in events]
    start = next((when for row in events if (when := number(row.get("time"))) is not None), None)
    items = [_event_item(group, start) for group in _grouped(events)]
    if len(items) > _EVENTS_SHOWN:
        half = _EVENTS_SHOWN // 2
        left_out = f"<li><time></time><p class=soft>{len(items) - _EVENTS_SHOWN} left out</p></li>"
        items = [*items[:half], left_out, *items[-half:]]
    return f'<div class="card"><ol class="events">{"".join(items)}</ol></div>' if items else ""


def _superseded(row: Row, then: Row) -> bool:
    """Whether the next event says more of the same preparation of data."""
    return row.get("kind") == "preparation" == then.get("kind") and row.get("attempt") == then.get("attempt")


def _repeats(row: Row, decided: set[str]) -> bool:
    """Whether an attempt states a reason that is none, or one that the decision before it has stated."""
    return row.get("kind") == "attempt" and cause_of(row) in (*decided, _NO_REASON)


def _grouped(events: Sequence[Row]) -> list[list[Row]]:
    groups: list[list[Row]] = []
    for row in events:
        if groups and groups[-1][0].get("kind") == row.get("kind") and row.get("kind") not in _APART:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [part for group in groups for part in ([group] if len(group) > 3 else [[row] for row in group])]


_APART = ("attempt", "failure", "fault", "decision", "warning")
_ACCOUNTS = ("account", "transfers")
_NO_REASON = "no faults"
"""The reason of an attempt that a command begins, not a failure (`execution.recovery.failure_policy.decide`)."""
_NODE_ID = re.compile(r"[0-9a-f]{32,}")
"""How Ray names a node; it says nothing to a reader."""
_RECOVERIES = {"go_on": "restart", "raise_precision": "restart in a higher precision", "stop": "no further attempt"}
_HIDDEN = {"kind", "time", "traceback", "seconds", "what", "reduced", "final", "process_start", "last_sign_of_life"}


def _event_item(group: Sequence[Row], start: float | None) -> str:
    row = group[0]
    kind, when = str(row.get("kind", "event")), number(row.get("time"))
    offset = f"+{seconds(max(0.0, when - start))}" if when is not None and start is not None else ""
    text, more = _event_words(kind, row)
    if len(group) > 1:
        steps = [int(step) for member in group if (step := number(member.get("step"))) is not None]
        text = f"{len(group)} times" + (f", steps {min(steps):,} to {max(steps):,}" if steps else "")
        more = ""
    badge = f'<span class="badge {_TONES.get(kind, "")}">{esc(kind.replace("_", " "))}</span>'
    inner = f"<p>{badge} {esc(text)}</p>" + (f'<p class="soft">{esc(more)}</p>' if more else "")
    if row.get("traceback"):
        inner += f"<details><summary>traceback</summary><pre>{esc(row['traceback'])}</pre></details>"
    return f"<li><time>{esc(offset)}</time><div>{inner}</div></li>"


def _event_words(kind: str, row: Row) -> tuple[str, str]:
    """(what happened, further details): a sentence about the kinds that have no message of their own, otherwise the
    message of the event and its plain fields. Lists and mappings are left to events.jsonl."""
    if kind in _SENTENCES:
        return _SENTENCES[kind](row)
    text = cause_of(row)
    fields = {key: seen for key, seen in row.items() if key not in _HIDDEN and seen not in (None, "")}
    plain = {key: _brief(seen, key) for key, seen in fields.items() if not isinstance(seen, list | dict)}
    more = ", ".join(f"{label(key)} {seen}" for key, seen in plain.items() if len(seen) < 4 or seen not in text)
    return (text, more) if text else (more, "")


def _brief(value: Any, key: str = "") -> str:
    if isinstance(value, float):
        return seconds(value) if key.endswith("_s") else plain_number(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _count(row: Row, key: str, singular: str, plural: str = "") -> str:
    found = int(number(row.get(key)) or 0)
    return counted(found, singular, plural)


def _driver_start(row: Row) -> tuple[str, str]:
    text = f"the command started (pid {row.get('pid')})"
    text += f" as Ray job {row.get('ray_job')}" if row.get("ray_job") else ""
    changed = ", ".join(map(str, listed(row.get("changed"))))
    return text, f"changed: {changed}" if changed else ""


def _driver_end(row: Row) -> tuple[str, str]:
    return f"the command ended: {first_text(row, 'status')}, {first_text(row, 'reason')}", ""


def _attempt(row: Row) -> tuple[str, str]:
    """The step it starts from matters more than the reason, which only later attempts have."""
    nodes = {str(mapping(rank).get("node")) for rank in listed(row.get("ranks"))}
    text = (
        f"attempt {row.get('attempt')} begins at step {int(number(row.get('from_step')) or 0):,}: "
        f"{_count(row, 'workers', 'worker')} on {row.get('device')} in {row.get('precision')}"
    )
    text += f", on {len(nodes)} nodes" if len(nodes) > 1 else f", on {row.get('node')}" if row.get("node") else ""
    return text, cause_of(row) if (number(row.get("attempt")) or 1) > 1 else ""


def _attempt_end(row: Row) -> tuple[str, str]:
    where = f"attempt {row.get('attempt')} ended at step {int(number(row.get('step')) or 0):,}"
    return f"{where}: {first_text(row, 'outcome')}, {first_text(row, 'reason')}", ""


def _checkpoint(row: Row) -> tuple[str, str]:
    text = f"step {int(number(row.get('step')) or 0):,}"
    stall = number(row.get("stall_s"))
    return text if stall is None else f"{text}; training waited {seconds(stall)}", ""


def _exported(row: Row) -> tuple[str, str]:
    step = int(number(row.get("step")) or 0)
    return f"the weights of step {step:,} were written in {seconds(number(row.get('seconds')))}", ""


def _compile(row: Row) -> tuple[str, str]:
    counts = ", ".join(
        _count(row, key, name)
        for key, name in (("graphs", "graph"), ("graph_breaks", "graph break"), ("recompiles", "recompilation"))
    )
    text = f"by step {int(number(row.get('step')) or 0):,} {row.get('achieved')} compiled: {counts}"
    text += f", {seconds(number(row.get('seconds')))} in the compiler"
    return text, "; ".join(map(str, listed(row.get("reasons"))))


def _eager_step(row: Row) -> tuple[str, str]:
    return f"a step without compilation takes {seconds(number(row.get('seconds')))}", ""


def _expert_hosts(row: Row) -> tuple[str, str]:
    hosts = [mapping(host) for host in listed(row.get("hosts"))]
    places = ", ".join(f"{host.get('device')} of {host.get('node')} (pid {host.get('pid')})" for host in hosts)
    took = number(row.get("seconds"))
    return f"{len(hosts)} expert host{'s are' if len(hosts) != 1 else ' is'} ready" + (
        f" after {seconds(took)}" if took else ""
    ), places


def _placement(row: Row) -> tuple[str, str]:
    layers = [listed(mapping(layer).get("copies")) for layer in listed(row.get("layers"))]
    held = [0] * int(number(row.get("num_hosts")) or 0)
    for copies in layers:
        for hosts in copies:
            for host in listed(hosts):
                if isinstance(host, int) and 0 <= host < len(held):
                    held[host] += 1
    sizes = [size(number(one)) for one in listed(row.get("bytes"))]
    text = f"version {row.get('version')} from step {int(number(row.get('step')) or 0):,}: "
    text += f"{' + '.join(map(str, held))} copies of experts on {len(held)} hosts"
    return text, f"with {' + '.join(sizes)}" if sizes else ""


def _decision(row: Row) -> tuple[str, str]:
    if row.get("what") == "recovery":
        return _recovery(row)
    value = row.get("value")
    detail = _brief(value) if not isinstance(value, Mapping | list) else ""
    return f"{str(row.get('what', '')).replace('_', ' ')}{f': {detail}' if detail else ''} ({cause_of(row)})", ""


def _recovery(row: Row) -> tuple[str, str]:
    what, why = _RECOVERIES.get(str(row.get("value")), str(row.get("value"))), cause_of(row)
    limit = number(row.get("micro_batch"))
    return f"{what}: {why}", f"micro-batches of at most {counted(int(limit), 'row')}" if limit else ""


def _fault(row: Row) -> tuple[str, str]:
    """The error, and which worker met it, where and when."""
    rank, attempt, start, step = (number(row.get(key)) for key in ("rank", "attempt", "from_step", "step"))
    pid, node, rows = row.get("pid"), first_text(row, "node"), number(row.get("micro_batch"))
    at = [f"pid {pid}" if pid else "", f"on {node}" if node and not _NODE_ID.fullmatch(node) else ""]
    at = " ".join(part for part in at if part)
    who = "" if rank is None else f"rank {int(rank)}" + (f" ({at})" if at else "")
    what = "" if attempt is None else f"attempt {int(attempt)}" + (f", from step {int(start):,}" if start else "")
    details = [
        " of ".join(part for part in (who, what) if part),
        f"failed at step {int(step):,}" if step else "",
        f"in {row['precision']}" if row.get("precision") else "",
        f"micro-batches of {counted(int(rows), 'row')}" if rows else "",
        "out of memory" if row.get("out_of_memory") else "",
    ]
    return cause_of(row), ", ".join(part for part in details if part)


def _message(row: Row) -> tuple[str, str]:
    return cause_of(row), ""


def _nonfinite(row: Row) -> tuple[str, str]:
    return f"step {int(number(row.get('step')) or 0):,}: {first_text(row, 'what')}", ""


_SENTENCES: dict[str, Callable[[Row], tuple[str, str]]] = {
    "driver_start": _driver_start, "driver_end": _driver_end, "attempt": _attempt, "attempt_end": _attempt_end,
    "checkpoint": _checkpoint, "compile": _compile, "eager_step": _eager_step, "exported": _exported,
    "expert_hosts": _expert_hosts, "placement": _placement, "decision": _decision, "nonfinite": _nonfinite,
    "fault": _fault,
    "preparation": _message, "inference": _message,
    "memory_remedies": _message, "dashboard": _message,
}  # fmt: skip
"""Kind of event -> (a sentence, details)."""
