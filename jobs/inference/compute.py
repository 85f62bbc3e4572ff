"""Computes the units of a plan, in this process or on a cluster; prints what happens; and the result for Python.

`jobs.infer` calls it with the plan; what was computed already is not computed again.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json import loads
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from cluster.devices.inventory import local_inventory
from cluster.wording import counted
from jobs.driver.planning import show_only_picked
from jobs.driver.printing import print_line, print_warning
from jobs.driver.progress import (
    PLAIN_EVERY_S,
    QUIET_S,
    WIDE,
    Clock,
    Missing,
    RemainingTime,
    TimesColumn,
    nothing_missing,
    still,
    times_text,
)
from jobs.driver.runtime import connected
from jobs.inference.layout import with_hosts
from jobs.inference.plan import InferencePlan
from jobs.job.facts import path_from_here
from raytrain.config.messages import abbreviated
from raytrain.config.sections import InferConfig
from raytrain.data.sources.tables import csv_texts
from raytrain.errors import RunError
from raytrain.infer.input import Unit, UnitReport
from raytrain.infer.output import FORMATS, MANIFEST, rows_in_progress
from raytrain.infer.worker import InferenceWorker
from raytrain.plan.choice import size_text
from raytrain.plan.room import missing
from raytrain.report.inference import PAGE
from raytrain.runs.storage import join, locate, open_store

# ---------------------------------------------------------------- result
# What an inference job returns to Python.


@dataclass(frozen=True)
class InferResult:
    """What an inference job left.

    Attributes:
        status: "done", or "failed" if more rows failed than `infer.max_failures` allows.
        output: the folder.
        rows, failed: rows of the input, and those without a prediction.
        summary: the figures of summary.json.

    Example:
        >>> from jobs.infer import infer
        >>> answers = infer("runs/latest", input="rows.csv", quiet=True)
        >>> answers.status, answers.rows, answers.failed
        ('done', 60, 0)
        >>> answers.predictions == f"{answers.output}/predictions.parquet"
        True
        >>> answers.table().num_rows, sum(batch.num_rows for batch in answers.batches())
        (60, 60)

        As a Ray Dataset, in a program that has called `ray.init`:

        >>> answers.dataset().count()
        60
    """

    status: str
    output: str
    rows: int
    failed: int
    summary: dict[str, Any]

    @property
    def predictions(self) -> str:
        """Path or URI of the file with the predictions. Raises RunError: there is none, because the job failed."""
        store = open_store(self.output)
        for kind in FORMATS:
            if store.exists(f"predictions.{kind}"):
                return join(self.output, f"predictions.{kind}")
        raise RunError(f"{self.output} holds no predictions")

    def table(self) -> Any:
        """The predictions as an Arrow table, in input order."""
        import pyarrow as pa

        return pa.Table.from_batches(self.batches())

    def batches(self) -> Iterator[Any]:
        """The predictions as Arrow record batches, in input order; one is in memory at a time."""
        from pyarrow import csv, json, parquet

        filesystem, inner = locate(self.predictions, key="infer.output")
        if inner.endswith(".parquet"):
            yield from parquet.ParquetFile(filesystem.open_input_file(inner)).iter_batches()
        elif inner.endswith(".csv"):
            yield from csv.open_csv(filesystem.open_input_stream(inner), **self._reading("csv"))
        else:
            yield from json.read_json(filesystem.open_input_stream(inner), **self._reading("jsonl")).to_batches()

    def dataset(self) -> Any:
        """The predictions as a Ray Dataset, which reads them where it is used."""
        import ray

        filesystem, inner = locate(self.predictions, key="infer.output")
        readers = {"parquet": ray.data.read_parquet, "csv": ray.data.read_csv, "jsonl": ray.data.read_json}
        kind = inner.rpartition(".")[2]
        return readers[kind](inner, filesystem=filesystem, **self._reading(kind))

    def _reading(self, kind: str) -> dict[str, Any]:
        """Options of Arrow's reader with which texts stay texts: ids such as `007` and dates would become others."""
        import pyarrow as pa
        from pyarrow import json

        texts = loads(open_store(self.output).read_bytes(MANIFEST)).get("text_columns", ())
        if not texts or kind == "parquet":
            return {}
        if kind == "csv":
            return csv_texts(texts)
        schema = pa.schema([(name, pa.string()) for name in texts])
        return {"parse_options": json.ParseOptions(explicit_schema=schema)}


