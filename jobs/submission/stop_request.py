"""A request to save and stop that reaches a job over HTTP: an entry in the cluster's own key-value store.

Ray kills a job 3 s after the SIGTERM of its stop, by default. The entry leaves a job `retry.stop_grace_s` instead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.checks.ray_job import submission_id
from raytrain.errors import RunError

if TYPE_CHECKING:
    from jobs.submission.server import JobServer

LOOK_EVERY_S = 0.5


def request_name(job_id: str) -> str:
    """The entry's name. It is stored like a package, the one kind of entry that can be written over HTTP."""
    return f"raytrain_stop_{job_id}.zip"


def listening_name(job_id: str) -> str:
    """The entry that a job makes once it looks for the request."""
    return f"raytrain_listens_{job_id}.zip"


def request_stop(server: JobServer, job_id: str) -> None:
    """Ask a running job to save and to return. Client side. Errors: RunError if the cluster does not take it."""
    answer = server.request("PUT", f"/api/packages/gcs/{request_name(job_id)}", data=b"stop")
    if answer.status_code != 200:
        raise RunError(f"{server.address} refused the request to stop {job_id}: {answer.status_code} {answer.reason}")


def listens(server: JobServer, job_id: str) -> bool:
    """Whether a command in this job looks for the request. Client side."""
    return server.request("GET", f"/api/packages/gcs/{listening_name(job_id)}").status_code == 200


def watch_stop_request() -> None:
    """In a submitted job, send this process SIGTERM once it is asked to stop: every verb handles that by saving."""
    job_id, address = submission_id(), os.environ.get("RAY_ADDRESS")
    if job_id and address:
        asked = _asked(address, f"gcs://{request_name(job_id)}", listening=f"gcs://{listening_name(job_id)}")
        threading.Thread(target=_watch, args=(asked,), daemon=True, name="stop-request").start()


def _watch(asked: Callable[[], bool]) -> None:
    while not asked():
        time.sleep(LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _asked(address: str, name: str, *, listening: str) -> Callable[[], bool]:
    """Looks for the entry `name`, and makes the entry `listening`, once the main thread has started Ray."""
    clients: list[Any] = []
    said: list[bool] = []

    def look() -> bool:
        if not clients:
            is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)  # None while it is imported
            if is_initialized is None or not is_initialized():
                return False
            from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  (compiled)

            clients.append(GcsClient(address=address))
        try:
            if not said:
                clients[0].internal_kv_put(listening.encode(), b"yes", True, None, timeout=5)
                said.append(True)
            return bool(clients[0].internal_kv_exists(name.encode(), None, timeout=5))
        except Exception:  # the cluster does not answer: whether it is lost is for the verb to judge
            return False

    return look
