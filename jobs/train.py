"""The verb `train`, and its Python door. Reads like the story it tells:

spec -> checks on the driver -> machines -> plan -> run folder -> Ray -> fit -> result -> report
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jobs.driver.command import Result, TrainCommand, result_of
from jobs.driver.resume import open_resumed
from jobs.driver.runtime import StopSignals
from jobs.job.spec import load_spec, refuse_later
from raytrain.errors import RunError
from raytrain.runs.folder import RunFolder

__all__ = ["Result", "run_train", "train"]


def train(
    job: Mapping[str, Any] | str | Path | None = None,
    *,
    workers: int | str | None = None,
    overrides: Sequence[str] = (),
    resume: str | None = None,
    verbose: bool = False,
    quiet: bool = False,
) -> Result:
    """Train a job from Python, in a script or a notebook.

    Args:
        job: the YAML as a mapping (objects allowed as `model.module`, `data.train`, `data.eval`), a path to one or
            a recipe's name; None is the recipe `default`.
        workers: short for `scale.workers`.
        overrides: `section.key=value` strings, as on the command line.
        resume: a run folder to go on with, or "auto".

    Raises:
        InputError: the input is wrong; nothing was started.
        RunError: the run failed; its folder holds the report.
    """
    changes = [*overrides, *([] if workers is None else [f"scale.workers={workers}"])]
    mapping = job if isinstance(job, Mapping) else None
    path = None if mapping is not None or job is None else Path(str(job))
    console = Console(quiet=quiet, highlight=False)
    result = run_train(path, changes, mapping=mapping, resume=resume, verbose=verbose, console=console)
    if result.status == "failed":
        raise RunError(f"{result.reason} (run folder: {result.run})")
    return result


def run_train(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    mapping: Mapping[str, Any] | None = None,
    resume: str | None = None,
    verbose: bool = False,
    console: Console,
) -> Result:
    """Everything between the command line and the exit code."""
    began = time.time()
    signals = StopSignals()
    signals.install()
    try:
        resumed = None
        if resume is not None and resume != "auto":
            resumed = open_resumed(resume, path, overrides)
            if resumed is not None and resumed.finished:
                return _finished(resumed.run, console)
        loaded = resumed.loaded if resumed else load_spec(path, overrides, mapping=mapping)
        refuse_later(loaded.spec, "train")
        if resume == "auto":
            resumed = open_resumed("auto", path, overrides, loaded=loaded)
            say = f"going on with {resumed.run.path}" if resumed else "no unfinished run of exactly this job: a new one"
            console.print(say, markup=False, soft_wrap=True)
        return TrainCommand(
            loaded, resumed=resumed, signals=signals, verbose=verbose, console=console, began=began
        ).run()
    finally:
        signals.restore()


def _finished(run: RunFolder, console: Console) -> Result:
    console.print(f"{run.path} is done; nothing is left to train", markup=False, soft_wrap=True)
    return result_of(run, run.read_json(run.result))
