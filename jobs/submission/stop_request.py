"""A request to save and stop that reaches a job over HTTP: an entry in the cluster's own key-value store.

Ray kills a job 3 s after the SIGTERM of its stop, by default. The entry leaves a job `retry.stop_grace_s` instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cluster.checks.ray_job import JOB_ENVIRONMENT

if TYPE_CHECKING:
    from jobs.submission.server import JobServer

LOOK_EVERY_S = 0.5


def request_name(job_id: str) -> str:
    """The entry's name. It is stored like a package, the one kind of entry that can be written over HTTP."""
    return f"raytrain_stop_{job_id}.zip"


def request_stop(server: JobServer, job_id: str) -> None:
    """Ask a running job to save and to return. Client side."""
    response = server.request("PUT", f"/api/packages/gcs/{request_name(job_id)}", data=b"stop")
    response.raise_for_status()


def submission_id(environ: Mapping[str, str] | None = None) -> str | None:
    """The ID of the job that this process is the command of; None outside a submitted job."""
    text = (os.environ if environ is None else environ).get(JOB_ENVIRONMENT)
    return json.loads(text).get("metadata", {}).get("job_submission_id") if text else None


def watch_stop_request() -> None:
    """In a submitted job, send this process SIGTERM once it is asked to stop: every verb handles that by saving."""
    job_id, address = submission_id(), os.environ.get("RAY_ADDRESS")
    if job_id and address:
        asked = _asked(address, f"gcs://{request_name(job_id)}")
        threading.Thread(target=_watch, args=(asked,), daemon=True, name="stop-request").start()


def _watch(asked: Callable[[], bool]) -> None:
    while not asked():
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _asked(address: str, name: str) -> Callable[[], bool]:
    """Looks for the entry, once the main thread has set Ray's variables and imported Ray."""
    clients: list[Any] = []

    def look() -> bool:
        if not clients:
            is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)  # None while it is imported
            if is_initialized is None or not is_initialized():
                return False
            from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  (compiled)

            clients.append(GcsClient(address=address))
        try:
            return bool(clients[0].internal_kv_exists(name.encode(), None, timeout=5))
        except Exception:  # the cluster does not answer: whether it is lost is for the verb to judge
            return False

    return look
