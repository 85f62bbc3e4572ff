"""The environment that a job finds on the cluster, compared with this one, and the runtime environment that it gets."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from raytrain.errors import InputError

PRODUCT = ("cluster", "raytrain", "experts", "jobs")
EXACT = {"python": 2, "torch": 3, "ray": 3}
"""What is compared -> how many parts of its version must be equal. Local parts (`+cpu`, `+cu126`) may differ."""
INSTALLABLE = ("torch",)
"""Ray starts the job's processes with its own Python and its own version."""


def check_versions(here: Mapping[str, str | None], there: Mapping[str, str | None], *, install: bool) -> None:
    """Raise InputError that names each version that differs, here and there.

    Args:
        install: packages that differ and can be installed for the job are no error.
    """
    differ = [name for name, parts in EXACT.items() if _parts(here[name], parts) != _parts(there[name], parts)]
    wrong = [name for name in differ if not (install and name in INSTALLABLE)]
    if wrong:
        raise InputError(
            "environment of the cluster",
            got=", ".join(f"{name} {there[name] or 'not installed'}" for name in wrong),
            expected=", ".join(f"{name} {here[name]}" for name in wrong) + ", as here",
            remedy="add --install, which installs the versions used here for this job"
            if set(wrong) <= set(INSTALLABLE)
            else "start the cluster with these versions, or submit from an environment with its versions",
        )


def runtime_environment(*, working_dir: Path, install: bool) -> dict[str, Any]:
    """Ray's runtime environment of the job: its files, this product, and its packages.

    Args:
        install: install the versions used here of every package that this product requires, except Ray itself.
    """
    specs = [importlib.util.find_spec(name) for name in PRODUCT]
    folders = [next(iter(spec.submodule_search_locations or [])) for spec in specs if spec is not None]
    env = {"working_dir": str(working_dir), "py_modules": folders, "excludes": ["__pycache__", "*.pyc"]}
    return env | ({"pip": {"packages": pinned_requirements(), "pip_check": False}} if install else {})


def pinned_requirements() -> list[str]:
    """The requirements of this product, each pinned to the version installed here, without local parts and Ray."""
    from packaging.requirements import Requirement

    required = [Requirement(text) for text in metadata.requires("raytrain") or []]
    needed = [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in needed if name != "ray"]


def _parts(version: str | None, count: int) -> list[str] | None:
    return None if version is None else version.partition("+")[0].split(".")[:count]
