"""What `submit` runs on the cluster as a short job: `versions` prints the versions there, and `pack` archives a run.

The text of this module is the whole job, so it imports the standard library only. It prints its answer as one line of
JSON.
"""

import hashlib
import json
import os
import platform
import signal
import sys
import tarfile
import time
from importlib import metadata

KEEP_S = 3600


def versions() -> dict[str, str | None]:
    """The versions that a job must find as they are where it was submitted; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": None, "ray": None}
    for name in ("torch", "ray"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def run_of(save_dir: str, job_id: str) -> str | None:
    """The newest run folder that a command of this job has written to."""
    found = []
    for name in os.listdir(save_dir) if os.path.isdir(save_dir) else []:
        events = os.path.join(save_dir, name, "events.jsonl")
        if os.path.islink(os.path.join(save_dir, name)) or not os.path.isfile(events):
            continue
        with open(events) as file:
            rows = [json.loads(line) for line in file if '"driver_start"' in line]
        if any(row.get("ray_job") == job_id for row in rows):
            found.append((os.path.getmtime(events), os.path.join(save_dir, name)))
    return max(found)[1] if found else None


def pack(run: str, archive: str) -> dict[str, str | int]:
    """Write the files of a run to an archive; returns what identifies it."""
    with tarfile.open(archive, "w") as tar:
        tar.add(run, arcname=".", filter=lambda entry: None if entry.issym() else entry)
    with open(archive, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"run": run, "archive": os.path.basename(archive), "bytes": os.path.getsize(archive), "sha256": digest}


def serve(save_dir: str, job_id: str) -> None:
    """Pack the run of a job where the job server can serve it, and keep it until SIGTERM or for `KEEP_S`."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    logs = os.path.dirname(os.readlink("/proc/self/fd/1"))  # Ray writes what a job prints to a file there
    archive = os.path.join(logs, f"raytrain-fetch-{os.getpid()}.tar")
    run = run_of(os.path.expandvars(os.path.expanduser(save_dir)), job_id)
    try:
        answer = {"missing": True, "host": os.uname().nodename} if run is None else pack(run, archive)
        print(json.dumps(answer), flush=True)
        time.sleep(0 if run is None else KEEP_S)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    finally:
        if os.path.exists(archive):
            os.remove(archive)


if __name__ == "__main__":
    if sys.argv[1] == "versions":
        print(json.dumps(versions()), flush=True)
    else:
        serve(*sys.argv[2:])
