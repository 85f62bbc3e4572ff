"""The verb `plan`, and the function `plan` for Python: what a job would do, with reasons. Neither starts Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.driver.plan_table import job_text, print_plan
from jobs.driver.planning import plan_job
from jobs.job.spec import LoadedSpec, load_spec, refuse_later
from jobs.torchrun import print_commands
from raytrain.errors import InputError
from raytrain.plan.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["plan"]


def plan(
    job: Mapping[str, Any] | str | Path | None = None,
    *,
    overrides: Sequence[str] = (),
    inventory: str | Path | None = None,
    build: bool = False,
) -> Plan:
    """Return what `train` would do with a job, each choice with its value and reason; starts nothing.

    Args:
        job: the job as a mapping, the path of a JOB.yaml, or the name of a recipe; None is the recipe `default`.
        overrides: `section.key=value` strings, as on the command line.
        inventory: a file of machines to plan for instead of this one, as for `raytrain plan --inventory`.
        build: import torch, open the data and build the model to determine their exact sizes.

    Raises:
        InputError: the job or its files are wrong, or the machines do not fit the job.

    Example:
        >>> from jobs.plan import plan
        >>> job = {
        ...     "model": {"builder": "raytrain.models.mlp:mlp", "hidden": [16]},
        ...     "data": {"source": "csv", "path": "rows.csv", "label": "y"},
        ... }
        >>> planned = plan(job, overrides=["loop.global_batch_size=8", "scale.workers=2", "scale.mode=cpu"])
        >>> planned.micro_batch_size.value, planned.workers.value
        (4, 2)
        >>> planned.workers.reason
        'scale.workers'
    """
    mapping = job if isinstance(job, Mapping) else None
    path = None if mapping is not None or job is None else Path(str(job))
    return _planned(load_spec(path, overrides, mapping=mapping), inventory_file=inventory, build=build)


def _planned(loaded: LoadedSpec, *, inventory_file: str | Path | None, build: bool) -> Plan:
    refuse_later(loaded.spec, "plan")
    if loaded.spec.tune.space is not None:
        from jobs.tuning.space_points import checked_space

        checked_space(loaded)
    inventory = None
    if inventory_file is not None:
        from jobs.job.facts import inventory_from_file

        inventory = inventory_from_file(inventory_file)
    return plan_job(loaded, inventory=inventory, build=build)


def plan_verb(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    *,
    as_json: bool = False,
    inventory_file: str | Path | None = None,
    build: bool = False,
    full: bool = False,
    as_text: str | None = None,
    console: Console | None = None,
    **torchrun: Any,
) -> int:
    """Print the plan of a job as a table or as JSON, and return the exit code 0."""
    loaded = load_spec(path, overrides)
    refuse_later(loaded.spec, "plan")
    if as_text == "torchrun":
        print_commands(torchrun, [*([] if path is None else [str(path)]), *overrides], loaded.spec)
        return 0
    for name, value in torchrun.items():
        if value is not None:
            expected = "--print torchrun with it, which prints a command for each node"
            raise InputError(f"--{name}", got=str(value), expected=expected)
    planned = _planned(loaded, inventory_file=inventory_file, build=build)
    if as_text == "yaml":
        print(job_text(planned), end="")
    elif as_json:
        print(json.dumps(planned.to_json(), indent=2))
    else:
        from rich.console import Console

        print_plan(planned, console or Console(highlight=False), full=full)
    return 0
