"""The verb `infer`, and the function `infer` for Python: batch inference over files of rows.

The order: find the model -> open the input -> divide it into units -> compute them here or on a cluster -> merge.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.devices.inventory import Inventory, local_inventory
from jobs.driver.plan import show_only_picked
from jobs.driver.runtime import cluster_address, connected
from jobs.inference.target import Target, gpus_of, open_target
from raytrain.config.decode import encode
from raytrain.config.sections import InferConfig
from raytrain.errors import InputError, RunError
from raytrain.infer.input import InputRows, check_columns, converted, input_files
from raytrain.infer.merge import merge, remove_parts
from raytrain.infer.output import CONVERTED, MANIFEST, OutputFolder, fingerprint
from raytrain.infer.summary import summarise
from raytrain.infer.units import Unit, unit_size, units_of
from raytrain.infer.worker import InferenceWorker, UnitReport, Work, duplicate_id, kept_columns
from raytrain.runs.storage import join, open_store

__all__ = ["InferResult", "infer", "run_infer"]

SUMMARY = "summary.json"
#: Seconds between lines of progress.
SHOWN_EVERY_S = 5.0
#: Rows of a batch where `infer.batch_size` is auto: for answers of many tokens, and for one output a row.
GENERATED_ROWS, PLAIN_ROWS = 16, 256


@dataclass(frozen=True)
class InferResult:
    """What an inference job left.

    Attributes:
        status: "done", or "failed" if more rows failed than `infer.max_failures` allows.
        output: the folder.
        rows, failed: rows of the input, and those without a prediction.
        summary: the figures of summary.json.
    """

    status: str
    output: str
    rows: int
    failed: int
    summary: dict[str, Any]

    def table(self) -> Any:
        """The predictions as an Arrow table, in input order."""
        from pyarrow import parquet

        return parquet.read_table(join(self.output, "predictions.parquet"))


@dataclass(frozen=True)
class _Planned:
    """A job that is ready to run."""

    target: Target
    rows: InputRows
    units: list[Unit]
    output: OutputFolder
    batch_size: int
    workers: int
    threads: int
    identity: dict[str, Any]

    def work(self) -> Work:
        infer = self.target.spec.infer
        allowed = math.floor(infer.max_failures * self.rows.rows)
        return Work(self.target.model, infer, self.rows, self.output.parts, self.batch_size, allowed, self.threads)


def infer(
    target: str | Path | None = None,
    *,
    input: str | Sequence[str] | None = None,
    output: str | None = None,
    workers: int | None = None,
    overrides: Sequence[str] = (),
    resume: str | None = None,
    quiet: bool = False,
) -> InferResult:
    """Run batch inference from Python, in a script or a notebook.

    Args:
        target: a run folder, a JOB.yaml, a folder of transformers, or a builder as module:function; None is the newest
            run.
        input, output, workers: short for `infer.input`, `infer.output` and `scale.workers`.
        overrides: `section.key=value` strings, as on the command line.
        resume: the output folder of an interrupted command.

    Raises:
        InputError: the input is wrong; nothing was computed.
        RunError: more rows failed than `infer.max_failures` allows.
    """
    given = {"infer.input": None if input is None else json.dumps(input), "infer.output": output}
    given["scale.workers"] = None if workers is None else str(workers)
    changes = [*overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)]
    console = Console(quiet=quiet, highlight=False)
    name = None if target is None else str(target)
    result = run_infer(name, changes, resume=resume, dry_run=False, verbose=False, console=console)
    assert result is not None
    if result.status == "failed":
        raise RunError(f"{result.failed} of {result.rows} rows failed (output folder: {result.output})")
    return result


def run_infer(
    given: str | None, overrides: Sequence[str], *, resume: str | None, dry_run: bool, verbose: bool, console: Console
) -> InferResult | None:
    """Plan and run an inference job; None for a dry run, which only prints the plan."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as NVML counts GPUs, by which a device is chosen
    inventory = local_inventory()
    target = open_target(given, overrides, inventory)
    return infer_target(target, inventory, resume=resume, dry_run=dry_run, verbose=verbose, console=console)


def infer_target(
    target: Target, inventory: Inventory, *, resume: str | None, dry_run: bool, verbose: bool, console: Console
) -> InferResult | None:
    """Run an inference job with a model that was found; arguments as for `run_infer`."""
    planned = _plan(target, inventory, resume=resume)
    _print_plan(planned, console)
    if dry_run:
        return None
    planned.output.begin(planned.identity, resume=resume is not None)
    return _run(planned, verbose=verbose, console=console)


# ---------------------------------------------------------------- plan