# ---------------------------------------------------------------- compute
# Computes the units of a plan: in this process, or on a cluster that is running or started for it.


class UnitComputation:
    """Computes units and writes their files: one worker in this process, more on a Ray cluster.

    A model that runs in this process is loaded at once, so that one that does not load leaves nothing behind. `say`:
    prints a line. Raises InputError: the model does not fit the input or its weights."""

    def __init__(self, planned: InferencePlan, *, verbose: bool) -> None:
        self._planned, self._work, self._verbose = planned, planned.work(), verbose
        self._address = planned.target.address
        self.missing: Missing = nothing_missing  # what the first worker still needs of a shared cluster
        self._here: InferenceWorker | None = None
        self._done: dict[int, int] = {}
        # hosts are other processes, and so are stages where memory is limited on a CPU: threads share one limit
        limited = planned.target.model.device == "cpu" and planned.target.spec.cluster.memory_limit is not None
        needs_actors = planned.hosts.hosts or (planned.stages.split is not None and limited)
        if planned.workers == 1 and self._address == "local" and not needs_actors:
            work = self._work
            if work.split is not None and work.model.device.startswith("cuda"):  # its stages on this machine's GPUs
                gpus = planned.target.machines.gpus[: work.split.plan.stages]
                devices = tuple(f"cuda:{gpu.index}" for gpu in gpus)
                work = replace(work, split=replace(work.split, devices=devices))
            self._here = InferenceWorker(work, "this process", self._note)
            self._here.load()

    def _note(self, unit: Unit, rows: int) -> None:
        self._done = {unit.number: rows}

    def in_progress(self) -> dict[int, int]:
        """Unit -> rows that are done of it, of units that may not be complete."""
        return self._done if self._here is not None else rows_in_progress(self._work.parts)

    def reports(self, units: Sequence[Unit]) -> Iterator[UnitReport]:
        """Compute units; yields what is complete, in any order."""
        if self._here is not None:
            yield from map(self._here.run, units)
            self._here.close()
        elif units:
            yield from self._on_ray(units)

    def _on_ray(self, units: Sequence[Unit]) -> Iterator[UnitReport]:
        from raytrain.execution.ray_private import free_by_node
        from raytrain.infer.ray_data import run_units

        work, workers, machines = self._work, self._planned.workers, self._planned.target.machines
        gpus = 1 if machines.on_gpu else 0
        if gpus:
            if self._address == "local":
                show_only_picked(str(machines.accelerator.value), local_inventory())
            work = replace(work, model=replace(work.model, device="cuda:0"))  # Ray shows each actor its own alone
        kind = None if self._address == "local" else machines.required_type
        need, count = self._planned.need, workers * self._planned.processes
        cpus = need.each["CPU"]
        with connected(self._address, num_cpus=count + 1, num_gpus=count * gpus, verbose=self._verbose) as cluster:
            if work.hosts:
                work = replace(work, model=with_hosts(work.model, self._planned, loopback=cluster.local))
            at_once = workers if self._address == "local" else 1  # the others may come later

            def told(started: Callable[[], int]) -> None:
                """Say from now on what the first worker of a shared cluster needs, until it has started."""
                if self._address != "local":
                    self.missing = lambda: "" if started() else missing([need], free_by_node())

            yield from run_units(
                work, units, workers=workers, at_once=at_once, cpus=cpus, gpus=gpus, accelerator=kind, told=told
            )
            self.missing = nothing_missing


# ---------------------------------------------------------------- display
# What `infer` prints: the plan, progress, and what was computed.


#: Most classes that a line names.
MOST_NAMED = 5
#: Seconds between two signs of life of a command.
BEAT_EVERY_S = 5.0


