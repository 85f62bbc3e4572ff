"""What `infer` prints: the plan, progress, and what was computed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from cluster.wording import counted
from jobs.driver.screen.progress import PLAIN_EVERY_S, QUIET_S, WIDE, Clock
from jobs.driver.screen.remaining import times_column, times_text
from jobs.inference.plan import InferencePlan
from jobs.job.paths import path_from_here
from raytrain.config.messages import abbreviated
from raytrain.config.sections import InferConfig
from raytrain.errors import RunError
from raytrain.plan.text import size_text
from raytrain.report.inference import PAGE
from raytrain.runs.storage import join

#: Most classes that a line names.
MOST_NAMED = 5
#: Seconds between two signs of life of a command.
BEAT_EVERY_S = 5.0


def print_plan(planned: InferencePlan, console: Console) -> None:
    """Print what will be computed, and where."""
    size, model = planned.units[0].rows, planned.target.model
    here = planned.workers == 1 and planned.target.address == "local" and not planned.hosts.hosts
    where = "this process" if here else counted(planned.workers, "worker")
    count = planned.stages.stages
    stages = f", {count} stages each" if count > 1 else ""
    each = "" if here and count == 1 else " each"
    for name, value in (
        ("model", f"{planned.target.name}, {model.dtype} on {model.device.split(':')[0]}"),
        ("input", f"{counted(planned.rows.rows, 'row')} in {counted(len(planned.units), 'unit')} of {size:,}"),
        ("batch", f"{counted(planned.batch_size, 'row')} ({planned.batch_reason})"),
        ("workers", f"{where}{stages} with {counted(planned.threads, 'thread')}{each}"),
        *_schedule(planned),
        *planned.stages.lines(),
        *planned.hosts.lines(),
        ("output", path_from_here(planned.output.path)),
    ):
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)
    for warning in planned.target.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)


def _schedule(planned: InferencePlan) -> list[tuple[str, str]]:
    """What the number of units leaves of the gain of several workers; how fast they are, only the run knows."""
    units, workers = len(planned.units), planned.workers
    if workers == 1:
        return []
    rounds = -(-units // workers)
    most = units / rounds
    text = f"{counted(units, 'unit')} in {counted(rounds, 'round')}: at most {most:.3g} times the speed of one worker"
    return [("schedule", f"{text} ({most / workers:.0%} of linear), where units take equally long")]


class InferenceDisplay:
    """Shows how many rows are done: a bar on a terminal, otherwise lines, at least one every `QUIET_S` seconds.

    A context manager: a thread calls `tick` every second.

    Args:
        rows: of the input.
        earlier: rows that an earlier command has computed.
        in_progress: unit -> rows that are done of it, of units that may not be complete.
        beat: called every few seconds.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self, console: Console, *, rows: int, earlier: int, in_progress: Callable[[], Mapping[int, int]],
        beat: Callable[[], None] = lambda: None, clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self._console, self._rows, self._earlier, self._clock = console, rows, earlier, clock
        self._in_progress, self._beat = in_progress, beat
        self._complete: dict[int, int] = {}
        self._began = self._last = self._beaten = clock()
        self._shown = 0
        self._first: tuple[float, int] | None = None
        self._over = threading.Event()
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24 if console.width >= WIDE else 10),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} rows  {task.fields[figures]}"), times_column(),
            console=console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("inference", total=rows, figures="", times=self._times)

    def __enter__(self) -> InferenceDisplay:
        if self._console.is_terminal:
            self._bar.start()
        threading.Thread(target=self._run, daemon=True, name="progress").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._console.is_terminal:
            self._bar.stop()

    def complete(self, unit: int, rows: int) -> None:
        """A unit of so many rows is complete."""
        self._complete[unit] = rows

    def tick(self) -> None:
        """Show what is new, if it is time."""
        now = self._clock()
        if now - self._beaten >= BEAT_EVERY_S:
            self._beaten = now
            self._beat()
        if self._console.is_terminal:
            self._bar.update(self._task, completed=self._earlier + self._done(), figures=self._rate(now))
        elif now - self._last >= PLAIN_EVERY_S:
            done = self._done()
            if done == self._shown and now - self._last < QUIET_S:
                return
            self._last, self._shown = now, done
            rows = f"{self._earlier + done:,} of {self._rows:,} rows"
            rate = self._rate(now)
            self._console.print(f"{rows}{rate and f', {rate}'}{self._left(now)}", markup=False, highlight=False)

    def _done(self) -> int:
        """Rows that this command has computed."""
        complete = dict(self._complete)
        partial = {unit: rows for unit, rows in self._in_progress().items() if unit not in complete}
        return sum(complete.values()) + sum(partial.values())

    def _per_s(self, now: float) -> float | None:
        """Rows a second since the first were seen, as in the last line: the time until then, in which processes start
        and the model is loaded, computes none. None before there are more."""
        done = self._done()
        if self._first is None and done:
            self._first = (now, done)
        since, before = self._first or (now, done)
        return (done - before) / (now - since) if now > since and done > before else None

    def _rate(self, now: float) -> str:
        rate = self._per_s(now)
        return "" if rate is None else f"{rate:,.1f} rows/s"

    def _times(self) -> str:
        now = self._clock()
        return times_text(now - self._began, self._left_s(now))

    def _left(self, now: float) -> str:
        left_s = self._left_s(now)
        return f" after {now - self._began:.0f} s" if left_s is None else f", about {left_s:,.0f} s left"

    def _left_s(self, now: float) -> float | None:
        """Seconds for the rows that are left; None where the rate is unknown."""
        rate = self._per_s(now)
        return None if rate is None else max(self._rows - self._earlier - self._done(), 0) / rate

    def _run(self) -> None:
        while not self._over.wait(1.0):
            with contextlib.suppress(RunError, OSError):  # of the output's storage: the workers tell of it
                self.tick()


