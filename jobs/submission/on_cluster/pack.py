"""Runs on the cluster, as a job: packs the run folder of a job, where the job server can serve it, and waits.

Its text is the whole job, so it imports the standard library only. Arguments: the folder of the runs, and the ID of the
job. It prints one JSON line: the archive's name or what is wrong. The archive's first member lists the size and the
SHA-256 of each file. SIGTERM, or the end of `KEEP_S`, removes the archive.
"""

import hashlib
import io
import json
import os
import signal
import sys
import tarfile
import time

KEEP_S = 3600
LISTING = "FILES.json"


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


def files_of(run: str) -> list[str]:
    """Every file of the run, below its folder."""
    found = [os.path.relpath(os.path.join(folder, name), run) for folder, _, names in os.walk(run) for name in names]
    return sorted(name for name in found if not os.path.islink(os.path.join(run, name)))


def sha256(path: str) -> str:
    """The digest of a file."""
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def pack(run: str, archive: str) -> int:
    """Write the archive; returns its size in bytes."""
    listing = {
        name: {"bytes": os.path.getsize(os.path.join(run, name)), "sha256": sha256(os.path.join(run, name))}
        for name in files_of(run)
    }
    content = json.dumps(listing).encode()
    with tarfile.open(archive, "w") as tar:
        entry = tarfile.TarInfo(LISTING)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
        for name in listing:
            tar.add(os.path.join(run, name), arcname=name, recursive=False)
    return os.path.getsize(archive)


def leave(number: int, frame: object) -> None:
    """Ends the wait at a signal."""
    raise SystemExit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    save_dir, job_id = os.path.expandvars(os.path.expanduser(sys.argv[1])), sys.argv[2]
    logs = os.path.dirname(os.readlink("/proc/self/fd/1"))  # Ray writes what a job prints to a file there
    archive = os.path.join(logs, f"raytrain-fetch-{os.getpid()}.tar")
    run = run_of(save_dir, job_id)
    if run is None:
        print(json.dumps({"missing": True, "host": os.uname().nodename}), flush=True)
        raise SystemExit(0)
    try:
        size = pack(run, archive)
        print(json.dumps({"run": run, "archive": os.path.basename(archive), "bytes": size}), flush=True)
        time.sleep(KEEP_S)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    finally:
        if os.path.exists(archive):
            os.remove(archive)