def _plan(target: Target, inventory: Inventory, *, resume: str | None) -> _Planned:
    infer = target.spec.infer
    if not infer.input:
        raise InputError("infer.input", seen="no value", expected="the files or folders of rows to answer")
    given = [infer.input] if isinstance(infer.input, str) else list(infer.input)
    files = input_files([one if "://" in one else os.path.abspath(os.path.expanduser(one)) for one in given])
    output = OutputFolder(resume or infer.output or _new_folder(target))
    rows = InputRows.at(converted(files, join(output.path, CONVERTED)), limit=infer.max_samples)
    if not rows.rows:
        raise InputError("infer.input", seen="no rows", expected="at least one row")
    check_columns(rows.schema, {
        "infer.id_column": infer.id_column, "infer.label": infer.label,
        **{f"infer.keep[{number}]": name for number, name in enumerate(infer.keep)},
    })  # fmt: skip
    _check_names(kept_columns(infer))
    if infer.id_column is not None:
        _check_ids(rows, infer.id_column)
    size = infer.unit_rows if isinstance(infer.unit_rows, int) else unit_size(rows.rows, generates=_generates(target))
    units = units_of(rows.rows, size)
    workers = _workers(target, inventory, len(units))
    threads = _threads(target, inventory, workers)
    batch = infer.batch_size if isinstance(infer.batch_size, int) else _batch_size(target)
    settings = {
        key: value for key, value in encode(infer).items()
        if key not in ("input", "output", "max_failures", "batch_size", "unit_rows", "weights")
    }  # fmt: skip
    identity = {
        **target.identity, "input": [fingerprint(path) for path in files.paths], "rows": rows.rows,
        "unit_rows": size, "batch_size": batch, "dtype": target.model.dtype, "seed": target.model.seed,
        **{f"infer.{key}": value for key, value in settings.items()},
    }  # fmt: skip
    return _Planned(target, rows, units, output, batch, workers, threads, identity)


def _check_names(kept: Sequence[str]) -> None:
    from raytrain.infer.output import RESULT_COLUMNS, TIMING_COLUMNS

    for name in kept:
        if name in ("id", *RESULT_COLUMNS, *TIMING_COLUMNS):
            raise InputError("infer.keep", seen=f"{name}, a column that raytrain writes", expected="another name")


def _check_ids(rows: InputRows, column: str) -> None:
    found = duplicate_id(rows, column)
    if found is not None:
        value, places = found
        what = f"no value in row {places[0]}" if value is None else f"{value!r} in rows {places[0]} and {places[1]}"
        raise InputError(
            "infer.id_column", seen=f"the column {column} with {what}", expected="a unique id in every row"
        )


def _new_folder(target: Target) -> str:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    parent = join(target.run.path, "predictions") if target.run is not None else os.path.abspath("predictions")
    names = {entry.name for entry in open_store(parent).entries("")}
    stem = f"{target.name}-{stamp}"
    return join(
        parent, next(name for number in count(1) if (name := f"{stem}-{number}" if number > 1 else stem) not in names)
    )


def _workers(target: Target, inventory: Inventory, units: int) -> int:
    """Raises InputError: there are fewer GPUs here, and one worker more would wait for one without end."""
    wanted, gpus = target.spec.scale.workers, len(gpus_of(target.spec, inventory))
    if not isinstance(wanted, int):
        return min(max(gpus, 1), units)
    local = cluster_address(target.spec.cluster.address) == "local"
    if local and gpus and min(wanted, units) > gpus:
        raise InputError(
            "scale.workers", seen=str(wanted), expected=f"at most {gpus}, one for each GPU",
            remedy=f"use fewer, or scale.mode=cpu; available: {inventory.describe()}",
        )  # fmt: skip
    return min(wanted, units)