def never_predicted(quality: Mapping[str, Any]) -> list[str]:
    """A line about the labels that no row was predicted as: the model may not know them, or name them otherwise."""
    never, others = quality["never_predicted"], quality["other_predictions"]
    if not never:
        return []
    rows = sum(quality["classes"][name]["rows"] for name in never)
    named = f"; predictions that are no label: {abbreviated([*map(repr, others)], MOST_NAMED)}" if others else ""
    return [f"no row was predicted as {abbreviated([*map(repr, never)], MOST_NAMED)} ({counted(rows, 'row')}){named}"]


def print_summary(
    planned: InferencePlan, infer: InferConfig, about: dict[str, Any], summary: dict[str, Any], console: Console
) -> None:
    """Print the figures of a finished job."""
    rate = summary["rows_per_s"]
    tokens = f", {summary['tokens_per_s']:,.0f} tokens/s" if summary["tokens_per_s"] else ""
    speed = f", {rate:,.1f} rows/s{tokens}" if rate else ""
    lines = [f"done: {counted(about['rows'], 'row')}, {about['failed']:,} failed{speed}"]
    quality = summary["quality"]
    if quality and quality.get("accuracy") is not None:
        lines.append(f"accuracy {quality['accuracy']:.4f}, F1 {quality['f1']:.4f} (mean over classes)")
        lines += never_predicted(quality)
    elif quality and quality.get("rmse") is not None:
        mean, root = quality["mean_absolute_error"], quality["rmse"]
        lines.append(f"mean absolute error {mean:.4g}, root mean square error {root:.4g}")
    quantized = summary["quantized"]
    if quantized:
        compared = f"{quantized['same']} of {quantized['rows']} answers are those of the weights before"
        lines.append(
            f"int8: {quantized['layers']} linear layers in {size_text(quantized['after'])} instead of "
            f"{size_text(quantized['before'])}; {compared if quantized['rows'] else 'not compared: no room for both'}"
        )
    stages = summary["stages"]
    if stages:
        busy = ", ".join(f"{share:.0%}" for share in stages["busy"])
        lines.append(
            f"stages were busy {busy} of the time: they waited {stages['bubble']:.0%}, stages of equal speed wait "
            f"{stages['expected_bubble']:.0%} with {stages['passes'] / max(stages['rounds'], 1):.1f} passes a round"
        )
    folder = path_from_here(planned.output.path)
    lines.append(f"predictions {join(folder, f'predictions.{infer.format}')}")
    lines.append(f"report {join(folder, PAGE)}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
