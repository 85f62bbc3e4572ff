"""Stops a job: asks it to save, where a command of raytrain runs in it, and asks Ray if it does not end by itself."""

from __future__ import annotations

import re
from collections.abc import Callable

from jobs.submission.server import JobServer, SubmittedJob, wait_until
from jobs.submission.stop_request import listens, request_stop
from raytrain.config.sections import RetryConfig
from raytrain.errors import InputError, RunError

#: Seconds beyond `retry.stop_grace_s`, in which a driver whose workers did not save in time closes its run.
CLOSE_S = 15.0
#: Ray sends SIGTERM and, after its own limit, SIGKILL.
KILLED_S = 30.0
OURS = re.compile(r"\braytrain\s+\w|-m\s+jobs\b")
"""An entrypoint that is a command of raytrain, whoever submitted it."""


def stop_job(server: JobServer, job_id: str, *, say: Callable[[str], None]) -> SubmittedJob:
    """Stop a job, and return it once it has ended.

    A job in which no command of raytrain listens for the request to save is stopped by Ray at once.

    Args:
        say: prints a line about what is awaited.

    Raises:
        InputError: there is no such job, or it has ended already.
        RunError: it did not end, even killed by Ray.
        Interrupted: the command is cancelled.
    """
    job = server.job(job_id)
    if job.ended:
        raise InputError(
            "ID", got=f"{job_id}, which has ended: {job.outcome}, exit code {job.verdict}", expected="a job that runs"
        )
    if job.status == "RUNNING":
        if not (job.record or OURS.search(job.entrypoint) or listens(server, job_id)):
            say(f"{job_id} is no command of raytrain, which would save")
        else:
            grace_s = job.record.get("stop_grace_s")
            grace_s = RetryConfig().stop_grace_s if grace_s is None else float(grace_s)
            request_stop(server, job_id)
            say(f"asked {job_id} to save and stop; waiting for up to {grace_s:g} s (retry.stop_grace_s)")
            wait_until(lambda: server.job(job_id).ended, limit_s=grace_s + CLOSE_S, pause=server.pause)
    if not server.job(job_id).ended:
        say("asking Ray to stop it")
        server.kill(job_id)
        if not wait_until(lambda: server.job(job_id).ended, limit_s=KILLED_S, pause=server.pause):
            raise RunError(
                f"{job_id} still runs {KILLED_S:.0f} s after Ray was asked to stop it: Ray kills a job that does not "
                "end within RAY_JOB_STOP_WAIT_TIME_S of its head node"
            )
    return server.job(job_id)
