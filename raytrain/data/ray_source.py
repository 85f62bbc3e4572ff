"""A Ray Dataset that a user's function returns: written once as Parquet, then read like any other.

Ray Data's own iterator has no order that a seed fixes and no way to begin in the middle of an epoch, which an exact
resume needs; row groups on shared storage have both (`raytrain.data.groups`). What was written stays, under a name made
of the function and its keys, so that a resumed run reads the same rows in the same order.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
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
    """Parquet files of one or two Ray Datasets; what the driver hands to the workers in place of the function."""

    train: str
    eval: str | None


def is_ray_dataset(value: Any) -> bool:
    """Whether it is one; Ray is not imported for the question."""
    return type(value).__module__.split(".")[0] == "ray"


def is_up() -> bool:
    """Whether this process is connected to Ray."""
    ray: Any = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def dataset_folder(source: str, function: Callable[..., Any], keys: Mapping[str, Any]) -> str:
    """Where what this function returns for these keys is written: another text of it is another folder."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = ""
    told = json.dumps([source, text, {name: repr(value) for name, value in sorted(keys.items())}])
    name = f"{source.replace(':', '-')}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    return os.path.abspath(os.path.join(FOLDER, name))


def write_datasets(result: Mapping[str, Any], folder: str, *, was_up: bool) -> WrittenDataset:
    """Write the Ray Datasets of a function's result, unless that was done before.

    Args:
        result: {"train": ..., "eval": ...} of Ray Datasets.
        folder: `dataset_folder`.
        was_up: whether Ray ran before the function was called; where not, what the function started is ended.
    Raises:
        InputError: the one is a Ray Dataset and the other is not, or it cannot be read.
    """
    import ray

    parts = {name: value for name, value in result.items() if value is not None}
    others = [name for name, value in parts.items() if not is_ray_dataset(value)]
    if others:
        seen = f"a {type(parts[others[0]]).__name__} for {others[0]} beside a Ray Dataset"
        raise InputError("data.source", seen=seen, expected="Ray Datasets for both")
    try:
        if not os.path.exists(os.path.join(folder, COMPLETE)):
            _write(parts, folder)
    except (ray.exceptions.RayError, OSError, ValueError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise InputError("data.source", seen=f"a Ray Dataset that cannot be read: {why}", expected="rows") from error
    finally:
        if not was_up:
            ray.shutdown()
    held = os.path.join(folder, "eval") if "eval" in parts else None
    return WrittenDataset(os.path.join(folder, "train"), held)


def _write(parts: Mapping[str, Any], folder: str) -> None:
    from ray.data import DataContext

    context = DataContext.get_current()
    kept = context.execution_options.preserve_order
    context.execution_options.preserve_order = True
    shutil.rmtree(folder, ignore_errors=True)  # a writer that was killed left no COMPLETE
    try:
        for name, dataset in parts.items():
            dataset.write_parquet(os.path.join(folder, name), row_group_size=GROUP_ROWS)
    finally:
        context.execution_options.preserve_order = kept
    with open(os.path.join(folder, COMPLETE), "w") as file:
        file.write("written by raytrain from a Ray Dataset\n")
