"""Shows the trials of a running search: a live table on a terminal, otherwise plain lines, and what happens now."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Column, Table

from cluster.wording import counted
from jobs.driver.screen.progress import still
from raytrain.autotune.search.head_to_head import HeadToHead
from raytrain.autotune.search.loaders import LoaderRates, choose_count
from raytrain.autotune.search.measurement import Measurement
from raytrain.autotune.search.precision import GateReport, gate_refusal
from raytrain.autotune.search.space import BatchSpace
from raytrain.plan.text import figure_text, size_text

PIPED_COLUMNS = 10_000
"""Console width for piped output; wider than any row of a table."""

WIDE = 120
"""On a terminal narrower than this, the dotted keys in the header are broken over several lines, not truncated."""

SHOWN = 30
"""The live table shows at most this many rows, the newest."""

PLAIN_EVERY_S = 10.0
"""Without a live table, something is printed at least this often."""

CHOOSING = "choosing the next trial"


class SweepTable:
    """Rows by trial number, and a line that says what happens now; a context manager. Columns are named once, cells
    are text.

    Args:
        clock: seconds; replaced in tests.
    """

    def __init__(
        self, console: Console, columns: Sequence[str], *, title: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._columns, self._title, self._clock = console, tuple(columns), title, clock
        self._rows: dict[int, tuple[str, ...]] = {}
        self._starting: dict[int, float] = {}
        self._running: dict[int, float] = {}
        self._texts: dict[int, str] = {}
        self._left, self._shown, self._since = "", CHOOSING, clock()
        self._last = self._since
        self._spinner = Spinner("dots")
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> SweepTable:
        if self._live is not None:
            self._live.start()
            self.show()
            self._live.refresh()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def propose(self, number: int, cells: Sequence[str], *, left: str) -> None:
        """Add a trial whose process is being started.

        Args:
            cells: the values known so far.
            left: how many trials there are or may still come, as text.
        """
        self._starting[number] = self._clock()
        self._rows[number], self._left = tuple(cells), left

    def start(self, number: int) -> None:
        """The process of a trial has started."""
        self._starting.pop(number, None)
        self._running[number] = self._clock()

    def end(self, number: int, cells: Sequence[str], text: str) -> None:
        """Mark a trial as ended; `text` is its line where there is no live table."""
        self._starting.pop(number, None)
        self._running.pop(number, None)
        self._rows[number], self._texts[number] = tuple(cells), text

    def print_line(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self) -> None:
        """Draw what is new; call often."""
        now, what = self._clock(), self._activity()
        changed = what != self._shown
        if changed:
            self._shown, self._since = what, now
        if self._live is not None:
            self._spinner.update(text=escape(f"{what}, {now - self._since:.0f} s"))
            self._live.update(Group(self._spinner, self.drawn(newest=SHOWN)))
            return
        for number in sorted(self._texts):
            self.print_line(f"trial {number}  {self._texts.pop(number)}")
            self._last = now
        if changed and what != CHOOSING:
            self.print_line(what)
            self._last = now
        elif now - self._last >= PLAIN_EVERY_S:
            self.print_line(still(what, now - self._since, ""))
            self._last = now

    def _activity(self) -> str:
        """What happens now, and how much may still come."""
        parts = []
        for word, trials in (("starting", self._starting), ("measuring", self._running)):
            numbers = sorted(trials.copy())
            if numbers:
                parts.append(f"{word} trial{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}")
        return f"{' and '.join(parts)} ({self._left})" if parts else CHOOSING

    def drawn(self, *, newest: int | None = None, marked: int | None = None) -> Table:
        """The table; `marked` is the best trial."""
        narrow = self._console.is_terminal and self._console.width < WIDE
        names = [re.sub(r"([._])(?=.)", r"\1\n", name) if narrow else name for name in self._columns]
        columns = [Column(name, overflow="fold") for name in names]
        table = Table(
            "trial", *columns, title=self._title, title_justify="left", box=None, pad_edge=False, header_style="bold"
        )
        numbers = sorted(self._rows)
        for number in numbers[-newest:] if newest else numbers:
            cells = list(self._rows[number])
            began = self._running.get(number, self._starting.get(number))
            if began is not None:
                cells += [""] * (len(self._columns) - 1 - len(cells))
                word = "running" if number in self._running else "starting"
                cells.append(f"{word} {self._clock() - began:.0f} s")
            style = "bold green" if number == marked else "" if began is None else "dim"
            table.add_row(str(number), *cells, style=style)
        return table


def print_table(console: Console, table: Table) -> None:
    """Print a table; piped output is not wrapped."""
    width = console.width
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    try:
        console.print(table)
    finally:
        console.width = width


def values_text(values: Mapping[str, Any]) -> str:
    """Each `key value` pair, on one line."""
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                     for key, value in values.items())  # fmt: skip


def number_text(value: Any, unit: str = "") -> str:
    """A number for a cell; empty if unknown."""
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value):
        return ""
    return f"{figure_text(value)} {unit}".rstrip()


def bytes_text(value: Any) -> str:
    """Bytes for a cell."""
    return size_text(value) if isinstance(value, int | float) and value else ""


def whole_cells(row: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    """Cells of a trial that is a complete run."""
    values = [number_text(row["values"].get(key)) or str(row["values"].get(key)) for key in keys]
    figures = [number_text(row.get("steps")), number_text(row.get("eval_loss")), number_text(row.get("samples_per_s"))]
    notes = {"ok": "", "stopped": "ended early", "died": row.get("reason", "")}
    note = notes.get(row["outcome"], f"{row['outcome']}: {row.get('reason', '')}") if "outcome" in row else ""
    return [*values, *figures, note]


def whole_text(row: Mapping[str, Any]) -> str:
    """The line of a trial that is a complete run."""
    *_, steps, loss, pace, note = whole_cells(row, ())
    named = ((steps, f"{steps} steps"), (loss, f"eval loss {loss}"), (pace, f"{pace} samples/s"))
    parts = [text for value, text in named if value]
    return f"{values_text(row['values'])}: {', '.join(part for part in (*parts, note) if part)}"


BATCH_COLUMNS = ("what", "precision", "rows", "rows/s", "peak", "")
WHOLE_COLUMNS = ("steps", "eval loss", "samples/s", "")


def batch_cells(row: Mapping[str, Any], space: BatchSpace) -> list[str]:
    """Cells of a measurement: kind of device (if several), what is measured, precision, rows, speed, peak, note."""
    cells = [row["what"], row["precision"], str(row["micro_batch_size"])]
    cells = [row["kind"], *cells] if row.get("kind") else cells
    if row.get("gate") is not None:
        return [*cells, "", "", gate_refusal(GateReport.from_json(row["gate"])) or "loss and gradient norm agree"]
    if row.get("noise") is not None:
        return [*cells, "", "", f"noise scale {number_text(row['noise']['rows'])} rows"]
    if row.get("loaders") is not None:
        found = choose_count(LoaderRates.from_json(row["loaders"]))
        return [*cells, "", "", f"{found.value} loader processes: {found.reason}"]
    if row.get("contest") is not None:
        peak = (row.get("measurement") or {}).get("peak_bytes")
        return [*cells, "", bytes_text(peak), contest_text(HeadToHead.from_json(row["contest"]), space)]
    if row.get("measurement") is None:
        return [*cells, "", "", row.get("reason", "")]
    one = Measurement.from_json(row["measurement"])
    size = one.candidate.micro_batch_size
    rows = space.rows_per_step or size
    speed = number_text(rows / one.step_s(rows)) if one.pass_s else ""
    words = {"ok": "", "out_of_memory": "out of memory", "nonfinite": "not finite", "error": "failed"}[one.outcome]
    return [*cells, speed, bytes_text(one.peak_bytes), ": ".join(part for part in (words, one.reason) if part)]


def contest_text(contest: HeadToHead, space: BatchSpace) -> str:
    """The first contender compared with each of the others."""
    if not contest.valid:
        return next(f"{one.outcome}: {one.reason}" for one in contest.measurements if one.outcome != "ok")
    first, *others = (one.candidate for one in contest.measurements)
    return "; ".join(contest.comparison(first, other, rows=space.rows_per_step) for other in others)


def batch_text(row: Mapping[str, Any], space: BatchSpace) -> str:
    """The line of a measurement."""
    *kind, what, precision, size, speed, peak, note = batch_cells(row, space)
    parts = (f"{speed} rows/s" if speed else "", f"peak {peak}" if peak else "", note)
    named = ", ".join([*kind, precision, counted(int(size), "row"), what])
    return f"{named}: {', '.join(part for part in parts if part)}"
