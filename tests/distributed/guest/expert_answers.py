"""Answers the prompts of a folder with a run whose experts are on hosts, in the Ray of the shared driver: once with a
host that is killed after two units, once with two workers and fewer rows. Prints what became of them as JSON."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from ray.data import DataContext

from jobs.infer import infer
from raytrain.infer import ray_data

FOLDER = Path(__file__).parent
GIVEN = json.loads((FOLDER / "given.json").read_text())


def answered(output: str, *overrides: str) -> dict[str, Any]:
    """The summary of a job."""
    result = infer(GIVEN["run"], output=str(FOLDER / output), overrides=[*GIVEN["overrides"], *overrides], quiet=True)
    return result.summary


def processes(title: bytes) -> list[tuple[int, int]]:
    """(when it started, pid) of this cluster's processes with a title, the first one first."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            raylets = (Path("/proc") / fields[1] / "stat").read_text().rpartition(")")[2].split()
            if int(raylets[1]) == os.getpid() and title in (entry / "cmdline").read_bytes():
                found.append((int(fields[19]), int(entry.name)))
        except OSError:
            continue
    return sorted(found)


def oldest_host() -> int | None:
    """The expert host of this cluster that started first, so not the stand-by."""
    found = processes(b"::ExpertHost")
    return found[0][1] if found else None


def most_workers(most: list[int], over: threading.Event) -> None:
    """Note how many workers of a job there are at the same time, until it is over."""
    while not over.wait(0.05):
        most[0] = max(most[0], len(processes(b"(UnitActor)")))


def kill_after_two_units(folder: Path, killed: list[int]) -> None:
    """Kill a host once two units are complete; notes how many are."""
    ends = time.monotonic() + 100
    while time.monotonic() < ends:
        units = len(list(folder.glob("parts/*.parquet")))
        pid = oldest_host()
        if units >= 2 and pid is not None:
            os.kill(pid, signal.SIGKILL)
            killed.append(units)
            return
        time.sleep(0.01)


def main() -> None:
    # no worker is done before the other has begun; in a cluster that others use, one is enough for a start
    DataContext.get_current().wait_for_min_actors_s = 100
    run_units = ray_data.run_units
    ray_data.run_units = lambda *given, **named: run_units(*given, **{**named, "at_once": named["workers"]})
    killed: list[int] = []
    watching = threading.Thread(target=kill_after_two_units, args=(FOLDER / "hosts", killed))
    watching.start()
    hosts = answered("hosts", "experts.hosts=2")
    watching.join()
    most, over = [0], threading.Event()
    counting = threading.Thread(target=most_workers, args=(most, over))
    counting.start()
    both = answered("two", "experts.hosts=1", "scale.workers=2", f"infer.max_samples={GIVEN['few']}")
    over.set()
    counting.join()
    print("SEEN", json.dumps({"killed": killed, "hosts": hosts, "two": both, "workers": most[0]}))


main()
