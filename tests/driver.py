"""One driver process for many short runs: it starts Ray once, then trains each job that it reads from stdin.

Started by the fixture `train_shared` of conftest.py. It reads JSON lines {"job", "overrides", "cwd", "resume"} and
answers each with a JSON line after the prefix ANSWER: the result of `jobs.train.train`, or the error it raised. With
{"script"} instead of a job it runs that file and answers with its output. Shortly before "timeout" it writes to stderr
where it is, and what holds the machine.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import runpy
import sys
import threading
from typing import Any

import ray
from ray.util import placement_group_table

from jobs.driver.runtime import connected
from jobs.train import train
from raytrain.errors import RaytrainError


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Trains one job in the folder that the request names."""
    os.chdir(request["cwd"])
    if "script" in request:
        return {"out": run_script(request["script"])}
    try:
        result = train(request["job"], overrides=request["overrides"], resume=request.get("resume"), quiet=True)
    except RaytrainError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"run": result.run, "status": result.status, "steps": result.steps}


def run_script(path: str) -> str:
    """Runs a script in this process, where Ray is running, as in a notebook; returns its output."""
    printed, before = io.StringIO(), list(sys.path)
    sys.path.insert(0, os.path.dirname(path))
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            runpy.run_path(path, run_name="__main__")
    finally:
        sys.path[:] = before
    return printed.getvalue()


def write_state() -> None:
    """The stacks of all threads, free resources and placement groups, to stderr."""
    faulthandler.dump_traceback()
    groups = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
    print("free:", ray.available_resources(), "\ngroups:", groups, file=sys.stderr, flush=True)


def main() -> None:
    """Serves requests until stdin ends."""
    with connected("local", num_cpus=4, num_gpus=0, verbose=False):
        for line in sys.stdin:
            request = json.loads(line)
            late = threading.Timer(0.9 * request["timeout"], write_state)
            late.start()
            found = answer(request)
            late.cancel()
            print("ANSWER", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
