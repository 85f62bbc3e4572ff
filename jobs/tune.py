"""The verb `tune`, from the command line to the exit code:

job -> checks on the driver -> machines -> what to try -> search folder -> Ray Tune -> decision -> best.yaml and picture
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from cluster.devices.inventory import local_inventory
from jobs.driver.runtime import cluster_address
from jobs.driver.signals import Interrupted, StopSignals
from jobs.job.spec import LoadedSpec, load_spec, refuse_later
from raytrain.errors import InputError, RunError
from raytrain.runs.folder import RunFolder
from raytrain.runs.sweep import SweepFolder

if TYPE_CHECKING:
    from jobs.tuning.command import TuneCommand

__all__ = ["TuneResult", "run_tune"]


@dataclass(frozen=True)
class TuneResult:
    """How a search ended.

    Attributes:
        folder: path of the search folder.
        status: "done" or "interrupted".
        best: path of best.yaml; None unless done.
    """

    folder: str
    status: str
    best: str | None


def run_tune(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    resume: str | None = None,
    fresh: bool = False,
    verbose: bool = False,
    console: Console,
) -> TuneResult:
    """Everything between the command line and the exit code.

    Args:
        path: the JOB.yaml, None for the built-in recipe.
        overrides: `section.key=value` of the command line.
        resume: the search folder to resume; nothing else may be given with it.
        fresh: ignore what earlier searches measured.

    Raises:
        InputError: the input is wrong; nothing was started.
        RunError: no trial succeeded, or Ray gave up; the folder keeps what was measured.
    """
    from jobs.tuning.command import TuneCommand

    signals = StopSignals()
    signals.install()
    try:
        if resume is not None:
            sweep, loaded = open_sweep(resume, path, overrides)
            if sweep.exists(sweep.outcome) and not sweep.again():
                console.print(f"{sweep.path} is done; its result is {sweep.best}", markup=False, soft_wrap=True)
                return TuneResult(sweep.path, "done", sweep.best)
        else:
            sweep, loaded = None, load_spec(path, [*overrides, *(["tune.fresh=true"] if fresh else [])])
        refuse_later(loaded.spec, "tune")
        command = TuneCommand(loaded, sweep=sweep, signals=signals, verbose=verbose, console=console)
        try:
            folder = _run(command)
        except KeyboardInterrupt as error:  # `Interrupted` is one
            if command.sweep is None:
                raise Interrupted("before the search folder was created") from error
            from jobs.tuning.table import counted

            ended = counted(len({row["trial"] for row in command.sweep.ended()}), "trial")
            message = f"interrupted after {ended}; resume with: raytrain tune --resume"
            console.print(f"{message} {command.sweep.path}", markup=False, soft_wrap=True)
            return TuneResult(command.sweep.path, "interrupted", None)
        except RunError as error:
            if command.sweep is None or not command.sweep.again():
                raise
            again = f"raytrain tune --resume {command.sweep.path}"
            raise RunError(f"{error}; to repeat the trials whose process died: {again}") from error
        return TuneResult(folder.path, "done", folder.best)
    finally:
        signals.restore()


def _run(command: TuneCommand) -> SweepFolder:
    """Check the job, plan and run the trials, decide, and write the result. Returns the search folder.

    Raises:
        InputError, RunError, Interrupted.
    """
    from jobs.driver.checks import check_on_driver  # imports torch
    from jobs.tuning.batch.command import run_batch
    from jobs.tuning.space.command import run_space

    address = cluster_address(command.spec.cluster.address)
    checked = check_on_driver(command.spec)
    if checked.note is not None:
        command.print_line(checked.note)
    run = run_batch if command.spec.tune.space is None else run_space
    return run(command, checked, address=address, inventory=local_inventory())


def open_sweep(resume: str, path: Path | None, overrides: Sequence[str]) -> tuple[SweepFolder, LoadedSpec]:
    """Open the search to resume and load its own job.

    Raises:
        InputError: there is no such search, it is still running (names host and pid), or something else is given.
    """
    if path is not None or overrides:
        given = str(path) if path is not None else overrides[0]
        raise InputError(
            "--resume",
            got=f"{given} as well",
            expected="only the search folder",
            remedy="a resumed search uses the job it was started with",
        )
    try:
        run = RunFolder.open(resume)
    except InputError as error:
        raise InputError("--resume", got=error.got, expected="a search folder") from error
    sweep = SweepFolder(run.path)
    if not sweep.exists(sweep.job_mapping) or sweep.exists(sweep.metrics):
        raise InputError(
            "--resume",
            got=f"{resume}, which is not a search folder",
            expected="a folder that raytrain tune created",
            remedy="to resume a run: raytrain train --resume",
        )
    alive = sweep.alive()
    if alive:
        seen = f"{sweep.path}, which is still running with pid {alive['pid']} on {alive['host']}"
        raise InputError("--resume", got=seen, expected="a search that has ended", remedy="stop it first, or wait")
    return sweep, load_spec(mapping=sweep.read_json(sweep.job_mapping))


def found_job(folder: str, *, beside: object = None) -> Path:
    """Return the path of a search's best.yaml.

    Args:
        beside: a JOB.yaml or a run that was also given.

    Raises:
        InputError: it is not a search folder, the search is not done, or another job is given as well.
    """
    if beside is not None:
        raise InputError("--from-tune", got=f"{beside} as well", expected="one job")
    best = Path(folder) / "best.yaml"
    if not best.exists():
        unfinished = (Path(folder) / "job.json").exists()
        remedy = f"resume it with: raytrain tune --resume {folder}" if unfinished else ""
        expected = "the folder of a finished search"
        raise InputError("--from-tune", got=f"{folder}, which has no best.yaml", expected=expected, remedy=remedy)
    return best
