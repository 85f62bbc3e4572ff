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

from jobs.driver.progress import clock_text
from jobs.job.facts import path_from_here
from jobs.submission.follow import INTERRUPTED, fetch, follow_job, go_on, print_log, say, stop_job
from jobs.submission.on_cluster import versions
from jobs.submission.request import (
    JobRequest,
    check_id,
    check_package,
    check_versions,
    pack,
    request_of,
    runtime_environment,
)
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
    """Submit a verb, follow it, and return its exit code.

    Ctrl-C before the job is submitted cancels; afterwards see `follow_job`.

    Args:
        command: the verb itself, which parses its arguments.
        job_id: ID of the job; by default one is made.
        install: install the versions of packages used here for this job.
        detach: return 0 once it is submitted.

    Raises:
        InputError: the input is wrong, or the cluster does not fit; nothing was submitted.
        RunError: the cluster failed.
    """
    check_id(job_id)
    request = request_of(verb, command, arguments)
    began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    job_id = job_id or f"{request.record['name'] or verb}-{began}-{secrets.token_hex(2)}"
    with tempfile.TemporaryDirectory() as temporary:
        try:
            server = JobServer(address)
            env = _checked(request, server, Path(temporary), install=install)
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


def _checked(request: JobRequest, server: JobServer, temporary: Path, *, install: bool) -> dict[str, Any]:
    """The job's environment, with its files packed in a folder here. Errors: InputError where it does not fit."""
    folder = Path.cwd()
    package = pack(folder, temporary / "working_dir.zip")
    check_package(request, package, folder)
    with server.asked("versions") as there:
        check_versions(versions(), there, install=install)
    say(package.text)
    say(f"cluster: python {there['python']}, torch {there['torch']}, ray {there['ray']}; raytrain is carried along")
    return runtime_environment(working_dir=package.path, install=install)


def status_verb(job_id: str | None, *, address: str | None, as_json: bool) -> int:
    """Print the state of one job, or of all."""
    server = JobServer(address)
    jobs = server.jobs() if job_id is None else [server.job(job_id)]
    rows = [row_of(job, now=time.time()) for job in jobs]
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)
    if as_json:
        print(json.dumps(rows if job_id is None else rows[0], indent=2))
    elif job_id is not None:
        print_job(rows[0], console)
    elif rows:
        print_jobs(rows, console)
    else:
        say(f"no jobs were submitted to {server.address}")
    return 0


def row_of(job: JobDetails, *, now: float) -> dict[str, Any]:
    """A job as `submit status --json` prints it.

    Args:
        now: unix seconds; a job that runs has taken its time until then.
    """
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


def print_jobs(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print a line for each job; only an ID that is too long for the terminal takes more."""
    table = Table(box=None, pad_edge=False)
    table.add_column("ID", overflow="fold")
    for name in ("verb", "status", "exit", "started", "took"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("exit", "took") else "left")
    for row in rows:
        table.add_row(*_cells(row, started="%m-%d %H:%M", no_verb="-").values())
    console.print(table)


def print_job(row: dict[str, Any], console: Console) -> None:
    """Print all that is known of one job, a line for each fact."""
    facts = _cells(row, started="%Y-%m-%d %H:%M:%S")
    facts |= {"save.dir": row["save_dir"] or "", "command": row["entrypoint"], "message": row["message"].strip()}
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if value:
            table.add_row(name, value)
    console.print(table)


def _cells(row: dict[str, Any], *, started: str, no_verb: str = "") -> dict[str, str | Text]:
    """What the table and the list of facts have in common, by their names there."""
    return {
        "ID": Text(row["id"]),
        "verb": row["verb"] or no_verb,
        "status": Text(row["status"], style=COLOURS.get(row["status"], "")),
        "exit": "" if row["exit_code"] is None else str(row["exit_code"]),
        "started": "" if row["started"] is None else time.strftime(started, time.localtime(row["started"])),
        "took": "" if row["seconds"] is None else clock_text(row["seconds"]),
    }


def logs_verb(job_id: str, *, address: str | None, following: bool) -> int:
    """Print the log of a job; following it, the exit code is the job's."""
    server = JobServer(address)
    server.job(job_id)
    if following:
        return follow_job(server, job_id)
    print_log(server.get_job_logs(job_id))
    return 0


def stop_verb(job_id: str, *, address: str | None) -> int:
    """Ask a job to save and stop, wait for it, and only then ask Ray to stop it.

    Raises:
        InputError: the job has ended already.
        RunError: it did not end, even killed by Ray.
    """
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
