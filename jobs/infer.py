"""The verb `infer`, and the function `infer` for Python: batch inference over files of rows.

The order: find the model -> open the input -> divide it into units -> compute them here or on a cluster -> merge.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.devices.inventory import Inventory, inventory_from_ray, local_inventory
from cluster.environment import restored_environment
from cluster.ray_runtime import private_folder
from cluster.telemetry.processes import limit_memory
from jobs.driver.printing import print_line
from jobs.driver.runtime import connected
from jobs.inference.compute import InferenceDisplay, InferResult, UnitComputation, print_plan, print_summary
from jobs.inference.plan import InferencePlan, plan_inference
from jobs.inference.target import Target, open_target
from jobs.job.facts import absolute_path, path_from_here
from raytrain.config.user_code import make_importable
from raytrain.errors import InputError, RunError
from raytrain.infer.input import Unit, UnitReport, input_files
from raytrain.infer.output import MANIFEST, OutputFolder, merge, remove_work
from raytrain.infer.summary import TableFigures, summarise
from raytrain.report.inference import SUMMARY, build_inference_report
from raytrain.runs.folder import resume_command
from raytrain.runs.storage import typed_path

__all__ = ["InferResult", "infer"]


def infer(
    target: str | Path | None = None,
    *,
    input: Any = None,
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
        input: the rows: a path, URI or list of them (`infer.input`), a Ray Dataset or an Arrow table.
        output, workers: short for `infer.output` and `scale.workers`.
        overrides: `section.key=value` strings, as on the command line.
        resume: the output folder of an interrupted command.
        quiet: print nothing.

    Raises:
        InputError: the input is wrong; nothing was computed.
        RunError: more rows failed than `infer.max_failures` allows.

    Example:
        >>> import pyarrow as pa
        >>> from jobs.infer import infer
        >>> rows = pa.table({"x0": [0.1, 2.0], "x1": [1.5, -0.3], "x2": [0.0, 0.4]})
        >>> answers = infer("runs/latest", input=rows, overrides=["infer.keep=[x0]"], quiet=True)
        >>> answers.table().column_names
        ['id', 'x0', 'prediction', 'status', 'error']
    """
    named = isinstance(input, str | Path | list | tuple)
    paths = [str(one) for one in ([input] if isinstance(input, str | Path) else input)] if named else None
    given = {"infer.input": None if paths is None else json.dumps(paths), "infer.output": output}
    given["scale.workers"] = None if workers is None else str(workers)
    changes = [*overrides, *(f"{key}={value}" for key, value in given.items() if value is not None)]
    console = Console(quiet=quiet, highlight=False)
    name = None if target is None else str(target)
    data = None if named else input
    try:
        with restored_environment():
            result = run_infer(name, changes, resume=resume, dry_run=False, verbose=False, console=console, data=data)
    finally:
        limit_memory(None)  # `cluster.memory_limit`, where rows were computed in this process
    assert result is not None
    if result.status == "failed":
        raise RunError(f"{result.failed} of {result.rows} rows failed (output folder: {result.output})")
    return result


def run_infer(
    given: str | None, overrides: Sequence[str], *, resume: str | None, dry_run: bool, verbose: bool, console: Console,
    data: Any = None,
) -> InferResult | None:  # fmt: skip
    """Plan and run an inference job; None for a dry run, which only prints the plan. `data`: the rows, as a Ray
    Dataset or an Arrow table, instead of `infer.input`."""
    if resume is not None:
        resume = typed_path(resume, key="--resume")
    if resume is not None and given is None:
        command = OutputFolder(absolute_path(resume)).command()
        if command is None and not overrides:
            raise InputError(
                "--resume", got=f"{resume}, where no command has said what it computes",
                expected="the output folder of an interrupted infer", remedy="repeat that command with --resume",
            )  # fmt: skip
        if command is not None:
            make_importable(command["folder"])
            given, overrides = command["model"], [*command["overrides"], *overrides]
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as NVML counts GPUs, by which a device is chosen
    inventory = local_inventory()
    target = open_target(given, overrides, inventory)
    more: Any = {"resume": resume, "dry_run": dry_run, "verbose": verbose, "console": console, "data": data}
    rows = target.spec.infer.input
    paths = [absolute_path(one) for one in ([rows] if isinstance(rows, str) else rows or [])]
    kept = [one for one in overrides if one.partition("=")[0] not in ("infer.input", "infer.output")]
    model = target.run.path if target.run is not None else given
    model = os.path.abspath(model) if model is not None and os.path.exists(model) else model
    # what `--resume DIR` alone needs to repeat this command in any folder
    more["command"] = {
        "model": model, "overrides": [*kept, f"infer.input={json.dumps(paths)}"], "folder": os.getcwd(),
    }  # fmt: skip
    if target.address == "local":
        return infer_target(target, inventory, **more)
    with connected(target.address, num_cpus=0, num_gpus=0, verbose=verbose):
        inventory = inventory_from_ray(local=inventory)
        return infer_target(target.on(inventory), inventory, **more)


