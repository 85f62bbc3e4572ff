"""The verb `submit`: runs another verb as a Ray job, and looks after submitted jobs."""

from __future__ import annotations

import json
import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from ray.job_submission import JobDetails
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.driver.printing import print_row
from jobs.driver.progress import clock_text
from jobs.job.facts import path_from_here
from jobs.submission.follow import INTERRUPTED, fetch, follow_job, go_on, say, stop_job
from jobs.submission.on_cluster import versions
from jobs.submission.request import check_id, check_package, check_versions, pack, request_of, runtime_environment
from jobs.submission.server import RECORD, JobServer, exit_code, outcome, record_of
from raytrain.runs.folder import shell_command

PIPE_WIDTH = 200
"""Columns where the output is no terminal: a line for each job."""
COLOURS = {"SUCCEEDED": "green", "FAILED": "red", "STOPPED": "yellow"}


def submit_verb(
    verb: str,
    command: click.Command,
    arguments: Sequence[str],
    *,
    address: str | None,
    job_id: str | None = None,
    install: bool = False,
    detach: bool = False,
) -> int:
    """Submit a verb, follow it (unless `detach`), and return its exit code. Ctrl-C before the job is submitted cancels.

    Args:
        command: the verb itself, which parses its arguments.
        install: install the versions of packages used here for this job.
    """
    check_id(job_id)
    request = request_of(verb, command, arguments)
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    job_id = job_id or f"{request.record['name'] or verb}-{began}-{secrets.token_hex(2)}"
    with tempfile.TemporaryDirectory() as temporary:
        try:
            server, folder = JobServer(address), Path.cwd()
            package = pack(folder, Path(temporary) / "working_dir.zip")
            check_package(request, package, folder)
            with server.asked("versions") as there:
                check_versions(versions(), there, install=install)
            say(package.text)
            say(f"cluster: python {there['python']}, torch {there['torch']}, ray {there['ray']}; "
                "raytrain is carried along")  # fmt: skip
            env = runtime_environment(working_dir=package.path, install=install)
        except KeyboardInterrupt:
            say("cancelled: nothing was submitted")
            return INTERRUPTED
        try:
            metadata = {RECORD: json.dumps(request.record)}
            server.submit(request.entrypoint, job_id=job_id, runtime_env=env, metadata=metadata)
        except KeyboardInterrupt:
            shown = shell_command("submit", "status", job_id, "--address", server.address)
            say(f"interrupted: {shown} shows whether {job_id} was submitted")
            return INTERRUPTED
    say(f"submitted {job_id} to {server.address}: {request.entrypoint}")
    if detach:
        say(go_on(server, job_id))
        return 0
    return follow_job(server, job_id)


def status_verb(job_id: str | None, *, address: str | None, as_json: bool) -> int:
    """Print the state of one job, or of all."""
    server = JobServer(address)
    jobs = server.jobs() if job_id is None else [server.job(job_id)]
    rows = [row_of(job, now=time.time()) for job in jobs]
    if as_json:
        print(json.dumps(rows if job_id is None else rows[0], indent=2))
    elif rows:
        console = Console(highlight=False)
        console = console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)
        print_jobs(rows, console, in_full=job_id is not None)
    else:
        say(f"no jobs were submitted to {server.address}")
    return 0


def row_of(job: JobDetails, *, now: float) -> dict[str, Any]:
    """A job as `submit status --json` prints it; one that runs has taken its time until `now`, in unix seconds."""
    began, ended = (None if ms is None else ms / 1000 for ms in (job.start_time or None, job.end_time or None))
    return {
        "id": job.submission_id,
        "verb": record_of(job).get("verb") or "",
        "status": outcome(job),
        "exit_code": exit_code(job),
        "started": began,
        "seconds": None if began is None else max(0.0, (ended or now) - began),
        "save_dir": record_of(job).get("save_dir"),
        "entrypoint": job.entrypoint,
        "message": job.message or "",
    }


def print_jobs(rows: Sequence[dict[str, Any]], console: Console, *, in_full: bool = False) -> None:
    """Print a line for each job; only an ID that is too long for the terminal takes more. With `in_full` also where its
    runs are, its command, and what Ray says."""
    table = Table(box=None, pad_edge=False)
    table.add_column("ID", overflow="fold")
    for name in ("verb", "status", "exit", "started", "took"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("exit", "took") else "left")
    for row in rows:
        table.add_row(
            Text(row["id"]), row["verb"] or "-", Text(row["status"], style=COLOURS.get(row["status"], "")),
            "" if row["exit_code"] is None else str(row["exit_code"]),
            "" if row["started"] is None else time.strftime("%m-%d %H:%M", time.localtime(row["started"])),
            "" if row["seconds"] is None else clock_text(row["seconds"]),
        )  # fmt: skip
    console.print(table)
    for row in rows if in_full else ():
        for name, key in (("save.dir", "save_dir"), ("command", "entrypoint"), ("message", "message")):
            if row[key]:
                print_row(console, f"{name:<9}", row[key].strip())


def logs_verb(job_id: str, *, address: str | None, following: bool) -> int:
    """Print the log of a job; following it, the exit code is the job's."""
    server = JobServer(address)
    server.job(job_id)
    if following:
        return follow_job(server, job_id)
    print(server.get_job_logs(job_id), end="", flush=True)
    return 0


def stop_verb(job_id: str, *, address: str | None) -> int:
    """Ask a job to save and stop, wait for it, and only then ask Ray to stop it."""
    try:
        job = stop_job(JobServer(address), job_id)
    except KeyboardInterrupt:
        say(f"{job_id} is no longer waited for, and may still run: see {shell_command('submit', 'status', job_id)}")
        return INTERRUPTED
    say(f"{job_id}: {outcome(job)}, exit code {exit_code(job)}")
    return 0


def fetch_verb(job_id: str, *, address: str | None, target: str | None) -> int:
    """Copy the run folder of a job to this machine."""
    server = JobServer(address)
    folder = fetch(server, server.job(job_id), Path(target or "runs").absolute())
    print(path_from_here(str(folder)))
    return 0
