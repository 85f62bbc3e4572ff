"""What a person sees while a sweep runs: a live table on a terminal, one plain line for each trial elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from raytrain.plan_values import size_text

SHOWN = 30
"""So many rows at most in the live table: the newest."""


class SweepTable:
    """Rows by trial number; a context manager. Columns are named once, cells are text."""

    def __init__(self, console: Console, columns: Sequence[str], *, title: str) -> None:
        self._console, self._columns, self._title = console, tuple(columns), title
        self._rows: dict[int, tuple[str, ...]] = {}
        self._running: dict[int, float] = {}
        self._said: set[int] = set()
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> SweepTable:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def start(self, number: int, cells: Sequence[str]) -> None:
        """A trial runs; `cells` are those known so far."""
        self._running[number] = time.monotonic()
        self._rows[number] = tuple(cells)

    def change(self, number: int, cells: Sequence[str]) -> None:
        """More is known of it."""
        self._rows[number] = tuple(cells)

    def end(self, number: int, cells: Sequence[str]) -> None:
        """It has ended."""
        self._running.pop(number, None)
        self._rows[number] = tuple(cells)

    def say(self, text: str) -> None:
        """A line above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self) -> None:
        """Draws what is new; call often."""
        if self._live is not None:
            self._live.update(self.drawn(newest=SHOWN))
            return
        for number in sorted(set(self._rows) - set(self._running) - self._said):
            self._said.add(number)
            pairs = zip(self._columns, self._rows[number], strict=False)
            text = "  ".join(f"{name} {cell}" for name, cell in pairs if cell)
            self._console.print(f"trial {number}  {text}", markup=False, highlight=False, soft_wrap=True)

    def drawn(self, *, newest: int | None = None, marked: int | None = None) -> Table:
        """The table; `marked` is the trial that was taken."""
        table = Table("trial", *self._columns, title=self._title, title_justify="left", box=None, pad_edge=False,
                      header_style="bold")
        numbers = sorted(self._rows)
        for number in numbers[-newest:] if newest else numbers:
            cells = list(self._rows[number])
            if number in self._running:
                cells += [""] * (len(self._columns) - 1 - len(cells))
                cells.append(f"running, {time.monotonic() - self._running[number]:.0f} s")
            style = "bold green" if number == marked else "dim" if number in self._running else ""
            table.add_row(str(number), *cells, style=style)
        return table


def number_text(value: Any, unit: str = "") -> str:
    """A number for a cell; nothing for what is not known."""
    if not isinstance(value, int | float) or math.isnan(value):
        return ""
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def bytes_text(value: Any) -> str:
    """Bytes for a cell."""
    return size_text(value) if isinstance(value, int | float) and value else ""


def whole_cells(row: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Cells of a trial that is a whole run."""
    values = [number_text(row["values"].get(key)) or str(row["values"].get(key)) for key in keys]
    figures = [number_text(row.get("steps")), number_text(row.get("eval_loss")), number_text(row.get("samples_per_s"))]
    notes = {"ok": "", "stopped": "ended early"}
    note = notes.get(row["outcome"], f"{row['outcome']}: {row.get('reason', '')}") if "outcome" in row else ""
    return [*values, *figures, note]


WHOLE_COLUMNS = ("steps", "eval loss", "samples/s", "")
