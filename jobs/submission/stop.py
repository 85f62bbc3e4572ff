"""Stops a job so that it saves: a request over HTTP, which the command in the job looks for.

Ray kills a job 3 s after the SIGTERM of its stop, by default. The request leaves a job `retry.stop_grace_s` instead. It
is an entry in the cluster's own key-value store, stored like a package: the one kind of entry that can be written over
HTTP. Once a command looks for the request, it makes an entry of its own, which tells it from other programs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.checks.ray_job import submission_id
from raytrain.errors import InputError, RunError

if TYPE_CHECKING:
    from jobs.submission.server import JobServer, SubmittedJob

LOOK_EVERY_S = 0.5
CLOSE_S = 15.0
"""Seconds beyond `retry.stop_grace_s`, in which a driver whose workers did not save in time closes its run."""
KILLED_S = 30.0
"""Ray sends SIGTERM and, after its own limit, SIGKILL."""
STOP, LISTENS = "raytrain_stop_{}.zip", "raytrain_listens_{}.zip"
"""The names of both entries, with the ID of the job."""


def stop_job(server: JobServer, job_id: str, *, say: Callable[[str], None]) -> SubmittedJob:
    """Stop a job, and return it once it has ended.

    A job in which no command of raytrain looks for the request to save is stopped by Ray at once.

    Args:
        say: prints a line about what is awaited.

    Raises:
        InputError: there is no such job, or it has ended already.
        RunError: it did not end, even killed by Ray.
        Interrupted: the command is cancelled.
    """
    from raytrain.config.sections import RetryConfig

    job = server.job(job_id)
    if job.ended:
        raise InputError(
            "ID", got=f"{job_id}, which has ended: {job.outcome}, exit code {job.verdict}", expected="a job that runs"
        )
    if server.request("GET", f"/api/packages/gcs/{LISTENS.format(job_id)}").status_code == 200:
        grace_s = job.record.get("stop_grace_s")
        grace_s = RetryConfig().stop_grace_s if grace_s is None else float(grace_s)
        request_stop(server, job_id)
        say(f"asked {job_id} to save and stop; waiting for up to {grace_s:g} s (retry.stop_grace_s)")
        server.wait_until(lambda: server.job(job_id).ended, limit_s=grace_s + CLOSE_S)
    else:
        say(f"{job_id} is no command of raytrain, or has not begun: there is nothing to save")
    if not server.job(job_id).ended:
        say("asking Ray to stop it")
        server.kill(job_id)
        if not server.wait_until(lambda: server.job(job_id).ended, limit_s=KILLED_S):
            raise RunError(
                f"{job_id} still runs {KILLED_S:.0f} s after Ray was asked to stop it: Ray kills a job that does not "
                "end within RAY_JOB_STOP_WAIT_TIME_S of its head node"
            )
    return server.job(job_id)


def request_stop(server: JobServer, job_id: str) -> None:
    """Ask a running job to save and to return. Errors: RunError if the cluster does not take it."""
    answer = server.request("PUT", f"/api/packages/gcs/{STOP.format(job_id)}", data=b"stop")
    if answer.status_code != 200:
        raise RunError(f"{server.address} refused the request to stop {job_id}: {answer.status_code} {answer.reason}")


# -- in the job ------------------------------------------------------------------------------------------


def watch_stop_request() -> None:
    """In a submitted job, send this process SIGTERM once it is asked to stop: every verb handles that by saving."""
    job_id, address = submission_id(), os.environ.get("RAY_ADDRESS")
    if job_id and address:
        threading.Thread(target=_watch, args=(job_id, address), daemon=True, name="stop-request").start()


def _watch(job_id: str, address: str) -> None:
    while not _ray_runs():
        time.sleep(LOOK_EVERY_S)
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  (compiled)

    client, listening = GcsClient(address=address), False
    while True:
        with contextlib.suppress(Exception):  # the cluster does not answer: whether it is lost is for the verb to judge
            if not listening:
                client.internal_kv_put(f"gcs://{LISTENS.format(job_id)}".encode(), b"yes", True, None, timeout=5)
                listening = True
            if client.internal_kv_exists(f"gcs://{STOP.format(job_id)}".encode(), None, timeout=5):
                break
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _ray_runs() -> bool:
    """Whether the main thread has started Ray."""
    is_initialized: Any = getattr(sys.modules.get("ray"), "is_initialized", None)  # None while it is imported
    return is_initialized is not None and is_initialized()
