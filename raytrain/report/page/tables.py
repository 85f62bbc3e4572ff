"""Sections of the report that are tables and lists: plan, time, timeline, epochs, machine, configuration.

Each takes records and gives HTML, "" where there is nothing to show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raytrain.report.figures import HISTORY_COLUMNS, cause_of, history, plain_number, seconds, size, time_account
from raytrain.report.page.style import esc
from raytrain.report.records import ConfigRow, PlanRow, Row, RunRecords, listed, mapping, number

_EVENTS_SHOWN = 200
_TONES = {
    "failure": "error", "fault": "error", "stop": "error", "restart": "warning", "death": "warning", "attempt": "info",
    "checkpoint": "good", "best": "good", "done": "good",
}  # fmt: skip


def table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], *, stack: bool = False) -> str:
    """A table of cells that are HTML already.

    Args:
        columns: (title, class) of each column; class "n" aligns numbers to the right.
        stack: on a phone each row becomes a block, for tables with sentences.
    """
    head = "".join(f'<th scope="col" class="{kind}">{esc(title)}</th>' for title, kind in columns)
    body = "".join(
        "<tr>" + "".join(f'<td class="{c[1]}">{cell}</td>' for c, cell in zip(columns, row, strict=True)) + "</tr>"
        for row in rows
    )
    kind = ' class="stack"' if stack else ""
    return f"<div class=scroll><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def shown(value: Any, name: str = "") -> str:
    """A value of the plan or the configuration as people read it, escaped."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return size(value) if name in ("memory", "checkpoint_bytes") else esc(plain_number(value, digits=6))
    if isinstance(value, list | Mapping):
        flat = isinstance(value, list) and not any(isinstance(item, list | Mapping) for item in value)
        return esc(", ".join(map(str, value)) if flat else json.dumps(value, default=str, ensure_ascii=False))
    return esc(value)


def label(key: str) -> str:
    """A column's name as people read it; its unit stands with the values."""
    if key.endswith("_per_s"):
        return key.removesuffix("_per_s") + " per second"
    return re.sub(r"_(s|bytes)$", "", key).replace("_ms_", " ").replace("_", " ")


def sample(records: RunRecords) -> str:
    """Text that the trained model wrote, its prompt set apart."""
    sample = records.sample
    if not sample or "text" not in sample:
        return ""
    facts = [f"step {sample['step']:,}" if isinstance(sample.get("step"), int) else ""]
    facts.append(f"temperature {sample['temperature']}" if sample.get("temperature") is not None else "")
    prompt, text = str(sample.get("prompt") or ""), str(sample["text"])
    text = text.removeprefix(prompt)
    told = ", ".join(fact for fact in facts if fact)
    lead = f'<span class="prompt">{esc(prompt)}</span>' if prompt else ""
    return f'<div class="card"><pre>{lead}{esc(text)}</pre></div><p class="note">{esc(told)}</p>'


def time_table(records: RunRecords) -> str:
    """The account of the wall time: a bar, the largest part first, and a table that adds up."""
    account = [(part, spent) for part, spent in time_account(records)]
    total = sum(spent for _, spent in account)
    if total <= 0:
        return ""
    colours = {part: f"c{index % 10 + 1}" for index, (part, _) in enumerate(_by_weight(account))}
    bar = "".join(
        f'<i class="{colours[part]}" style="width:{100 * spent / total:.2f}%" title="{esc(part)}"></i>'
        for part, spent in _by_weight(account)
    )
    rows = [
        [
            f'<i class="swatch {colours.get(part, "c8")}"></i>{esc(part)}',
            esc(seconds(spent)),
            f"{spent / total:.1%}",
        ]
        for part, spent in account
    ]
    rows.append(["<b>total</b>", f"<b>{esc(seconds(total))}</b>", ""])
    columns = [("Part", "k"), ("Time", "n"), ("Share", "n")]
    narrow = f'<div class="narrow">{table(columns, rows)}</div>'
    return f'<div class="card"><div class="bar" aria-hidden="true">{bar}</div>{narrow}</div>'


