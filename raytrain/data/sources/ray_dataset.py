"""A Ray Dataset that a user's function returns: written once as Parquet, then read like any other.

Ray Data's own iterator has no order that a seed fixes and no way to begin in the middle of an epoch, which an exact
resume needs; row groups on shared storage have both (`raytrain.data.sources.row_groups`). What was written stays, under
a name made of the function and its keys, so that a resumed run reads the same rows in the same order.

A process of its own calls the function (`python -m raytrain.data.sources.ray_dataset`), in a small cluster on this
machine or
in that of RAY_ADDRESS: Ray Data starts Ray as soon as it is used, and the run's own cluster comes later.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raytrain.errors import InputError

FOLDER = "datasets"
"""In the directory of the command, which all nodes must see."""

COMPLETE = "COMPLETE"
GROUP_ROWS = 65_536


@dataclass(frozen=True)
class WrittenDataset:
    """Parquet files of one or two Ray Datasets; what the driver hands to the workers in place of the function.

    Attributes:
        train, eval: their folders.
        holds_out: whether part of `train` is to be kept for evaluation: the function said nothing of one.
    """

    train: str
    eval: str | None
    holds_out: bool


def is_ray_dataset(value: Any) -> bool:
    """Whether it is one; Ray is not imported for the question."""
    return type(value).__module__.split(".")[0] == "ray"


def mentions_ray(function: Callable[..., Any]) -> bool:
    """Whether the module of a function speaks of Ray at all; one that does not gives no Ray Dataset."""
    try:
        text = inspect.getsource(inspect.getmodule(function) or function)
    except (OSError, TypeError):
        return False
    return re.search(r"\bray\b", text) is not None


def written_datasets(
    source: str, function: Callable[..., Any], keys: Mapping[str, Any], *, seed: int
) -> WrittenDataset | None:
    """What the Ray Datasets of this function were written to, now or before; None where it returns something else.

    Raises:
        InputError: it failed, or gave a Ray Dataset that cannot be read, or one beside something else.
    """
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = ""
    told = json.dumps([source, text, {name: repr(value) for name, value in sorted(keys.items())}])
    name = f"{source.replace(':', '-')}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    folder = os.path.abspath(os.path.join(FOLDER, name))
    known = os.path.exists(os.path.join(folder, COMPLETE))
    if not known and not _written_by_a_process(source, keys, folder, seed=seed):
        return None
    with open(os.path.join(folder, COMPLETE)) as file:
        parts = json.load(file)["parts"]
    held = os.path.join(folder, "eval") if "eval" in parts else None
    return WrittenDataset(os.path.join(folder, "train"), held, holds_out=parts == ["train"])


def _written_by_a_process(source: str, keys: Mapping[str, Any], folder: str, *, seed: int) -> bool:
    try:
        orders = json.dumps({"source": source, "keys": dict(keys), "folder": folder, "seed": seed})
    except TypeError as error:
        raise InputError("data", seen=f"a value that JSON cannot hold ({error})", expected="plain values") from error
    command = [sys.executable, "-m", "raytrain.data.sources.ray_dataset", orders]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = _environment() | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    answer = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if done.returncode or answer is None:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError("data.source", seen=f"{source}, which failed: {last}", expected="datasets")
    told = json.loads(answer)
    if "mixed" in told:
        raise InputError("data.source", seen=told["mixed"], expected="Ray Datasets for both")
    return bool(told["written"])


def _environment() -> dict[str, str]:
    """This process's variables; a cluster of the reader's own gets none of those by which Ray's processes know each
    other: a run before this one left the path of a token that is gone."""
    own = not os.environ.get("RAY_ADDRESS")
    return {name: value for name, value in os.environ.items() if not (own and name.startswith("RAY_AUTH_"))}


def _main(orders: dict[str, Any]) -> dict[str, Any]:
    """In the process: call the function, write what it gives where those are Ray Datasets."""
    import ray

    from raytrain.config.user_code import make_importable, resolve
    from raytrain.models.registry import call_builder

    make_importable(os.getcwd())
    address = os.environ.get("RAY_ADDRESS")
    local: dict[str, Any] = {} if address else {"include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(address=address or "local", log_to_driver=False, **local)
    function = resolve(orders["source"], key="data.source")
    result = call_builder(function, orders["keys"], sections={"seed": orders["seed"]}, key="data")
    parts = {name: value for name, value in result.items() if value is not None} if isinstance(result, dict) else {}
    others = [name for name, value in parts.items() if not is_ray_dataset(value)]
    if not parts or len(others) == len(parts):
        return {"written": False}
    if others:
        return {"mixed": f"a {type(parts[others[0]]).__name__} for {others[0]} beside a Ray Dataset"}
    _write(parts, orders["folder"], named=list(result))
    return {"written": True}


def _write(parts: Mapping[str, Any], folder: str, *, named: list[str]) -> None:
    """Blocks in their own order, so that the same dataset is written as the same rows."""
    from ray.data import DataContext

    DataContext.get_current().execution_options.preserve_order = True
    shutil.rmtree(folder, ignore_errors=True)  # a writer that was killed left no COMPLETE
    for name, dataset in parts.items():
        dataset.write_parquet(os.path.join(folder, name), row_group_size=GROUP_ROWS)
    with open(os.path.join(folder, COMPLETE), "w") as file:
        json.dump({"parts": [*parts, *(["none"] if "eval" in named and "eval" not in parts else [])]}, file)


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(sys.argv[1]))), flush=True)
