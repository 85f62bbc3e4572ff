"""Shows the progress of a run: a live bar on a terminal, otherwise one plain line every 10 s."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_EVERY_S = 10.0


class TrainingDisplay:
    """Shows the progress that rank 0 reports ({"phase", "max_steps", "step", "row"}); a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = console.is_terminal
        self._last = 0.0
        self._phase = ""
        self._shown_step = -1
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=1, figures="")

    def __enter__(self) -> TrainingDisplay:
        if self._live:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live:
            self._bar.stop()

    def print_lines(self, text: str) -> None:
        """Print the lines of rank 0's code, without any formatting."""
        for line in text.splitlines():
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, progress: dict[str, Any]) -> None:
        """Show the newest progress; output is limited however often this is called."""
        phase = str(progress.get("phase", "starting workers"))
        row = progress.get("row") or {}
        step = int(row.get("step") or progress.get("step") or 0)
        total = int(progress.get("max_steps") or 1)
        if self._live:
            self._bar.update(self._task, description=phase, total=total, completed=step, figures=figures(row))
            return
        now = time.monotonic()
        due = now - self._last >= PLAIN_EVERY_S and step != self._shown_step
        if phase != self._phase or due:
            self._last, self._phase, self._shown_step = now, phase, step
            where = f"step {step}/{total}  {figures(row)}" if row else ""
            self._console.print(f"{phase}  {where}".rstrip(), markup=False, highlight=False)


def figures(row: dict[str, Any]) -> str:
    """Loss, rate and memory of a row in one short line."""
    parts = []
    if row.get("kind") == "eval":
        parts.append(f"eval loss {row['loss']:.4f}")
    elif row.get("loss") is not None:
        parts.append(f"loss {row['loss']:.4f}")
    if row.get("tokens_per_s"):
        parts.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    elif row.get("samples_per_s"):
        parts.append(f"{row['samples_per_s']:,.0f} samples/s")
    if row.get("peak_memory_bytes"):
        parts.append(f"{row['peak_memory_bytes'] / 2**20:,.0f} MiB")
    return "  ".join(parts)