def _threads(target: Target, inventory: Inventory, workers: int) -> int:
    wanted = target.spec.scale.threads
    return wanted if isinstance(wanted, int) else max(1, inventory.cpus // workers)


def _batch_size(target: Target) -> int:
    return GENERATED_ROWS if _generates(target) else PLAIN_ROWS


def _generates(target: Target) -> bool:
    """Whether the answers are texts of many tokens, as far as is known before the model is loaded."""
    return "vocab_size" in target.model.facts or target.model.tokenizer is not None


def _print_plan(planned: _Planned, console: Console) -> None:
    size, model = planned.units[0].rows, planned.target.model
    where = "this process" if planned.workers == 1 else f"{planned.workers} workers"
    for name, value in (
        ("model", f"{planned.target.name}, {model.dtype} on {model.device.split(':')[0]}"),
        ("input", f"{planned.rows.rows:,} rows in {len(planned.units):,} units of {size:,}"),
        ("batch", f"{planned.batch_size} rows"),
        ("workers", f"{where} with {planned.threads} threads each"),
        ("output", planned.output.path),
    ):
        console.print(f"{name}: {value}", markup=False, soft_wrap=True)


# ---------------------------------------------------------------- run


def _run(planned: _Planned, *, verbose: bool, console: Console) -> InferResult:
    output, units, work = planned.output, planned.units, planned.work()
    store = open_store(output.path)
    if store.exists(MANIFEST):
        console.print(f"{output.path} is complete; nothing is left to compute", markup=False, soft_wrap=True)
        about = json.loads(store.read_bytes(MANIFEST))
        return InferResult("done", output.path, about["rows"], about["failed"], json.loads(store.read_bytes(SUMMARY)))
    finished = output.finished(units)
    missing = [unit for unit in units if unit.number not in finished]
    earlier = planned.rows.rows - sum(unit.rows for unit in missing)
    failed, reports = sum(finished.values()), []
    began = shown = time.time()
    try:
        for report in _reports(planned, work, missing, verbose=verbose):
            reports.append(report)
            failed += report.failed
            if failed > work.most_failed:
                return _too_many(planned, failed, report.error, console)
            if time.time() - shown >= SHOWN_EVERY_S:
                shown = time.time()
                _progress(planned, reports, earlier, began, console)
    except KeyboardInterrupt:
        console.print(f"what is complete is kept: --resume {output.path} continues", markup=False, soft_wrap=True)
        raise
    return _merged(planned, reports, console)


def _reports(planned: _Planned, work: Work, missing: Sequence[Unit], *, verbose: bool) -> Iterator[UnitReport]:
    address = cluster_address(planned.target.spec.cluster.address)
    if not missing:
        return
    if planned.workers == 1 and address == "local":
        worker = InferenceWorker(work, "this process")
        yield from map(worker.run, missing)
        return
    from raytrain.infer.ray_data import run_units

    if work.model.device.startswith("cuda"):
        if address == "local":
            show_only_picked(planned.target.spec.scale.accelerator or "cuda", local_inventory())
        work = replace(work, model=replace(work.model, device="cuda:0"))  # Ray shows each actor its own GPU alone
    gpus = 1 if work.model.device.startswith("cuda") else 0
    workers = planned.workers
    with connected(address, num_cpus=workers + 1, num_gpus=workers * gpus, verbose=verbose) as cluster:
        at_once = workers if cluster.local else 1
        yield from run_units(work, missing, workers=workers, at_once=at_once, cpus=1, gpus=gpus)


def _progress(planned: _Planned, reports: Sequence[UnitReport], earlier: int, began: float, console: Console) -> None:
    done = sum(report.rows for report in reports)
    rate = done / max(time.time() - began, 1e-9)
    left = max(planned.rows.rows - earlier - done, 0) / max(rate, 1e-9)
    rows = f"{earlier + done:,} of {planned.rows.rows:,} rows"
    console.print(f"{rows}, {rate:,.1f} rows/s, about {left:,.0f} s left", markup=False, highlight=False)


def _too_many(planned: _Planned, failed: int, error: str | None, console: Console) -> InferResult:
    share = planned.target.spec.infer.max_failures
    reason = f"; the last error: {error}" if error else ""
    console.print(
        f"failed: at least {failed:,} of {planned.rows.rows:,} rows failed, infer.max_failures allows {share:g}"
        f"{reason}. What is complete is kept: {planned.output.path}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    return InferResult("failed", planned.output.path, planned.rows.rows, failed, {})


def _merged(planned: _Planned, reports: Sequence[UnitReport], console: Console) -> InferResult:
    output, infer = planned.output, planned.target.spec.infer
    about = merge(output, planned.units, kind=infer.format)
    wall = max((report.end for report in reports), default=0) - min((report.begin for report in reports), default=0)
    summary = summarise(output, planned.units, reports, wall_s=wall, label=infer.label)
    store = open_store(output.path)
    store.write_bytes(SUMMARY, json.dumps(summary, indent=1).encode())
    store.write_bytes(MANIFEST, json.dumps({**about, "job": planned.identity}, indent=1).encode())
    remove_parts(output)
    _print_summary(planned, infer, about, summary, console)
    return InferResult("done", output.path, about["rows"], about["failed"], summary)


def _print_summary(
    planned: _Planned, infer: InferConfig, about: dict[str, Any], summary: dict[str, Any], console: Console
) -> None:
    rate = summary["rows_per_s"]
    tokens = f", {summary['tokens_per_s']:,.0f} tokens/s" if summary["tokens_per_s"] else ""
    speed = f", {rate:,.1f} rows/s{tokens}" if rate else ""
    lines = [f"done: {about['rows']:,} rows, {about['failed']:,} failed{speed}"]
    quality = summary["quality"]
    if quality and quality.get("accuracy") is not None:
        lines.append(f"accuracy {quality['accuracy']:.4f}, F1 {quality['f1']:.4f} (mean over classes)")
    lines.append(f"predictions {join(planned.output.path, f'predictions.{infer.format}')}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
