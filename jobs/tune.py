"""The verb `tune`, and the function `tune` for Python. From the command line to the exit code:

job -> checks on the driver -> machines -> what to try -> search folder -> Ray Tune -> decision -> best.yaml and picture
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cluster.devices.inventory import local_inventory
from cluster.environment import restored_environment
from cluster.wording import counted
from jobs.driver.printing import print_command
from jobs.driver.progress import Activity
from jobs.driver.runtime import cluster_address
from jobs.driver.signals import Interrupted, StopSignals
from jobs.job.facts import path_from_here
from jobs.job.spec import LoadedSpec, load_spec, refuse_later
from raytrain.errors import InputError, RunError
from raytrain.runs.folder import RunFolder, SweepFolder, resume_command, shell_command
from raytrain.runs.storage import typed_path

if TYPE_CHECKING:
    from jobs.tuning.driver import TuneCommand

__all__ = ["TuneResult", "tune"]

CHECKING = "checking the job: opening the data and building the model"


@dataclass(frozen=True)
class TuneResult:
    """How a search ended.

    Attributes:
        folder: path of the search folder.
        status: "done" or "interrupted".
        best: path of best.yaml, a job for `train`; None unless done.

    Example:
        >>> from pathlib import Path
        >>> from jobs.tune import tune
        >>> newest = max(Path("runs").glob("run-tune-*"))
        >>> found = tune(resume=str(newest), quiet=True)  # a search that is done starts nothing
        >>> found.status, Path(found.folder).name == newest.name, Path(found.best).name
        ('done', True, 'best.yaml')
    """

    folder: str
    status: str
    best: str | None


def tune(
    job: Mapping[str, Any] | str | Path | None = None, *, overrides: Sequence[str] = (), resume: str | None = None,
    verbose: bool = False, quiet: bool = False,
) -> TuneResult:  # fmt: skip
    """Search for the fastest batch size and precision of a job, or for the best values of `tune.space`.

    Args:
        job: the job as a mapping, the path of a JOB.yaml, or the name of a recipe; None is the recipe `default`. The
            trials are processes that read it from the search folder, so it holds names instead of Python objects.
        overrides: `section.key=value` strings, as on the command line.
        resume: the search folder to resume; nothing else may be given with it.
        verbose: show Ray's own messages.
        quiet: print nothing.

    Raises:
        InputError: the input is wrong; nothing was started.
        RunError: no trial succeeded, or Ray gave up; the folder keeps what was measured.

    Example:
        >>> from jobs.plan import plan
        >>> from jobs.tune import tune
        >>> job = {
        ...     "model": {"builder": "raytrain.models.mlp:mlp"},
        ...     "data": {"source": "csv", "path": "rows.csv", "label": "y"},
        ...     "loop": {"max_steps": 2},
        ... }
        >>> found = tune(job, overrides=["tune.space={optim.lr: [0.001, 0.01]}"], quiet=True)
        >>> plan(found.best).lr.value in (0.001, 0.01)  # `train(found.best)` trains with it
        True
    """
    mapping = job if isinstance(job, Mapping) else None
    path = None if mapping is not None or job is None else Path(str(job))
    console = Console(quiet=quiet, highlight=False)
    with restored_environment():
        return run_tune(path, overrides, mapping=mapping, resume=resume, verbose=verbose, console=console)


def run_tune(
    path: Path | None, overrides: Sequence[str] = (), *, mapping: Mapping[str, Any] | None = None,
    resume: str | None = None, verbose: bool = False, console: Console,
) -> TuneResult:  # fmt: skip
    """Everything between the command line and the exit code: `tune` of the job's `path` (None: the built-in recipe) or
    `mapping`."""
    signals = StopSignals()
    signals.install()
    command: TuneCommand | None = None
    activity = Activity(console)
    try:
        with activity:
            sweep = None
            if resume is None:
                activity.begin(CHECKING)
                loaded = load_spec(path, overrides, mapping=mapping)
                _refuse_objects(loaded)
            else:
                sweep, loaded = open_sweep(resume, path, overrides, mapping=mapping)
                if sweep.exists(sweep.outcome) and not sweep.again():
                    done = f"{path_from_here(sweep.path)} is done; its result is {path_from_here(sweep.best)}"
                    console.print(done, markup=False, soft_wrap=True)
                    return TuneResult(sweep.path, "done", sweep.best)
                activity.begin(CHECKING)
            refuse_later(loaded.spec, "tune")
            from jobs.tuning.batch import BatchCommand
            from jobs.tuning.space import SpaceCommand

            kind = BatchCommand if loaded.spec.tune.space is None else SpaceCommand
            command = kind(loaded, sweep=sweep, signals=signals, verbose=verbose, console=console, activity=activity)
            return _run(command)
    finally:
        signals.restore()
        if command is not None:
            command.close()


def _run(command: TuneCommand) -> TuneResult:
    """Check the job, search, and say how to go on with a search that ended early."""
    from jobs.driver.check_job import check_on_driver  # imports torch

    try:
        address = cluster_address(command.spec.cluster.address)
        checked = check_on_driver(command.spec)
        if checked.note is not None:
            command.print_line(checked.note)
        folder = command.run(checked, address=address, inventory=local_inventory())
        return TuneResult(folder.path, "done", folder.best)
    except KeyboardInterrupt as error:  # `Interrupted` is one
        if command.sweep is None:
            raise Interrupted("before the search folder was created") from error
        command.activity.begin("")
        ended = counted(len({row["trial"] for row in command.sweep.ended()}), "trial")
        again = resume_command("tune", path_from_here(command.sweep.path))
        print_command(command.console, f"interrupted after {ended}; resume with: ", again)
        return TuneResult(command.sweep.path, "interrupted", None)
    except RunError as error:
        if command.sweep is None or not command.sweep.again():
            raise
        again = resume_command("tune", path_from_here(command.sweep.path))
        raise RunError(f"{error}; to repeat the trials whose process died: {again}") from error


def _refuse_objects(loaded: LoadedSpec) -> None:
    """Refuse a job with Python objects: trials read it from a file. Raises InputError: names the key of the object."""
    spec = loaded.spec
    collate = None if isinstance(spec.data.collate, str) else spec.data.collate
    objects = {"model.module": spec.model.module, "data.train": spec.data.train, "data.eval": spec.data.eval}
    for key, value in (objects | {"data.collate": collate}).items():
        if value is not None:
            raise InputError(
                key, got=f"a {type(value).__name__} object", expected="a name such as module:function",
                remedy="trials are other processes, which import what the job names (model.builder, data.source)",
            )  # fmt: skip


def open_sweep(
    resume: str, path: Path | None, overrides: Sequence[str], *, mapping: Mapping[str, Any] | None = None
) -> tuple[SweepFolder, LoadedSpec]:
    """Open the search to resume and load its own job. Raises InputError: there is no such search, it is still running
    (names host and pid), or something else is given."""

    def refused(got: str, expected: str, remedy: str = "") -> InputError:
        return InputError("--resume", got=got, expected=expected, remedy=remedy)

    if path is not None or mapping is not None or overrides:
        given = str(path) if path is not None else "a job" if mapping is not None else overrides[0]
        remedy = "a resumed search uses the job it was started with"
        raise refused(f"{given} as well", "only the search folder", remedy)
    try:
        sweep = SweepFolder(RunFolder.open(resume).path)
    except InputError as error:
        raise refused(error.got, "a search folder") from error
    if not sweep.exists(sweep.job_mapping) or sweep.exists(sweep.metrics):
        remedy = "to resume a run: raytrain train --resume"
        raise refused(f"{resume}, which is not a search folder", "a folder that raytrain tune created", remedy)
    if alive := sweep.alive():
        seen = f"{path_from_here(sweep.path)}, which is still running with pid {alive['pid']} on {alive['host']}"
        raise refused(seen, "a search that has ended", "stop it first, or wait")
    return sweep, load_spec(mapping=sweep.recorded_job())


def found_job(folder: str, *, beside: object = None) -> Path:
    """Return the path of a search's best.yaml. `beside`: a JOB.yaml or a run that was also given. Raises InputError: it
    is not a search folder, the search is not done, or another job is given as well."""
    if beside is not None:
        raise InputError("--from-tune", got=f"{beside} as well", expected="one job")
    folder = typed_path(folder, key="--from-tune")
    best = Path(folder) / "best.yaml"
    if not best.exists():
        unfinished = (Path(folder) / "job.json").exists()
        remedy = f"resume it with: {shell_command('tune', '--resume', folder)}" if unfinished else ""
        expected = "the folder of a finished search"
        raise InputError("--from-tune", got=f"{folder}, which has no best.yaml", expected=expected, remedy=remedy)
    return best
