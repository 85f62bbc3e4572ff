"""One driver process for many short runs: it starts Ray once, then trains each job that it reads from stdin.

Started by the fixture `train_shared` of conftest.py. One JSON line in: {"job", "overrides", "cwd", "resume"}; one out,
after the word ANSWER: the result of `jobs.train.train`, or the error it raised.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from jobs.runtime import connected
from jobs.train import train
from raytrain.errors import RaytrainError


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Trains one job in the folder it asks for."""
    os.chdir(request["cwd"])
    try:
        result = train(request["job"], overrides=request["overrides"], resume=request.get("resume"), quiet=True)
    except RaytrainError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"run": result.run, "status": result.status, "steps": result.steps}


def main() -> None:
    """Serves requests until stdin ends."""
    with connected("local", num_cpus=4, num_gpus=0, verbose=False):
        for line in sys.stdin:
            print("ANSWER", json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
