"""Jobs that change another one: `extends: base.yaml`, or the name of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.job.job_file import read_job, recipe_named, recipe_names
from raytrain.config.decode import load_yaml
from raytrain.config.messages import describe, suggestion
from raytrain.errors import InputError
from raytrain.runs.storage import typed_path

EXTENDS = "extends"
"""The key of a job that names another one, whose values it changes."""
#: A key of a job -> the sections that a base must not add to: their other keys are arguments of the one they replace.
REPLACES = {("model", "builder"): ("model", "experts"), ("model", "module"): ("model", "experts"), ("data", "source"):
            ("data",), ("data", "train"): ("data",)}  # fmt: skip


@dataclass(frozen=True)
class ExtendedJob:
    """A job with what it inherits.

    Attributes:
        mapping: all values, without `extends`.
        bases: what it extends, nearest first: (its mapping, "file" or "recipe").
        names: the files of `bases`, or the names of recipes.
    """

    mapping: dict[Any, Any]
    bases: tuple[tuple[dict[Any, Any], str], ...] = ()
    names: tuple[str, ...] = ()


def extended(mapping: Mapping[Any, Any], *, file: Path | None) -> ExtendedJob:
    """A job merged into those that it extends: its values replace theirs key by key, and null takes one back.

    Args:
        file: of the job, which a base is relative to; None: relative to the current folder.

    Raises:
        InputError: a base cannot be read, or the jobs extend each other in a circle.
    """
    own = dict(mapping)
    bases: list[tuple[dict[Any, Any], str]] = []
    names: list[str] = []
    seen = [] if file is None else [str(file.resolve())]
    merged, current = _without(own), own
    while current.get(EXTENDS) is not None:
        base, is_recipe = _located(current[EXTENDS], folder=Path() if file is None else file.parent)
        where = str(base.resolve())
        if where in seen:
            circle = " -> ".join([*seen, where])
            raise InputError(EXTENDS, got=f"a circle: {circle}", expected="jobs of which one extends none")
        seen.append(where)
        current = dict(load_yaml(read_job(base), origin=str(base)))
        bases.append((_without(current), "recipe" if is_recipe else "file"))
        names.append(base.stem if is_recipe else str(base))
        merged, file = _merged(_without(current), merged), base
    return ExtendedJob(merged, tuple(bases), tuple(names))


def _without(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in mapping.items() if key != EXTENDS}


def _located(given: Any, *, folder: Path) -> tuple[Path, bool]:
    """The file of a base, and whether it is a recipe."""
    if not isinstance(given, str) or not given:
        raise InputError(EXTENDS, got=describe(given), expected="a job file, relative to this one, or a recipe")
    given = typed_path(given, key=EXTENDS)
    beside = folder / given
    recipe = None if beside.is_file() else recipe_named(Path(given))
    if recipe is None and not beside.exists():
        names = recipe_names()
        raise InputError(
            EXTENDS, got=f"{given}: there is no {beside.absolute()}", remedy=suggestion(given, names),
            expected=f"a job file, relative to this one, or a recipe: {', '.join(names)}",
        )  # fmt: skip
    return (recipe, True) if recipe is not None else (beside, False)


def _merged(base: Mapping[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """`base` with the values of `over`: sections are merged key by key, everything else is replaced."""
    replaced = {
        section
        for (owner, key), sections in REPLACES.items()
        if _given(over, owner, key) not in (None, _given(base, owner, key))
        for section in sections
    }
    found = {key: value for key, value in base.items() if key not in replaced}
    for key, value in over.items():
        before = found.get(key)
        both = isinstance(value, Mapping) and isinstance(before, Mapping)
        found[key] = {**before, **value} if both else value  # type: ignore[dict-item]
    return found


def _given(mapping: Mapping[Any, Any], section: str, key: str) -> Any:
    held = mapping.get(section)
    return held.get(key) if isinstance(held, Mapping) else None
