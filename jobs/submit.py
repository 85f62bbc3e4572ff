"""The verb `submit`: runs another verb as a Ray job, and looks after submitted jobs."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cluster.private_ray import private_folder
from jobs.driver.signals import Interrupted, SignalQueue
from jobs.job.paths import path_from_here
from jobs.submission.console import INTERRUPTED, JobConsole, follow_again, print_log, say
from jobs.submission.environment import check_versions, runtime_environment, versions_here, versions_of
from jobs.submission.fetch import fetch
from jobs.submission.listing import listing_console, print_job, print_jobs, row_of
from jobs.submission.package import pack
from jobs.submission.request import JobRequest, check_id, request_of
from jobs.submission.server import RECORD, JobServer
from jobs.submission.stop import stop_job
from raytrain.runs.commands import shell_command


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

    Ctrl-C before the job is submitted cancels; afterwards see `JobConsole`.

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
    job_id = job_id or _new_id(verb, request.record["name"])
    with SignalQueue() as signals:
        try:
            server, env = signals.run(lambda: _uploaded(request, address, install=install, cancelled=signals.cancelled))
        except Interrupted:
            say("cancelled: nothing was submitted")
            return INTERRUPTED
        # from here on the job may exist: a signal waits for the answer, and is about the job
        metadata = {RECORD: json.dumps(request.record)}
        job = server.submit(request.entrypoint, job_id=job_id, runtime_env=env, metadata=metadata)
        say(f"submitted {job.id} to {server.address}: {request.entrypoint}")
        if detach:
            say(follow_again(server, job.id))
            return 0
        return JobConsole(server, job.id, signals=signals).follow()


def _uploaded(
    request: JobRequest, address: str | None, *, install: bool, cancelled: threading.Event
) -> tuple[JobServer, dict[str, Any]]:
    """The server, and the job's environment, whose files are on the cluster.

    Raises:
        InputError: the working directory or the cluster does not fit.
    """
    folder = Path.cwd()
    with private_folder() as temporary:
        server = JobServer(address, cancelled=cancelled)
        package = pack(folder, Path(temporary) / "working_dir.zip")
        request.check_package(package, folder)
        here, there = versions_here(), versions_of(server)
        check_versions(here, there, install=install)
        say(package.text)
        env = runtime_environment(here, there, working_dir=package.path, install=install)
        carried = (
            "carried along: a job there finds another version, or none" if "py_modules" in env else "the same as here"
        )
        say(f"cluster: python {there['python']}, torch {there['torch']}, ray {there['ray']}, raytrain {carried}")
        return server, server.upload(env)


def status_verb(job_id: str | None, *, address: str | None, as_json: bool) -> int:
    """Print the state of one job, or of all."""
    server = JobServer(address)
    jobs = server.jobs() if job_id is None else [server.job(job_id)]
    rows = [row_of(job, now=time.time()) for job in jobs]
    if as_json:
        print(json.dumps(rows if job_id is None else rows[0], indent=2))
    elif job_id is not None:
        print_job(rows[0], listing_console())
    elif rows:
        print_jobs(rows, listing_console())
    else:
        say(f"no jobs were submitted to {server.address}")
    return 0


def logs_verb(job_id: str, *, address: str | None, following: bool) -> int:
    """Print the log of a job; following it, the exit code is the job's."""
    if not following:
        server = JobServer(address)
        server.job(job_id)
        print_log(server.logs(job_id))
        return 0
    with SignalQueue() as signals:
        try:
            server = signals.run(lambda: _server_of(job_id, address))
        except Interrupted:
            return INTERRUPTED
        return JobConsole(server, job_id, signals=signals).follow()


def _server_of(job_id: str, address: str | None) -> JobServer:
    """The server that knows this job. Errors: InputError."""
    server = JobServer(address)
    server.job(job_id)
    return server


def stop_verb(job_id: str, *, address: str | None) -> int:
    """Ask a job to save and stop, wait for it, and only then ask Ray to stop it.

    Raises:
        InputError: the job has ended already.
        RunError: it did not end, even killed by Ray.
    """
    with SignalQueue() as signals:
        try:
            job = signals.run(lambda: stop_job(JobServer(address, cancelled=signals.cancelled), job_id, say=say))
        except Interrupted:
            say(f"{job_id} is no longer waited for, and may still run: see {shell_command('submit', 'status', job_id)}")
            return INTERRUPTED
    say(f"{job_id}: {job.outcome}, exit code {job.verdict}")
    return 0


def fetch_verb(job_id: str, *, address: str | None, target: str | None) -> int:
    """Copy the run folder of a job to this machine."""

    def copy() -> Path:
        server = JobServer(address, cancelled=signals.cancelled)
        return fetch(server, server.job(job_id), Path(target or "runs").absolute())

    with SignalQueue() as signals:
        try:
            folder = signals.run(copy)
        except Interrupted:
            say("cancelled: nothing was copied")
            return INTERRUPTED
    print(path_from_here(str(folder)))
    return 0


def _new_id(verb: str, name: str | None) -> str:
    return f"{name or verb}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"
