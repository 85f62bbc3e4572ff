"""A submitted job from the terminal: its log as it grows, stopping it, and a copy of its run folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
from ray.job_submission import JobDetails

from jobs.submission.server import JobServer, ServerSilent, exit_code, outcome, record_of
from jobs.submission.stop_request import LISTENS, STOP
from raytrain.config.sections import RetryConfig
from raytrain.errors import InputError, RunError
from raytrain.runs.folder import shell_command

INTERRUPTED = 130
EVERY_S, SILENT_S = 1.0, 300.0
"""Seconds between two questions for the log, and for which the server may not answer, as while a tunnel is reopened."""
ASKED_LESS = 20
"""A log that takes a second to arrive is asked for again after so many."""

CLOSE_S = 15.0
"""Seconds beyond `retry.stop_grace_s`, in which a driver whose workers did not save in time closes its run."""
KILLED_S = 30.0
"""Ray sends SIGTERM and, after its own limit, SIGKILL."""
PACK_LIMIT_S = 1800.0
BLOCK = 1 << 20

# ---------------------------------------------------------------- follow


def follow_job(server: JobServer, job_id: str) -> int:
    """Print the log of a job to its end, and return the exit code of the job. Ctrl-C and SIGTERM detach: the job keeps
    running, and the exit code is 130."""
    try:
        job = follow_log(server, job_id)
    except KeyboardInterrupt:
        say(f"{job_id} keeps running. {go_on(server, job_id)}")
        return INTERRUPTED
    lines = [line.strip() for line in (job.message or "").splitlines() if line.strip()]
    why = ""
    if job.driver_exit_code is None and lines:  # no command of ours could say anything; of pip's many lines the error
        why = f" ({next((line for line in reversed(lines) if line.startswith('ERROR:')), lines[0])})"
    say(f"{job_id}: {outcome(job)}, exit code {exit_code(job)}{why}")
    return exit_code(job) or 0


def follow_log(server: JobServer, job_id: str) -> JobDetails:
    """Print the log of a job as it grows, until the job has ended, and return the job.

    The whole log is asked for again and again: Ray's stream of a log may end while the job runs (ray #57002, #60665),
    or stay silent after its connection was lost.
    """
    job, printed, answered, pause_s = None, 0, time.monotonic(), EVERY_S
    while True:
        asked = time.monotonic()
        try:
            job = server.job(job_id)  # before the log, which then holds all that it has printed
            log = server.get_job_logs(job_id)
        except (ServerSilent, RunError, RuntimeError) as error:  # the last two: it answers, but cannot say
            late = asked - answered >= SILENT_S
            if job is not None and job.status.is_terminal() and (late or not isinstance(error, ServerSilent)):
                return job  # one that never began has no log
            if late:
                raise RunError(
                    f"{server.address} has not answered for {SILENT_S:.0f} s, and {job_id} may still run. "
                    + go_on(server, job_id)
                ) from error
        else:
            answered = time.monotonic()
            pause_s = max(EVERY_S, ASKED_LESS * (answered - asked))
            print(log[printed:], end="", flush=True)
            printed = len(log)
            if job.status.is_terminal():
                return job
        time.sleep(pause_s)


def go_on(server: JobServer, job_id: str) -> str:
    """How to follow a job that keeps running, and how to stop it."""
    where = ("--address", server.address)
    follow = shell_command("submit", "logs", job_id, "--follow", *where)
    return f"Follow it with: {follow}; stop it with: {shell_command('submit', 'stop', job_id, *where)}"


def say(text: str) -> None:
    """Print a line about the job, not of it."""
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- stop


def stop_job(server: JobServer, job_id: str) -> JobDetails:
    """Stop a job so that it saves, and return it once it has ended; one in which no command of raytrain looks for the
    request is stopped by Ray at once."""
    job = server.job(job_id)
    if job.status.is_terminal():
        ended = f"{job_id}, which has ended: {outcome(job)}, exit code {exit_code(job)}"
        raise InputError("ID", got=ended, expected="a job that runs")
    if server.request("GET", f"/api/packages/gcs/{LISTENS.format(job_id)}").status_code == 200:
        grace_s = record_of(job).get("stop_grace_s")
        grace_s = RetryConfig().stop_grace_s if grace_s is None else float(grace_s)
        answer = server.request("PUT", f"/api/packages/gcs/{STOP.format(job_id)}", data=b"stop")
        if answer.status_code != 200:
            refused = f"{answer.status_code} {answer.reason}"
            raise RunError(f"{server.address} refused the request to stop {job_id}: {refused}")
        say(f"asked {job_id} to save and stop; waiting for up to {grace_s:g} s (retry.stop_grace_s)")
        server.ended(job_id, within_s=grace_s + CLOSE_S)
    else:
        say(f"{job_id} is no command of raytrain, or has not begun: there is nothing to save")
    if not server.job(job_id).status.is_terminal():
        say("asking Ray to stop it")
        server.stop_job(job_id)
        if not server.ended(job_id, within_s=KILLED_S):
            raise RunError(
                f"{job_id} still runs {KILLED_S:.0f} s after Ray was asked to stop it: Ray kills a job that does not "
                "end within RAY_JOB_STOP_WAIT_TIME_S of its head node"
            )
    return server.job(job_id)


# ---------------------------------------------------------------- fetch


def fetch(server: JobServer, job: JobDetails, target: Path) -> Path:
    """Copy the run of an ended job below `target`, and return its folder there."""
    job_id, save_dir = str(job.submission_id), record_of(job).get("save_dir")
    if not job.status.is_terminal():
        raise InputError("ID", got=f"{job_id}, which is {job.status.value}", expected="a job that has ended")
    if not save_dir:
        raise InputError("ID", got=f"{job_id}, for which no save.dir is recorded", expected="a submitted train or tune")
    if "://" in save_dir:
        raise InputError(
            "ID", got=f"{job_id}, whose runs are at {save_dir}", expected="a run on a disk of the cluster",
            remedy="`raytrain report` and `export` take that URI",
        )  # fmt: skip
    with server.asked("pack", save_dir, job_id, limit_s=PACK_LIMIT_S) as packed:
        if packed.get("missing"):
            raise InputError(
                "ID", got=f"{job_id}, without a run folder in {save_dir} on {packed['host']}",
                expected="a job that made its run folder there",
            )  # fmt: skip
        if "error" in packed:
            raise RunError(f"the run of {job_id} cannot be packed on the cluster: {packed['error']}")
        folder = target / Path(packed["run"]).name
        if folder.exists():
            raise InputError("--to", got=f"{folder}, which exists", expected="a folder without this run")
        options = {"node_id": packed["node"], "filename": packed["archive"], "lines": "-1", "timeout": "600"}
        with tempfile.TemporaryFile() as archive:
            try:
                with server.request("GET", "/api/v0/logs/file", params=options, stream=True) as sent:
                    if sent.status_code != 200:
                        raise RunError(f"the cluster does not serve {packed['archive']}: {sent.text.strip()}")
                    for block in sent.iter_content(BLOCK):
                        archive.write(block)
            except requests.RequestException as error:
                raise RunError(f"the copy of the run broke off ({error}); fetch it again") from error
            return unpack(archive, folder, packed)


def unpack(archive: Any, folder: Path, packed: Mapping[str, Any]) -> Path:
    """Unpack an open archive to `folder`, which appears only if size and SHA-256 are those that `packed` names."""
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
