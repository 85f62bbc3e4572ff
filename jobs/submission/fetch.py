"""Copies the run folder of a job from a disk of the cluster, over HTTP, and verifies the copy."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.submission.server import JobServer, SubmittedJob
from raytrain.errors import InputError, RunError

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
