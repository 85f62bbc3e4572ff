"""The verb `train`, and the function `train` for Python.

The order: load the job -> check it on the driver -> inventory -> plan -> run folder -> Ray -> watched fit -> result ->
report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.environment import restored_environment
from cluster.preflight import is_submitted
from jobs.driver.attempts import RunAttempts, debugged
from jobs.driver.printing import print_line
from jobs.driver.progress import Activity, Phases
from jobs.driver.result import Result, close_run, command_start, result_of
from jobs.driver.run_folder import Resumed, RunPlanner, check_checkpoints, newest_unfinished, open_resumed
from jobs.driver.signals import StopSignals
from jobs.job.facts import path_from_here, resolved
from jobs.job.spec import LoadedSpec, load_spec, refuse_later
from raytrain.errors import InputError, RunError

__all__ = ["Result", "train"]

#: Keys that `--debug` sets: what a user's code does happens in one thread of one process, and is not compiled.
ONE_PROCESS = ("scale.workers=1", "experts.hosts=0", "data.loader_workers=0", "loop.compile=off")


def train(
    job: Mapping[str, Any] | str | Path | None = None,
    *,
    workers: int | str | None = None,
    overrides: Sequence[str] = (),
    resume: str | None = None,
    verbose: bool = False,
    quiet: bool = False,
    debug: bool = False,
) -> Result:
    """Train a job from Python, in a script or a notebook.

    Args:
        job: the job as a mapping (with objects allowed as `model.module`, `data.train`, `data.eval`), the path of a
            JOB.yaml, or the name of a recipe; None is the recipe `default`.
        workers: short for `scale.workers`.
        overrides: `section.key=value` strings, as on the command line.
        resume: the run folder to resume, or "auto".
        verbose, quiet: show Ray's own messages; print nothing.
        debug: train in this process, so that `breakpoint()` and debuggers stop in the user's code. Ray starts only to
            write the Ray Datasets of a data source.

    Returns:
        How the run ended. After a KeyboardInterrupt (Ctrl-C, the Stop button of a notebook) the workers save, `status`
        is "interrupted", and the program goes on: end a loop of trainings there. A second one does not wait.

    Raises:
        InputError: the input is wrong; nothing was started.
        RunError: the run failed; its folder holds the report.

    Example:
        >>> import torch
        >>> from jobs.train import train
        >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> rows = {"x": x, "labels": x.argmax(1)}
        >>> job = {
        ...     "model": {"builder": "raytrain.models.mlp:mlp", "hidden": [16]},
        ...     "data": {"train": {name: values[:160] for name, values in rows.items()},
        ...              "eval": {name: values[160:] for name, values in rows.items()}},
        ...     "optim": {"lr": 0.01}, "loop": {"max_steps": 20},
        ... }
        >>> result = train(job, workers=1, quiet=True)
        >>> result.status, result.steps
        ('done', 20)
        >>> losses = [row["loss"] for row in result.history if row["kind"] == "train"]
        >>> losses[-1] < losses[0]
        True

        A run goes on from its last checkpoint; objects of the job are given again:

        >>> more = train(job, resume=result.run, overrides=["loop.max_steps=30"], quiet=True)
        >>> more.run == result.run, more.steps
        (True, 30)
    """
    changes = [*overrides, *([] if workers is None else [f"scale.workers={workers}"])]
    mapping = job if isinstance(job, Mapping) else None
    path = None if mapping is not None or job is None else Path(str(job))
    console = Console(quiet=quiet, highlight=False)
    with restored_environment():
        result = run_train(path, changes, mapping=mapping, resume=resume, verbose=verbose, debug=debug, console=console)
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
    debug: bool = False,
    console: Console,
) -> Result:
    """Load a job, or the run to resume, and train it; with `debug` in this process."""
    began = time.time()
    if debug:
        if is_submitted():
            raise InputError("--debug", got="in a submitted job", expected="a command of its own on this machine")
        overrides = [*overrides, *ONE_PROCESS]
    signals = StopSignals()
    signals.install()
    try:
        resumed = None
        if resume is not None and resume != "auto":
            resumed = open_resumed(resume, path, overrides, mapping=mapping)
            if resumed.finished:
                run = resumed.run
                print_line(console, f"{path_from_here(run.path)} is done; nothing is left to train")
                return result_of(run, run.read_json(run.result))
            resumed = check_checkpoints(resumed)
        loaded = resumed.loaded if resumed else load_spec(path, overrides, mapping=mapping)
        refuse_later(loaded.spec, "train")
        if resume == "auto":
            resumed = _unfinished(loaded, console)
        more: Any = {"signals": signals, "verbose": verbose, "debug": debug, "console": console, "began": began}
        return train_loaded(loaded, resumed=resumed, **more)
    finally:
        signals.restore()


def _unfinished(loaded: LoadedSpec, console: Console) -> Resumed | None:
    """The run that `--resume auto` continues, and a line about it; None starts a new one."""
    resumed = newest_unfinished(loaded)
    found = "no unfinished run of this job: starting a new one"
    if resumed is not None:
        found = f"resuming {path_from_here(resumed.run.path)}"
        try:
            resumed = check_checkpoints(resumed)
        except InputError as error:  # it stays as it is
            resumed, found = None, f"not resumed: {error.got}; starting a new run"
    print_line(console, found)
    return resumed


def train_loaded(
    loaded: LoadedSpec, *, resumed: Resumed | None, signals: StopSignals, verbose: bool, console: Console, began: float,
    debug: bool = False,
) -> Result:  # fmt: skip
    """Train a loaded job: everything from the checks on the driver to the report.

    Args:
        resumed: the run to resume; None starts a new one.
        signals: stops the run.
        began: when the command started, in unix seconds.
        debug: train in this process.

    Raises:
        InputError: the job or the machines are wrong; no run folder was made.
        Interrupted: a signal arrived before the run folder was made.
    """
    began = command_start(began)
    phases = Phases(began=began)
    with Activity(console, phases=phases) as activity:
        activity.begin("checking the job: opening the data and building the model")
        from jobs.driver.check_job import check_on_driver  # imports torch, which takes seconds

        spec = resolved(loaded.spec)
        loads = resumed.run if resumed is not None and resumed.run.saved_steps() else None
        checked = check_on_driver(spec, resumed=loads, run_batch=not debug)
    if checked.note is not None:
        print_line(console, checked.note)

    planner = RunPlanner(
        loaded, spec, checked, resumed=resumed, began=began, phases=phases, console=console, verbose=verbose
    )
    if debug:
        opened, result = debugged(planner, signals)
        return close_run(opened.run, result, console=console, phases=phases)
    attempts = RunAttempts(planner, signals)
    attempts.run()
    assert attempts.opened is not None
    return attempts.closed or close_run(attempts.opened.run, attempts.result, console=console, phases=phases)