def infer_target(
    target: Target, inventory: Inventory, *, resume: str | None, dry_run: bool, verbose: bool, console: Console,
    data: Any = None, command: dict[str, Any] | None = None,
) -> InferResult | None:  # fmt: skip
    """Run an inference job with a model that was found; arguments as for `run_infer`. `command`: what a resumed
    command repeats."""
    if dry_run:
        with private_folder() as scratch:
            print_plan(plan_inference(target, inventory, resume=resume, data=data, scratch=scratch), console)
        return None
    planned = plan_inference(target, inventory, resume=resume, data=data)
    print_plan(planned, console)
    planned.output.check_same(planned.identity)
    output, store = planned.output, planned.output.store
    if store.exists(MANIFEST):  # an earlier command was not interrupted
        print_line(console, f"{path_from_here(output.path)} is complete; nothing is left to compute")
        remove_work(output)
        about, summary = (json.loads(store.read_bytes(name)) for name in (MANIFEST, SUMMARY))
        return InferResult("done", output.path, about["rows"], about["failed"], summary)
    finished = planned.output.finished(planned.units, planned.job)
    missing = [unit for unit in planned.units if unit.number not in finished]
    try:
        computation = UnitComputation(planned, verbose=verbose) if missing else None
        with planned.output.claimed(planned.identity, command):
            found = _computed(planned, computation, missing, sum(finished.values()), console)
            return found if isinstance(found, InferResult) else _merged(planned, found, console)
    except BaseException:
        if output.identity() is None or not output.has_parts():
            output.forget()
        else:
            again = resume_command("infer", path_from_here(output.path))
            print_line(console, f"what is complete is kept: `{again}` continues")
        raise


def _computed(
    planned: InferencePlan, computation: UnitComputation | None, missing: Sequence[Unit], failed: int, console: Console
) -> list[UnitReport] | InferResult:
    """Compute the missing units; `failed` rows failed in those of an earlier command."""
    reports = list[UnitReport]()
    if computation is None:
        return reports
    earlier = planned.rows.rows - sum(unit.rows for unit in missing)
    with InferenceDisplay(
        console, rows=planned.rows.rows, earlier=earlier, in_progress=computation.in_progress,
        beat=planned.output.beat, missing=lambda: computation.missing(),
    ) as display:  # fmt: skip
        for report in computation.reports(missing):
            reports.append(report)
            failed += report.failed
            if failed > planned.most_failed:
                break
            display.complete(report.number, report.rows)
        else:
            return reports
    share, path = planned.target.spec.infer.max_failures, planned.output.path
    reason = f"; the last error, of {reports[-1].error}" if reports[-1].error else ""
    print_line(
        console,
        f"failed: at least {failed:,} of {planned.rows.rows:,} rows failed, infer.max_failures allows {share:g}"
        f"{reason}. A higher infer.max_failures records such rows as failed and goes on. What is complete is kept: "
        f"{path_from_here(path)}",
    )
    return InferResult("failed", path, planned.rows.rows, failed, {})


def _merged(planned: InferencePlan, reports: Sequence[UnitReport], console: Console) -> InferResult:
    output, infer, split = planned.output, planned.target.spec.infer, planned.stages.split
    planned.check_unchanged()
    carried = infer.label in {*infer.keep, infer.id_column} and bool(planned.paths)
    as_csv = carried and input_files(planned.paths).kind == "csv"
    figures = TableFigures(infer.label, as_csv=as_csv, known=planned.target.model.classes())
    about = merge(output, planned.units, kind=infer.format, job=planned.job, read=figures.add)
    wall = max((report.end for report in reports), default=0) - min((report.begin for report in reports), default=0)
    summary = summarise(figures.figures(), reports, wall_s=wall, split=split)
    output.store.write_bytes(SUMMARY, json.dumps(summary, indent=1).encode())
    stages: dict[str, Any] | None = None  # what each stage of a divided model holds, and by what they are balanced
    if split is not None:
        held = [split.plan.describe(stage) for stage in range(split.plan.stages)]
        stages = {"stages": held, "balance": split.balance}
    manifest = {**about, "stages": stages, "job": planned.identity}
    output.store.write_bytes(MANIFEST, json.dumps(manifest, indent=1).encode())
    build_inference_report(output.path)
    remove_work(output)
    print_summary(planned, infer, about, summary, console)
    return InferResult("done", output.path, about["rows"], about["failed"], summary)
