"""Reads the text of a JOB.yaml file or of a packaged recipe."""

from __future__ import annotations

import shlex
from pathlib import Path

from raytrain.config.messages import suggestion
from raytrain.errors import InputError

RECIPES = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Names of the packaged recipes, as the command line accepts them."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_named(job: Path) -> Path | None:
    """The file of the packaged recipe that `job` names; None if it names none, or if a file of that name exists."""
    bare = len(job.parts) == 1 and job.name in recipe_names()
    return RECIPES / f"{job.name}.yaml" if bare and not job.is_file() else None


def recipe_lines() -> list[str]:
    """One line for each recipe: its name and its first comment."""
    width = max(map(len, recipe_names()))
    firsts = {name: read_recipe(name).splitlines()[0] for name in recipe_names()}
    return [f"{name.ljust(width)}  {first.removeprefix('# ').rstrip(':')}" for name, first in firsts.items()]


def read_recipe(name: str) -> str:
    """Return the text of a packaged recipe.

    Raises:
        InputError: there is no such recipe; the error lists all names.
    """
    if name not in recipe_names():
        known = recipe_names()
        raise InputError("recipe", got=name, expected=f"one of {', '.join(known)}", remedy=suggestion(name, known))
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def read_job(path: Path) -> str:
    """Return the text of a JOB.yaml or of a packaged recipe.

    Raises:
        InputError: the file cannot be read; the error names it.
    """
    key = str(path)
    path = recipe_named(path) or path
    if path.is_dir():
        resume = f"to resume a run, use {shlex.join(['--resume', key])}" if (path / "job.yaml").exists() else ""
        raise InputError(key, got="a folder", expected="a YAML file or a recipe", remedy=resume)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        expected = f"a YAML file or a recipe: {', '.join(recipe_names())}"
        raise InputError(
            key, got="no such file", expected=expected, remedy=suggestion(path.stem, recipe_names())
        ) from error
    except UnicodeDecodeError as error:
        seen = f"a byte that is not valid UTF-8, at position {error.start}"
        raise InputError(key, got=seen, expected="a text file in UTF-8") from error
    except (OSError, ValueError) as error:
        raise InputError(key, got=str(error), expected="a YAML file that can be read") from error
