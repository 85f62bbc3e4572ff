"""In a submitted job: a request to save and stop, which comes over the cluster's own storage.

Ray's own stop is SIGTERM, and after 3 s SIGKILL: too short for a save. `submit stop` therefore puts an entry where the
command in the job looks, and asks Ray only if the job does not end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

from cluster.preflight import submission_id

LOOK_EVERY_S = 0.5
STOP, LISTENS = "raytrain_stop_{}.zip", "raytrain_listens_{}.zip"
"""The entries of a job, by its ID: it is asked to stop; it looks for that. The job server takes and finds both as if
they were packages of files."""


def watch_stop_request() -> None:
    """In a submitted job, send this process SIGTERM once it is asked to stop: every verb handles that by saving."""
    job_id, address = submission_id(), os.environ.get("RAY_ADDRESS")
    if job_id and address:
        threading.Thread(target=_watch, args=(job_id, address), daemon=True, name="stop-request").start()


def _watch(job_id: str, address: str) -> None:
    while not getattr(sys.modules.get("ray"), "is_initialized", bool)():  # None and no attribute: not imported yet
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
