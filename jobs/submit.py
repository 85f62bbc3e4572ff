"""The verb `submit`: runs another verb as a Ray job, and looks after submitted jobs."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from jobs.submission.environment import check_versions, runtime_environment, versions_here, versions_of
from jobs.submission.fetch import fetch
from jobs.submission.follow import LogFollower
from jobs.submission.package import pack
from jobs.submission.request import check_id, request_of
from jobs.submission.server import RECORD, JobServer, SubmittedJob, wait_until
from jobs.submission.stop_request import request_stop
from raytrain.config.sections import RetryConfig
from raytrain.errors import InputError, RunError

INTERRUPTED = 130
#: Seconds beyond `retry.stop_grace_s`, in which a driver whose workers did not save in time closes its run.
CLOSE_S = 15.0
#: Ray sends SIGTERM and, after its own limit, SIGKILL.
KILLED_S = 30.0


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

    Args:
        command: the verb itself, which parses its arguments.
        job_id: ID of the job; by default one is made.
        install: install the versions of packages used here for this job.
        detach: return 0 once it is submitted.

    Raises:
        InputError: the input is wrong, or the cluster does not fit; nothing was submitted.
    """
    check_id(job_id)
    request = request_of(verb, command, arguments)
    folder = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="rt-") as temporary:
        package = pack(folder, Path(temporary) / "working_dir.zip")
        request.check_package(package, folder)
        server = JobServer(address)
        here, there = versions_here(), versions_of(server)
        check_versions(here, there, install=install)
        _say(package.text)
        env = runtime_environment(here, there, working_dir=package.path, install=install)
        carried = "carried along: another version" if "py_modules" in env else "the same as here"
        _say(f"cluster: python {there['python']}, torch {there['torch']}, ray {there['ray']}, raytrain {carried}")
        job = server.submit(
            request.entrypoint,
            job_id=job_id or _new_id(verb, request.record["name"]),
            runtime_env=env,
            metadata={RECORD: json.dumps(request.record)},
        )
    _say(f"submitted {job.id} to {server.address}: {request.entrypoint}")
    if detach:
        _say(_again(server, job.id))
        return 0
    return follow(server, job.id)


def follow(server: JobServer, job_id: str) -> int:
    """Print the log of a job to its end, and return its exit code; a signal detaches, or asks at a terminal."""
    follower = LogFollower(server, job_id, write=_print)
    stopped = False
    while True:
        try:
            job = follower.run()
            break
        except KeyboardInterrupt:
            action = _chosen()
            if action == "detach":
                _say(f"{job_id} keeps running. {_again(server, job_id)}")
                return INTERRUPTED
            if action == "stop" and not stopped:
                request_stop(server, job_id)
                stopped = True
                _say("asked the run to save and stop; Ctrl-C again to detach")
            elif action == "continue":
                _say(f"following {job_id} again")
    verdict = job.verdict
    assert verdict is not None
    _say(f"{job.id}: {job.outcome}, exit code {verdict}{_explained(job)}")
    return verdict


def status_verb(job_id: str | None, *, address: str | None, as_json: bool) -> int:
    """Print the state of one job, or of all."""
    server = JobServer(address)
    jobs = server.jobs() if job_id is None else [server.job(job_id)]
    rows = [_row(job) for job in jobs]
    if as_json:
        print(json.dumps(rows if job_id is None else rows[0], indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("ID", "verb", "status", "exit", "started", "seconds", "save.dir"):
        table.add_column(name, overflow="fold")
    for row in rows:
        started = "" if row["started"] is None else time.strftime("%m-%d %H:%M:%S", time.localtime(row["started"]))
        code = "" if row["exit_code"] is None else str(row["exit_code"])
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
        table.add_row(row["id"], row["verb"], row["status"], code, started, seconds, row["save_dir"] or "")
    Console(highlight=False).print(table)
    return 0


def logs_verb(job_id: str, *, address: str | None, following: bool) -> int:
    """Print the log of a job; following it, the exit code is the job's."""
    server = JobServer(address)
    server.job(job_id)
    if following:
        return follow(server, job_id)
    _print(server.logs(job_id))
    return 0


def stop_verb(job_id: str, *, address: str | None) -> int:
    """Ask a job to save and stop, wait for it, and only then ask Ray to stop it.

    Raises:
        InputError: the job has ended already.
        RunError: it did not end, even killed by Ray.
    """
    server = JobServer(address)
    job = server.job(job_id)
    if job.ended:
        raise InputError(
            "ID", got=f"{job_id}, which has ended: {job.outcome}, exit code {job.verdict}", expected="a job that runs"
        )
    grace_s = job.record.get("stop_grace_s")
    grace_s = RetryConfig().stop_grace_s if grace_s is None else float(grace_s)
    if job.status == "RUNNING":
        request_stop(server, job_id)
        _say(f"asked {job_id} to save and stop; waiting for up to {grace_s:g} s (retry.stop_grace_s)")
        wait_until(lambda: server.job(job_id).ended, limit_s=grace_s + CLOSE_S)
    if not server.job(job_id).ended:
        _say("asking Ray to stop it")
        server.kill(job_id)
        if not wait_until(lambda: server.job(job_id).ended, limit_s=KILLED_S):
            raise RunError(f"{job_id} still runs {KILLED_S:.0f} s after Ray was asked to stop it")
    job = server.job(job_id)
    _say(f"{job_id}: {job.outcome}, exit code {job.verdict}")
    return 0


def fetch_verb(job_id: str, *, address: str | None, target: str | None) -> int:
    """Copy the run folder of a job to this machine."""
    server = JobServer(address)
    folder = fetch(server, server.job(job_id), Path(target or "runs").absolute())
    print(folder)
    return 0


def _row(job: SubmittedJob) -> dict[str, Any]:
    ends = job.end_time or time.time()
    return {
        "id": job.id,
        "verb": job.record.get("verb") or "",
        "status": job.outcome,
        "exit_code": job.verdict,
        "started": job.start_time,
        "seconds": None if job.start_time is None else max(0.0, ends - job.start_time),
        "save_dir": job.record.get("save_dir"),
        "entrypoint": job.entrypoint,
        "message": job.message,
    }


def _new_id(verb: str, name: str | None) -> str:
    return f"{name or verb}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(2)}"


def _chosen() -> str:
    """What to do after Ctrl-C: asked at a terminal; elsewhere nobody can answer, and the job goes on."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "detach"
    try:
        answer = click.prompt(
            "\n[d]etach and let it run, [s]top it, or [c]ontinue following",
            type=click.Choice(["d", "s", "c"]), default="d", show_choices=False, err=True,
        )  # fmt: skip
    except click.Abort:
        return "detach"
    return {"d": "detach", "s": "stop", "c": "continue"}[answer]


def _again(server: JobServer, job_id: str) -> str:
    return f"Follow it with: raytrain submit logs {job_id} --follow --address {server.address}"


def _explained(job: SubmittedJob) -> str:
    """Ray's own message, where no command of ours could say anything."""
    return f" ({job.message.splitlines()[0]})" if job.exit_code is None and job.message else ""


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
