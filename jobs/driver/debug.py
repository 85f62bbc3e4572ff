"""`train --debug`: the worker of a run in the command's own process, where a debugger has the terminal."""

from __future__ import annotations

from typing import Any

from cluster.devices.inventory import local_inventory
from cluster.preflight import is_submitted
from cluster.telemetry.processes import limit_memory
from jobs.driver.planning import show_only_picked
from jobs.driver.printing import print_line
from jobs.driver.progress import TRAINING, figures
from jobs.driver.run_folder import OpenRun, RunPlanner
from jobs.driver.signals import StopSignals
from raytrain.config.user_code import users_place
from raytrain.errors import InputError, RaytrainError, first_line
from raytrain.execution.driver_channel import AttemptResult, OwnProcess

#: Keys that `--debug` sets: what a user's code does happens in one thread of one process, and is not compiled.
ONE_PROCESS = ("scale.workers=1", "experts.hosts=0", "data.loader_workers=0", "loop.compile=off")


def refuse_without_terminal() -> None:
    """Raises InputError in a submitted job, whose processes have no terminal."""
    if is_submitted():
        raise InputError("--debug", got="in a submitted job", expected="a command of its own on this machine")


def debugged(planner: RunPlanner, signals: StopSignals) -> tuple[OpenRun, AttemptResult]:
    """Train in this process; returns the run folder and how it ended. A failure is not tried again.

    Args:
        signals: the first one saves and stops the run as usual, unless the debugger has taken Ctrl-C for itself.
    """
    inventory = local_inventory()
    opened = planner.open(inventory)
    show_only_picked(str(opened.plan.choices()["accelerator"].value_or("cpu")), inventory)
    from jobs.driver.check_job import train_job  # imports torch
    from raytrain.execution.worker import Worker
    from raytrain.train.parallel.collectives import Workers

    def show(progress: dict[str, Any]) -> None:
        row = progress.get("row") or {}
        if row.get("kind") == "train" and progress.get("phase") is None:  # an evaluation is printed by itself
            line = f"step {row['step']}/{opened.plan.max_steps.value_or('?')}  {figures(row)}"
            print_line(planner.console, line)

    job = train_job(planner.spec, opened.plan, opened.run, attempt=opened.attempt)
    worker = Worker(job, workers=Workers(), local_rank=0, channel=OwnProcess(signals.asked, show))
    signals.training = True
    planner.phases.begin(TRAINING)
    try:
        result = worker.run(planner.checked.handed)
        assert result is not None  # rank 0 returns one
    except (Exception, SystemExit) as error:  # the worker has printed and recorded it
        why = str(error) if isinstance(error, RaytrainError) else f"{type(error).__name__}: {first_line(error)}"
        place = users_place(error)
        result = AttemptResult("failed", f"{why} ({place})" if place else why, steps=worker.committed())
    finally:
        limit_memory(None)  # `cluster.memory_limit`, for a program that goes on
    return opened, result
