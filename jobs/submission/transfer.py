"""What goes to the cluster and what comes back: a job's environment, compared; the run folder, verified.

For `submit` before sending, and for `submit fetch`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from jobs.submission.server import JobServer, SubmittedJob
from raytrain.errors import InputError, RunError

# ---------------------------------------------------------------- environment
# The environment that a job finds on the cluster, compared with this one, and the runtime environment that it gets.


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


# ---------------------------------------------------------------- fetch
# Copies the run folder of a job from a disk of the cluster, over HTTP, and verifies the copy.


PACK_LIMIT_S = 1800.0
BLOCK = 1 << 20


def fetch(server: JobServer, job: SubmittedJob, target: Path) -> Path:
    """Copy the run of an ended job below `target`, and return its folder there.

    Raises:
        InputError: the job still runs, has no run folder on a disk of the cluster, or the folder exists already.
        RunError: the copy differs from what was packed on the cluster; nothing is left at the target.
    """
    save_dir = job.record.get("save_dir")
    if not job.ended:
        raise InputError("ID", got=f"{job.id}, which is {job.status}", expected="a job that has ended")
    if not save_dir:
        raise InputError("ID", got=f"{job.id}, for which no save.dir is recorded", expected="a submitted train or tune")
    if "://" in save_dir:
        raise InputError(
            "ID", got=f"{job.id}, whose runs are at {save_dir}", expected="a run on a disk of the cluster",
            remedy="`raytrain report` and `export` take that URI",
        )  # fmt: skip
    with server.script("pack", save_dir, job.id) as packing:
        answer = server.answer_of(packing, limit_s=PACK_LIMIT_S)
        if answer.get("missing"):
            raise InputError(
                "ID", got=f"{job.id}, without a run folder in {save_dir} on {answer['host']}",
                expected="a job that made its run folder there",
            )  # fmt: skip
        if "error" in answer:
            raise RunError(f"the run of {job.id} cannot be packed on the cluster: {answer['error']}")
        folder = target / Path(answer["run"]).name
        if folder.exists():
            raise InputError("--to", got=f"{folder}, which exists", expected="a folder without this run")
        options = {"node_id": server.job(packing.id).node, "filename": answer["archive"], "lines": "-1"}
        with (
            server.request("GET", "/api/v0/logs/file", params={**options, "timeout": "600"}, stream=True) as sent,
            tempfile.TemporaryFile() as archive,
        ):
            if sent.status_code != 200:
                raise RunError(f"the cluster does not serve {answer['archive']}: {sent.text.strip()}")
            for block in sent.iter_content(BLOCK):
                archive.write(block)
            return unpack(archive, folder, answer)


def unpack(archive: Any, folder: Path, packed: Mapping[str, Any]) -> Path:
    """Unpack an archive to `folder`, which appears only when everything is there.

    Args:
        archive: a file open for reading.
        packed: size and SHA-256 of the archive on the cluster (`on_cluster.pack`).

    Raises:
        RunError: the archive differs from that on the cluster.
    """
    size = archive.seek(0, os.SEEK_END)
    archive.seek(0)
    if (size, hashlib.file_digest(archive, "sha256").hexdigest()) != (packed["bytes"], packed["sha256"]):
        raise RunError(f"the copy of the run differs: {size} of {packed['bytes']} bytes arrived; fetch it again")
    archive.seek(0)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with tarfile.open(fileobj=archive) as tar:
            tar.extractall(partial, filter="data")
        os.chmod(partial, 0o755)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