def _by_weight(account: list[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted((row for row in account if row[1] > 0), key=lambda row: -row[1])


def plan_table(plan: Sequence[PlanRow]) -> str:
    """Every decision with its value and its reason."""
    if not plan:
        return ""
    rows = [
        [esc(line.name.replace("_", " ")), f"{shown(line.value, line.name)}{_when(line)}", esc(line.reason)]
        for line in plan
    ]
    columns = [("Decision", "k"), ("Value", "v"), ("Reason", "soft")]
    return f'<div class="card">{table(columns, rows, stack=True)}</div>'


def _when(line: PlanRow) -> str:
    if line.settled:
        return ' <span class="badge good">settled in the run</span>'
    return ' <span class="badge info">after the start</span>' if line.deferred else ""


def epochs(records: RunRecords) -> str:
    """The history by epoch; a run of one epoch has its curves."""
    rows = history(records)
    if len(rows) < 2:
        return ""
    write: dict[str, Callable[[Any], str]] = {
        "step_time_s": seconds, "epoch_time_s": seconds, "peak_memory_bytes": size, "epoch": str
    }  # fmt: skip
    kept = [key for key in HISTORY_COLUMNS if any(row[key] is not None for row in rows)]
    twin = "samples_per_s" if "tokens_per_s" in kept else ""
    kept = [key for key in kept if key not in ("last_train_loss", twin)]
    cut = rows if len(rows) <= 60 else rows[:30] + rows[-30:]
    cells = [[esc(write.get(key, plain_number)(row[key])) for key in kept] for row in cut]
    note = "" if cut is rows else '<p class="note">The first and last 30; all of them are in history.csv.</p>'
    columns = [(label(key), "n") for key in kept]
    return f'<div class="card">{table(columns, cells)}</div>{note}'


def timeline(events: Sequence[Row]) -> str:
    """The events in order, seconds since the first; runs of the same kind are drawn together from four on."""
    events = [row for row in events if row.get("kind") not in _ACCOUNTS]
    start = next((when for row in events if (when := number(row.get("time"))) is not None), None)
    items = [_event_item(group, start) for group in _grouped(events)]
    if len(items) > _EVENTS_SHOWN:
        half = _EVENTS_SHOWN // 2
        left_out = f"<li><time></time><p class=soft>{len(items) - _EVENTS_SHOWN} left out</p></li>"
        items = [*items[:half], left_out, *items[-half:]]
    return f'<div class="card"><ol class="events">{"".join(items)}</ol></div>' if items else ""


def _grouped(events: Sequence[Row]) -> list[list[Row]]:
    groups: list[list[Row]] = []
    for row in events:
        if groups and groups[-1][0].get("kind") == row.get("kind") and row.get("kind") not in _APART:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [part for group in groups for part in ([group] if len(group) > 3 else [[row] for row in group])]


_APART = ("attempt", "failure", "fault", "decision")
_ACCOUNTS = ("account",)
_HIDDEN = {
    "kind", "time", "traceback", "seconds", "what", "reduced", "final", "matmul", "process_start",
    "last_sign_of_life",
}  # fmt: skip


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
    """(what happened, the rest of the row in small): its own words first, or its fields where it has none."""
    text, hidden = cause_of(row), set(_HIDDEN)
    if kind == "decision":
        text, hidden = (
            f"{row.get('what', '')}: {_brief(row.get('value'))} ({text})",
            hidden | {"value", "attempt"},
        )
    fields = {key: seen for key, seen in row.items() if key not in hidden and seen not in (None, [], {}, "")}
    told = {key: _brief(seen, key) for key, seen in fields.items()}
    more = ", ".join(f"{label(key)} {seen}" for key, seen in told.items() if len(seen) < 4 or seen not in text)
    if kind == "attempt":  # where it begins says more than why, which is a matter of later ones
        return more, text if (number(row.get("attempt")) or 1) > 1 else ""
    return (text, more) if text else (more, "")


def _brief(value: Any, key: str = "") -> str:
    if isinstance(value, float):
        return seconds(value) if key.endswith("_s") else plain_number(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}..."


def machine(records: RunRecords) -> str:
    """Hardware, versions, commit and the checks made before the start."""
    seen = records.environment
    git, cores = mapping(seen.get("git")), seen.get("cores")
    flags = ", ".join(name for name, on in mapping(seen.get("cpu_flags")).items() if on) or "no bf16 instructions"
    versions = ", ".join(f"{name} {version}" for name, version in mapping(seen.get("versions")).items() if version)
    pairs = {
        "Host": seen.get("host"),
        "Accelerators": ", ".join(str(name) for name in listed(seen.get("gpus"))) or ("none" if seen else None),
        "CPU": f"{seen.get('cpu_model')}, {cores} cores, {flags}" if seen.get("cpu_model") else None,
        "Memory": size(number(seen.get("memory_bytes"))) if seen.get("memory_bytes") else None,
        "Driver": seen.get("driver"),
        "System": seen.get("platform"),
        "Python": seen.get("python"),
        "Packages": versions,
        "Commit": f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}" if git else None,
        "Variables": ", ".join(f"{name}={value}" for name, value in mapping(seen.get("variables")).items()),
    }
    inner = "".join(f"<dt>{esc(key)}</dt><dd>{esc(value)}</dd>" for key, value in pairs.items() if value)
    facts = f'<div class="card"><dl class="pairs">{inner}</dl></div>' if inner else ""
    return facts + _checks(records.preflight)


def _checks(checks: Sequence[Row]) -> str:
    if not checks:
        return ""
    tones = {"ok": "good", "warn": "warning", "fail": "error"}
    rows = [
        [
            esc(row.get("name", "")),
            f'<span class="badge {tones.get(str(row.get("status")), "")}">{esc(row.get("status"))}</span>',
            esc("; ".join(str(row.get(key)) for key in ("seen", "remedy") if row.get(key))),
        ]
        for row in checks
    ]
    columns = [("Check", "k"), ("Result", "k"), ("Seen", "soft")]
    return f'<h3>Checks before the start</h3><div class="card">{table(columns, rows, stack=True)}</div>'


def configuration(records: RunRecords) -> str:
    """What was given, the defaults folded away, and the job file as it was written."""
    given = [line for line in records.config if line.source != "default"]
    rest = [line for line in records.config if line.source == "default"]
    parts = [f'<div class="card">{_config_table(given)}</div>' if given else ""]
    if rest:
        inner = f'<div class="card">{_config_table(rest)}</div>'
        parts.append(f"<details><summary>{len(rest)} keys at their defaults</summary>{inner}</details>")
    if records.job_text:
        inner = f'<div class="card"><pre>{esc(records.job_text.rstrip())}</pre></div>'
        parts.append(f"<details{'' if given else ' open'}><summary>job.yaml as given</summary>{inner}</details>")
    return "".join(parts)


def _config_table(lines: Sequence[ConfigRow]) -> str:
    rows = [[f"<code>{esc(line.key)}</code>", shown(line.value), esc(line.source)] for line in lines]
    return table([("Key", "k"), ("Value", "v"), ("Source", "soft")], rows, stack=True)
