"""Replicas of two stages in a cluster of three CPUs: with too little room, with room for one of three, and with a stage
that is killed at each start. What became of the jobs, as one JSON line."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.environment import ray_environment

os.environ.update(ray_environment())
os.environ["RAY_AUTH_MODE"] = "disabled"

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from jobs.infer import infer
from raytrain.errors import RunError
from raytrain.infer.stages import actors

CPUS = 3
#: The parts of a model whose stages are given are not timed first.
MAP = "infer.stage_map=[net.0, 'net.2, net.4']"


def run(output: str, workers: int, *more: str) -> str:
    """Run the job; the text of its error, if it has one."""
    given = [
        "model.init_from=model.safetensors", "infer.input=in.parquet", "infer.unit_rows=20", "infer.batch_size=5",
        "scale.threads=1", "infer.stages=2", MAP, f"infer.output={output}", f"scale.workers={workers}", *more,
    ]  # fmt: skip
    try:
        infer("staged:build", overrides=given, quiet=True)
    except RunError as error:
        return str(error)
    return ""


def without_room() -> dict[str, Any]:
    """Another job holds two of the CPUs."""
    other: Any = placement_group([{"CPU": 2}])
    ray.get(other.ready())
    error = with_limit(2.0, lambda: run("none", 2))
    groups = placement_group_table()
    left = [group["state"] for key, group in groups.items() if key != other.id.hex() and group["state"] != "REMOVED"]
    remove_placement_group(other)
    return {"error": error, "left": left}


def with_room_for_one() -> dict[str, Any]:
    """Three replicas are asked for; the fewest CPUs that were free meanwhile."""
    ended, free = threading.Event(), [CPUS]

    def watch() -> None:
        while not ended.wait(0.02):
            free.append(int(ray.available_resources().get("CPU", 0)))

    watching = threading.Thread(target=watch)
    watching.start()
    error = run("three", 3)
    ended.set()
    watching.join()
    return {"error": error, "free": min(free)}


def with_limit(seconds: float, what: Callable[[], str]) -> str:
    """Call with another `ROOM_S`."""
    before, actors.ROOM_S = actors.ROOM_S, seconds
    try:
        return what()
    finally:
        actors.ROOM_S = before


def main() -> None:
    """argv: Ray's temp dir, a folder with staged.py, its weights and in.parquet."""
    folder = Path(sys.argv[2])
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    ray.init(
        address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False, logging_level=40,
        _temp_dir=sys.argv[1],
    )  # fmt: skip
    answer: dict[str, Any] = {"without room": without_room(), "three": with_room_for_one()}
    answer["killed"] = run("killed", 1, f"model.always={folder / 'starts'}")
    print("ANSWER", json.dumps(answer), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
