"""The arguments of a verb, a job and keys, and their completion in a shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from raytrain.errors import InputError

ALL = (
    "name", "seed", "model", "data", "optim", "precision", "loop", "save", "scale", "retry", "experts",
    "telemetry", "cluster",
)  # fmt: skip
"""The sections of a job that every verb with a job reads."""


def split_arguments(arguments: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """Split a verb's arguments into (JOB.yaml or recipe name or None, `section.key=value` overrides).

    Raises:
        InputError: there are two files, or a key has no value.
    """
    keys = [item for item in arguments if "=" in item and "/" not in item.partition("=")[0]]
    files = [item for item in arguments if item not in keys]
    for item in files:
        path = Path(item)
        if item.split(".")[0] in ("tune", *ALL) and path.suffix not in (".yaml", ".yml") and not path.exists():
            raise InputError(item, got="a key without a value", expected=f"{item}=VALUE")
    if len(files) > 1:
        raise InputError("arguments", got=" ".join(files), expected="at most one JOB.yaml; keys as section.key=value")
    return (Path(files[0]) if files else None), keys


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
    """Recipes, keys and files, for the completion of a shell."""
    from click.shell_completion import CompletionItem

    from jobs.job.job_file import recipe_names
    from jobs.job.spec import JobSpec
    from raytrain.config.messages import key_rows

    words = [f"{row.key}=" for row in key_rows(JobSpec)] + recipe_names()
    found = [CompletionItem(word) for word in words if word.startswith(incomplete)]
    # click's script for bash forgets what came before a file
    return found if "=" in incomplete else [CompletionItem(incomplete, type="file"), *found]


def complete_key(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Sections and keys of a job, for the completion of a shell."""
    from jobs.job.spec import JobSpec
    from raytrain.config.messages import key_rows

    rows = [row.key for row in key_rows(JobSpec)]
    return [
        name for name in dict.fromkeys([*(key.split(".")[0] for key in rows), *rows]) if name.startswith(incomplete)
    ]
