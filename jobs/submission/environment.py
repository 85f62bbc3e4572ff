"""The environment that a job finds on the cluster, compared with this one, and the runtime environment that it gets."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jobs.submission.on_cluster import probe
from jobs.submission.server import JobServer
from raytrain.errors import InputError

PRODUCT = ("cluster", "raytrain", "experts", "jobs")
EXACT = {"python": 2, "torch": 3, "ray": 3}
"""What is compared -> how many parts of its version must be equal. Local parts (`+cpu`, `+cu126`) may differ."""
INSTALLABLE = ("torch",)
"""Ray starts the job's processes with its own Python and its own version."""


def versions_here() -> dict[str, str | None]:
    """The versions of this environment, as the cluster is asked for its own."""
    return probe.report()


def versions_of(server: JobServer) -> dict[str, str | None]:
    """The versions that a job finds on the cluster; it runs a short job there."""
    with server.script(Path(probe.__file__)) as job:
        return server.answer_of(job)


def check_versions(here: Mapping[str, str | None], there: Mapping[str, str | None], *, install: bool) -> list[str]:
    """Compare the versions.

    Args:
        install: packages that differ and can be installed for the job are no error.

    Returns:
        The names of the packages to install.

    Raises:
        InputError: names each version that differs, here and there.
    """
    differ = {name: parts for name, parts in EXACT.items() if _parts(here[name], parts) != _parts(there[name], parts)}
    wrong = [name for name in differ if not (install and name in INSTALLABLE)]
    if wrong:
        fixable = all(name in INSTALLABLE for name in wrong)
        raise InputError(
            "environment of the cluster",
            got=", ".join(f"{name} {there[name] or 'not installed'}" for name in wrong),
            expected=", ".join(f"{name} {here[name]}" for name in wrong) + ", as here",
            remedy="add --install, which installs the versions used here for this job"
            if fixable
            else "start the cluster with these versions, or submit from an environment with its versions",
        )
    return list(differ)


def runtime_environment(
    here: Mapping[str, str | None], there: Mapping[str, str | None], *, working_dir: Path, install: bool
) -> dict[str, Any]:
    """Ray's runtime environment of the job: its files, this product where the cluster lacks it, and its packages.

    Args:
        install: install the versions used here of every package that this product requires, except Ray itself.
    """
    env: dict[str, Any] = {"working_dir": str(working_dir)}
    if here["product"] != there["product"]:
        env["py_modules"] = [str(_folder_of(name)) for name in PRODUCT]
        env["excludes"] = ["__pycache__", "*.pyc"]
    if install:
        env["pip"] = {"packages": pinned_requirements(), "pip_check": False}
    return env


def pinned_requirements() -> list[str]:
    """The requirements of this product, each pinned to the version installed here, without local parts and Ray."""
    from packaging.requirements import Requirement

    required = [Requirement(text) for text in metadata.requires("raytrain") or []]
    needed = [each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in needed if name != "ray"]


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)))


def _parts(version: str | None, count: int) -> list[str] | None:
    return None if version is None else version.partition("+")[0].split(".")[:count]
