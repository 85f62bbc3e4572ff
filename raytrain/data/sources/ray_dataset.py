"""Write a Ray Dataset that a user's function returns to Parquet once, then read it like any Parquet source.

An exact resume needs an order fixed by a seed and a way to start in the middle of an epoch. Ray Data's own iterator has
neither; row groups on shared storage have both (`raytrain.data.sources.row_groups`). The files are kept under a name
derived from the function and its keys, so that a resumed run reads the same rows in the same order.

A separate process calls the function (`python -m raytrain.execution.dataset_writer`), in a private cluster on this
machine or in the cluster of RAY_ADDRESS, since the run's own does not exist yet: Ray is started when the function first
uses it.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.environment import LOOPBACK, ray_environment, variables_kept_from_ray
from cluster.network import loopback_only
from cluster.ray_runtime import private_ray
from raytrain.config.user_code import imported_names, is_users_file
from raytrain.errors import InputError, RunError

FOLDER = "datasets"
"""In the working directory of the command, which must be visible to all nodes."""

COMPLETE = "COMPLETE"
GROUP_ROWS = 65_536


@dataclass(frozen=True)
class WrittenDataset:
    """Parquet files of one or two Ray Datasets, which the driver sends to the workers instead of the function."""

    # train, eval: the folders of the files
    train: str
    eval: str | None
    holds_out: bool  # whether part of `train` is held out for evaluation, because the function returned no `eval` key


def is_ray_dataset(value: Any) -> bool:
    """Whether `value` is a Ray Dataset; Ray is not imported to find out."""
    return type(value).__module__.split(".")[0] == "ray"


def imports_ray(function: Callable[..., Any]) -> bool:
    """Whether the function's module imports Ray, itself or through other modules of the user; if not, the function
    returns no Ray Dataset. Nothing is imported to find out."""
    start = getattr(inspect.unwrap(function), "__module__", None)
    package = str(start).split(".")[0]
    left, seen = [start], set[str]()
    while left:
        name = left.pop()
        if not isinstance(name, str) or name in seen:
            continue
        seen.add(name)
        found = _users_module(name, package=package)
        if found is None:
            continue
        tree, parent = found
        targets = {name for node in ast.walk(tree) for name in imported_names(node, parent.split("."))}
        if any(target.split(".")[0] == "ray" for target in targets):
            return True
        left += targets
    return False


def _users_module(name: str, *, package: str) -> tuple[ast.Module, str] | None:
    """A module of the user, or of the `package` that holds the function, and its own package; None for others and for
    names that are no modules."""
    parent = name.rpartition(".")[0]
    if name not in sys.modules and parent and parent not in sys.modules:
        return None  # to look for it would import its parent
    try:
        spec = getattr(sys.modules.get(name), "__spec__", None) or importlib.util.find_spec(name)
        path = getattr(sys.modules.get(name), "__file__", None) or (spec.origin if spec is not None else None)
        if path is None or not (is_users_file(path) or name.split(".")[0] == package):
            return None
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (ImportError, OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return None
    is_package = os.path.basename(path).startswith("__init__.")
    return tree, name if is_package else parent


def written_datasets(source: str, function: Callable[..., Any], keys: Mapping[str, Any]) -> WrittenDataset | None:
    """Return the written Ray Datasets of this function, writing them if needed; None if it returns something else.
    Raises InputError: the function failed, or returned an unreadable Ray Dataset, or mixed one with another object."""
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        text = ""
    identity = json.dumps([source, text, {name: repr(value) for name, value in sorted(keys.items())}])
    name = f"{source.replace(':', '-')}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    folder = os.path.abspath(os.path.join(FOLDER, name))
    known = os.path.exists(os.path.join(folder, COMPLETE))
    if not known and not _write_in_process(source, keys, folder):
        return None
    with open(os.path.join(folder, COMPLETE)) as file:
        parts = json.load(file)["parts"]
    held = os.path.join(folder, "eval") if "eval" in parts else None
    return WrittenDataset(os.path.join(folder, "train"), held, holds_out=parts == ["train"])


def _write_in_process(source: str, keys: Mapping[str, Any], folder: str) -> bool:
    request = {"source": source, "keys": dict(keys), "folder": folder}
    address = os.environ.get("RAY_ADDRESS") or "local"
    local = address == "local"
    environment = {**ray_environment(local_cluster=local, quiet=True), **os.environ}
    environment |= LOOPBACK if loopback_only(address) else {}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment["RAY_ENABLE_AUTO_CONNECT"] = "1"  # Ray is started by the function's first call that needs it
    with contextlib.ExitStack() as stack:
        folder_of_ray, options = "", dict[str, Any]()
        if local:
            private = stack.enter_context(private_ray())
            private.set_environment(environment)
            folder_of_ray, options = private.folder, dict(private.options)
        stack.enter_context(variables_kept_from_ray(environment))
        cluster = {"address": address, "folder": folder_of_ray, "options": {"log_to_driver": False, **options}}
        try:
            text = json.dumps({**request, "cluster": cluster})
        except TypeError as error:
            raise InputError(
                "data", got=f"a value that JSON cannot represent ({error})", expected="plain values"
            ) from error
        command = [sys.executable, "-m", "raytrain.execution.dataset_writer", text]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    answer = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if done.returncode or answer is None:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise InputError("data.source", got=f"{source}, which failed: {last}", expected="datasets")
    result = json.loads(answer)
    if "ray" in result:
        text, fields = result["ray"]
        raise InputError(**fields) if fields else RunError(text)
    if "mixed" in result:
        raise InputError("data.source", got=result["mixed"], expected="Ray Datasets for both")
    return bool(result["written"])