def print_plan(planned: InferencePlan, console: Console) -> None:
    size, model = planned.units[0].rows, planned.target.model
    here = planned.workers == 1 and planned.target.address == "local" and not planned.hosts.hosts
    where = "this process" if here else counted(planned.workers, "worker")
    count = planned.stages.stages
    stages = f", {count} stages each" if count > 1 else ""
    each = "" if here and count == 1 else " each"
    more = "" if planned.at_once == planned.workers else f"; room for {planned.at_once} at once"
    schedule = []
    if planned.at_once > 1:  # what the number of units leaves of the gain; how fast workers are, only the run knows
        units, rounds = len(planned.units), -(-len(planned.units) // planned.at_once)
        gain = f"{counted(units, 'unit')} in {counted(rounds, 'round')}: at most {units / rounds:.3g} times the speed"
        linear = f"{units / rounds / planned.at_once:.0%} of linear"
        schedule = [("schedule", f"{gain} of one worker ({linear}), where units take equally long")]
    for name, value in (
        ("model", f"{planned.target.name}, {model.dtype} on {model.device.split(':')[0]}"),
        ("input", f"{counted(planned.rows.rows, 'row')} in {counted(len(planned.units), 'unit')} of {size:,}"),
        ("batch", f"{counted(planned.batch_size, 'row')} ({planned.batch_reason})"),
        ("workers", f"{where}{stages} with {counted(planned.threads, 'thread')}{each}{more}"),
        *schedule,
        *planned.stages.lines(),
        *planned.hosts.lines(),
        ("output", path_from_here(planned.output.path)),
    ):
        print_line(console, f"{name}: {value}")
    if planned.waits:
        print_line(console, planned.waits)
    for warning in planned.target.warnings:
        print_warning(console, warning)


class InferenceDisplay:
    """Shows how many rows are done: a bar on a terminal, otherwise lines, at least one every `QUIET_S` seconds. A
    context manager: a thread calls `tick` every second.

    `earlier` rows were computed by an earlier command; `in_progress` gives the rows that are done of units that may not
    be complete, and `missing` what the first worker still needs; `beat` is called every few seconds."""

    def __init__(
        self, console: Console, *, rows: int, earlier: int, in_progress: Callable[[], Mapping[int, int]],
        beat: Callable[[], None] = lambda: None, missing: Missing = nothing_missing, clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self._console, self._rows, self._earlier, self._clock = console, rows, earlier, clock
        self._missing = missing
        self._in_progress, self._beat = in_progress, beat
        self._complete: dict[int, int] = {}
        self._began = self._last = self._beaten = clock()
        self._shown = 0
        self._remaining = RemainingTime(clock)
        self._over = threading.Event()
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24 if console.width >= WIDE else 10),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f} rows  {task.fields[figures]}"), TimesColumn(),
            console=console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(
            "inference", total=rows, figures="",
            times=lambda: times_text(clock() - self._began, self._remaining.seconds()),
        )  # fmt: skip

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
        self._complete[unit] = rows

    def tick(self) -> None:
        """Show what is new, if it is time."""
        now, live = self._clock(), self._console.is_terminal
        if now - self._beaten >= BEAT_EVERY_S:
            self._beaten = now
            self._beat()
        waited = now - self._last
        if not live and waited < PLAIN_EVERY_S:
            return
        complete = dict(self._complete)
        partial = {unit: rows for unit, rows in self._in_progress().items() if unit not in complete}
        done = sum(complete.values()) + sum(partial.values())  # by this command
        if done:  # before, processes start and the model is loaded
            self._remaining.see(self._earlier + done, self._rows)
        rate = self._remaining.rate()
        figures = "" if rate is None else f"{rate:,.1f} rows/s"
        if waited >= QUIET_S and not done and (needed := self._missing()):
            self._last = now
            print_line(self._console, still("waiting for room in the cluster", now - self._began, needed))
        elif live:
            self._bar.update(self._task, completed=self._earlier + done, figures=figures)
        elif done != self._shown or waited >= QUIET_S:
            self._last, self._shown = now, done
            left_s = self._remaining.seconds()
            left = f" after {now - self._began:.0f} s" if left_s is None else f", about {left_s:,.0f} s left"
            rows = f"{self._earlier + done:,} of {self._rows:,} rows"
            print_line(self._console, f"{rows}{figures and f', {figures}'}{left}")

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
        print_line(console, line)
