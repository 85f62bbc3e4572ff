"""The arguments of a verb: a job and keys."""

from __future__ import annotations

from pathlib import Path

from raytrain.errors import InputError


def split_arguments(arguments: tuple[str, ...]) -> tuple[Path | None, list[str]]:
    """Split a verb's arguments into (JOB.yaml or recipe name or None, `section.key=value` overrides)."""
    from jobs.job.spec import JobSpec  # imports pydantic, which takes a moment

    keys = [item for item in arguments if "=" in item and "/" not in item.partition("=")[0]]
    files = [item for item in arguments if item not in keys]
    for item in files:
        path = Path(item)
        if item.split(".")[0] in JobSpec.model_fields and path.suffix not in (".yaml", ".yml") and not path.exists():
            raise InputError(item, got="a key without a value", expected=f"{item}=VALUE")
    if len(files) > 1:
        raise InputError("arguments", got=" ".join(files), expected="at most one JOB.yaml; keys as section.key=value")
    return (Path(files[0]) if files else None), keys
