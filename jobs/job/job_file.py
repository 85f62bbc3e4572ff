"""A JOB.yaml on the disk, or the name of a packaged recipe, read as text or refused."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from raytrain.errors import InputError

RECIPES = Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """The packaged recipes, as the command line takes them."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_named(job: Path) -> Path | None:
    """The packaged recipe's file where `job` is its bare name and no file is called so; else None."""
    bare = len(job.parts) == 1 and job.name in recipe_names()
    return RECIPES / f"{job.name}.yaml" if bare and not job.is_file() else None


def recipe_lines() -> list[str]:
    """One line for each recipe: its name and what its first comment says."""
    width = max(map(len, recipe_names()))
    firsts = {name: read_recipe(name).splitlines()[0] for name in recipe_names()}
    return [f"{name.ljust(width)}  {first.removeprefix('# ').rstrip(':')}" for name, first in firsts.items()]


def read_recipe(name: str) -> str:
    """The text of a packaged recipe. Errors: InputError listing them."""
    if name not in recipe_names():
        raise InputError("recipes", seen=name, expected=f"one of {', '.join(recipe_names())}", remedy=_guess(name))
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")


def _guess(name: str) -> str:
    near = get_close_matches(name, recipe_names(), n=1)
    return f"did you mean {near[0]}?" if near else ""


def read_job(path: Path) -> str:
    """The text of a JOB.yaml or of a packaged recipe. Errors: InputError naming the file."""
    key = str(path)
    path = recipe_named(path) or path
    if path.is_dir():
        resume = f"to go on with a run: --resume {key}" if (path / "job.yaml").exists() else ""
        raise InputError(key, seen="a folder", expected="a YAML file", remedy=resume)
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        expected = f"a YAML file or a recipe: {', '.join(recipe_names())}"
        raise InputError(key, seen="no such file", expected=expected, remedy=_guess(path.stem)) from error
    except UnicodeDecodeError as error:
        seen = f"a byte that is no UTF-8, at {error.start}"
        raise InputError(key, seen=seen, expected="a text file in UTF-8") from error
    except (OSError, ValueError) as error:
        raise InputError(key, seen=str(error), expected="a YAML file that can be read") from error
