"""A program that starts its own Ray, trains in it, trains without it, and starts its own again: one JSON line.

`python own_ray.py`: in the working directory are the guest's code and `job.yaml`.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

# before Ray is imported, as a program that keeps to loopback sets it: tests listen on no other interface
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import ray

from jobs.train import train


def settings() -> dict[str, Any]:
    """What belongs to the program: its variables, signal handlers, wake-up pipe and loggers."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    return {
        "variables": dict(os.environ),
        "handlers": [signal.getsignal(number) for number in numbers],
        "wakeup": wakeup,
        "levels": [logging.getLogger(name).level for name in ("ray", "ray.train", "ray.tune", "ray.data")],
    }


@ray.remote
def environment() -> dict[str, str]:
    """The variables of a task, which say to whose Ray it belongs."""
    return dict(os.environ)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names of what differs, variables one by one."""
    names = sorted(before["variables"].keys() | after["variables"].keys())
    found = [name for name in names if before["variables"].get(name) != after["variables"].get(name)]
    return found + [name for name in before if name != "variables" and before[name] != after[name]]


def main() -> None:
    """Own Ray -> train in it -> shutdown -> train without -> own Ray and a task again."""
    job = json.loads(Path("job.yaml").read_text())
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    changed: dict[str, list[str]] = {}

    ray.init(num_cpus=4)
    ray.get(environment.remote())
    before = settings()
    print("-- inside", flush=True)
    inside = train(job)
    print("-- outside", flush=True)
    changed["inside"] = differences(before, settings())
    own = ray.is_initialized() and "PATH" in ray.get(environment.remote())
    ray.shutdown()

    before = settings()
    outside = train(job)
    print("-- end", flush=True)
    changed["outside"] = differences(before, settings())

    ray.init(num_cpus=1)
    task = ray.get(environment.remote())
    ray.shutdown()
    losses = [[row["loss"] for row in one.history if row["kind"] == "train"] for one in (inside, outside)]
    answer = {"own": own, "changed": changed, "task": sorted(task), "equal": losses[0] == losses[1]}
    answer["status"] = [inside.status, outside.status]
    print("ANSWER", json.dumps(answer), flush=True)
    os.close(reader)


if __name__ == "__main__":
    sys.exit(main())
