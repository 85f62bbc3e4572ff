"""Copies the run folder of a job from a disk of the cluster, over HTTP, and verifies every file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from jobs.submission.on_cluster import pack
from jobs.submission.server import JobServer, SubmittedJob
from raytrain.errors import InputError, RunError

PACK_LIMIT_S = 1800.0
BLOCK = 1 << 20


def fetch(server: JobServer, job: SubmittedJob, target: Path) -> Path:
    """Copy the run of an ended job below `target`, and return its folder there.

    Raises:
        InputError: the job still runs, has no run folder on a disk of the cluster, or the folder exists already.
        RunError: the copy differs from what was read on the cluster; nothing is left at the target.
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
    with server.script(Path(pack.__file__), save_dir, job.id) as packing:
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
        node = server.job(packing.id).node
        with tempfile.TemporaryFile() as archive:
            _download(server, archive, node=node, name=answer["archive"], size=answer["bytes"])
            return unpack(archive, folder)


def _download(server: JobServer, target: IO[bytes], *, node: str | None, name: str, size: int) -> None:
    options = {"node_id": node, "filename": name, "lines": "-1", "timeout": "600"}
    received = 0
    with server.request("GET", "/api/v0/logs/file", params=options, stream=True) as answer:
        if answer.status_code != 200:
            raise RunError(f"the cluster does not serve {name}: {answer.text.strip()}")
        for block in answer.iter_content(BLOCK):
            received += target.write(block)
    if received != size:
        raise RunError(f"{received} of {size} bytes of the run arrived; fetch it again")
    target.seek(0)


def unpack(archive: IO[bytes], folder: Path) -> Path:
    """Unpack the archive of `on_cluster/pack.py` to `folder`, which appears only when every file is verified.

    Raises:
        RunError: a file is missing, or has another size or SHA-256 than on the cluster.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with tarfile.open(fileobj=archive) as tar:
            first = tar.next()
            content = tar.extractfile(first) if first is not None and first.name == pack.LISTING else None
            if content is None:
                raise RunError("the archive of the run has no list of its files; fetch it again")
            listing: Mapping[str, Any] = json.load(content)
            tar.extractall(partial, filter="data")
        (partial / pack.LISTING).unlink()
        for name, expected in listing.items():
            _verify(partial / name, name, expected)
        os.chmod(partial, 0o755)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _verify(path: Path, name: str, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise RunError(f"{name} is missing in the copy; fetch it again")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = path.stat().st_size
    if (size, digest) != (expected["bytes"], expected["sha256"]):
        raise RunError(
            f"{name} differs from the cluster's: {size} bytes, SHA-256 {digest[:12]}, expected "
            f"{expected['bytes']} bytes, {expected['sha256'][:12]}; fetch it again"
        )
