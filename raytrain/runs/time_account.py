"""The wall time of a run by purpose, computed from its events (`time` in result.json). Pure.

A run consists of commands (each from `driver_start` to `driver_end`, or to its last sign of life), and a command
consists of attempts. The work of an attempt after its last `account` or `checkpoint` event is `lost`; the time between
the failure of one attempt and the first step of the next within one command is `restart`, also where attempts fail
before their first step. The `attempt` event stands between the preparation of an attempt and that step.
"""

from __future__ import annotations

from typing import Any

PURPOSES = (
    "startup",
    "data",
    "compute",
    "communication",
    "compile",
    "eval",
    "save",
    "export",
    "restart",
    "lost",
    "other",
)


def account(events: list[dict[str, Any]], *, now: float) -> dict[str, Any]:
    """{"wall_s": total over all commands, "time": {purpose: seconds}} of a run.

    Args:
        events: rows of events.jsonl, in order.
        now: unix seconds; the end of a command that has not recorded its end.
    """
    total: dict[str, float] = dict.fromkeys(PURPOSES, 0.0)
    wall = 0.0
    commands = _commands(events)
    for index, rows in enumerate(commands):
        begin = rows[0]["process_start"]
        ended = next((row["time"] for row in rows if row["kind"] == "driver_end"), None)
        if ended is None:
            later = commands[index + 1][0] if index + 1 < len(commands) else None
            ended = max(rows[-1]["time"], (later or {}).get("last_sign_of_life") or 0.0) if later else now
        wall += ended - begin
        _add_command(total, rows, begin=begin, ended=ended)
    total["other"] = wall - sum(value for name, value in total.items() if name != "other")
    if total["other"] < 0:  # clocks of two processes overlap: subtract the excess from the largest part
        largest = max(total, key=lambda name: total[name])
        total[largest] += total["other"]
        total["other"] = 0.0
    return {"wall_s": wall, "time": total}


def account_of_last(events: list[dict[str, Any]], *, now: float) -> dict[str, Any]:
    """The same of the last command alone."""
    commands = _commands(events)
    return account(commands[-1] if commands else [], now=now)


def _commands(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    commands: list[list[dict[str, Any]]] = []
    for row in events:
        if row["kind"] == "driver_start":
            commands.append([row])
        elif commands:
            commands[-1].append(row)
    return commands


def _add_command(total: dict[str, float], rows: list[dict[str, Any]], *, begin: float, ended: float) -> None:
    starts = [index for index, row in enumerate(rows) if row["kind"] == "attempt"]
    _add_start(total, rows[: starts[0] + 1] if starts else rows, begin=begin, ended=ended, trained=bool(starts))
    total["export"] += sum(row["seconds"] for row in rows if row["kind"] == "exported")
    for position, start in enumerate(starts):
        last = position + 1 == len(starts)
        mine = rows[start : len(rows) if last else starts[position + 1]]
        closed = next((row["time"] for row in mine if row["kind"] == "attempt_end"), None)
        accounts = [row for row in mine if row["kind"] in ("checkpoint", "account") and "seconds" in row]
        for name, seconds in (accounts[-1]["seconds"] if accounts else {}).items():
            total[name] += seconds
        if closed is not None and last:
            continue
        safe = accounts[-1]["time"] if accounts else mine[0]["time"]
        faults = [row for row in rows if row["kind"] == "fault" and row.get("failed_attempt") == mine[0]["attempt"]]
        stuck = [row["time"] - row["seconds"] for row in mine if row["kind"] == "hang_ended" and "seconds" in row]
        again = ended if closed is None else safe
        if not last:
            again = rows[starts[position + 1]]["time"]
        elif faults:  # the attempts after it failed before their first step
            again = _last_fault(rows)
        noticed = min([faults[0]["failed_at"], *stuck]) if faults else 0.0  # nothing was computed while it was stuck
        failed = min(max(noticed, safe), again) if faults else again if last else safe
        total["lost"] += max(0.0, failed - safe)
        total["restart"] += max(0.0, again - failed)


def _add_start(
    total: dict[str, float], rows: list[dict[str, Any]], *, begin: float, ended: float, trained: bool
) -> None:
    """Add the time before the first step of a command: its start until an attempt failed, and what followed.

    Args:
        rows: until the first `attempt` event, if there is one (`trained`), else all rows of the command.
    """
    failures = [row["failed_at"] for row in rows if row["kind"] == "fault"]
    until = rows[-1]["time"] if trained else _last_fault(rows) if failures else ended
    failed = min(max(begin, min(failures)), until) if failures else until
    prepared = sum(row["seconds"] for row in rows if row.get("phase") == "finished" and row["time"] <= failed)
    total["data"] += prepared  # reading and converting data is part of the start, but is counted as data
    total["startup"] += failed - begin - prepared
    total["restart"] += until - failed


def _last_fault(rows: list[dict[str, Any]]) -> float:
    """When the last failed attempt was known to have failed: the next one, or the decision to stop, records it."""
    return max(row["time"] for row in rows if row["kind"] == "fault")
