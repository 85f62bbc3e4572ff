"""What `submit status` prints: a table of jobs that fits 80 columns, or all that is known of one job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.submission.server import SubmittedJob

PIPE_WIDTH = 200
"""Columns where the output is no terminal: a line for each job."""
COLOURS = {"SUCCEEDED": "green", "FAILED": "red", "STOPPED": "yellow"}


def row_of(job: SubmittedJob, *, now: float) -> dict[str, Any]:
    """A job as `submit status --json` prints it.

    Args:
        now: unix seconds; a job that runs has taken its time until then.
    """
    ends = job.end_time or now
    return {
        "id": job.id,
        "verb": job.record.get("verb") or "",
        "status": job.outcome,
        "exit_code": job.verdict,
        "started": job.start_time,
        "seconds": None if job.start_time is None else max(0.0, ends - job.start_time),
        "save_dir": job.record.get("save_dir"),
        "entrypoint": job.entrypoint,
        "message": job.message,
    }


def print_jobs(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a line for each job; only an ID that is too long for the terminal takes more."""
    table = Table(box=None, pad_edge=False)
    table.add_column("ID", overflow="fold")
    for name in ("verb", "status", "exit", "started", "took"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("exit", "took") else "left")
    for row in rows:
        started = "" if row["started"] is None else time.strftime("%m-%d %H:%M", time.localtime(row["started"]))
        table.add_row(row["id"], row["verb"] or "-", _status(row), _code(row), started, _took(row["seconds"]))
    console.print(table)


def print_job(row: dict[str, Any], console: Console) -> None:
    """Print all that is known of one job, a line for each fact."""
    at = row["started"]
    started = "" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    facts = {
        "ID": row["id"], "verb": row["verb"], "status": _status(row), "exit": _code(row), "started": started,
        "took": _took(row["seconds"]), "save.dir": row["save_dir"] or "", "command": row["entrypoint"],
        "message": row["message"],
    }  # fmt: skip
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, value if isinstance(value, Text) else Text(value.strip()))
    console.print(table)


def listing_console() -> Console:
    """Standard output; as wide as the terminal, or as a line needs where it is none."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def _status(row: dict[str, Any]) -> Text:
    return Text(row["status"], style=COLOURS.get(row["status"], ""))


def _code(row: dict[str, Any]) -> str:
    return "" if row["exit_code"] is None else str(row["exit_code"])


def _took(seconds: float | None) -> str:
    """Such as 7s, 3m 12s or 5h 3m: short, for the table."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"
