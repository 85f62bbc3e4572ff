"""The verb `plan`: prints the plan of a job with its reasons. It does not start Ray."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.driver.plan import plan_job
from jobs.driver.screen.plan_table import print_plan
from jobs.driver.screen.plan_yaml import job_text
from jobs.job.spec import load_spec, refuse_later
from jobs.submission.recipe import recipe_of

if TYPE_CHECKING:
    from rich.console import Console


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
    """Print the plan of a job as a table or as JSON, and return the exit code 0.

    Args:
        path: the JOB.yaml, None for the built-in recipe.
        overrides: ``section.key=value`` from the command line.
        inventory_file: machines to plan for instead of this one.
        build: import torch, open the data and build the model to determine their exact sizes.
        full: also list the keys left at their defaults.
        as_text: "yaml" prints a job file in which each `auto` is replaced by what was decided, "torchrun" the commands
            that train the job on several machines.
        torchrun: the options of `TorchrunRecipe` that were given, by name.

    Raises:
        InputError: the job or its files are wrong, or the machines do not fit the job.
    """
    loaded = load_spec(path, overrides)
    refuse_later(loaded.spec, "plan")
    recipe = recipe_of(torchrun, wanted=as_text == "torchrun")
    if recipe is not None:
        recipe.check(loaded.spec)
        print("\n".join(recipe.commands([*([] if path is None else [str(path)]), *overrides])))
        print(*(f"# {line}" for line in recipe.notes()), sep="\n", end="\n" * (recipe.nnodes > 1), file=sys.stderr)
        return 0
    inventory = None
    if inventory_file is not None:
        from jobs.job.nodes_file import inventory_from_file

        inventory = inventory_from_file(inventory_file)
    plan = plan_job(loaded, inventory=inventory, build=build)
    if as_text == "yaml":
        print(job_text(plan), end="")
    elif as_json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        from rich.console import Console

        print_plan(plan, console or Console(highlight=False), full=full)
    return 0
