"""Makes relative paths absolute and fills in what the data takes from its model, once on the driver; torch-free."""

from __future__ import annotations

import os
import re
from glob import glob
from typing import Any

from cluster.checks.ray_job import is_submitted
from jobs.job.spec import JobSpec
from raytrain.config.sections import DataConfig, ModelConfig
from raytrain.data.sources.keys import is_path_key
from raytrain.data.sources.tokenised import resolve_text_keys
from raytrain.models.huggingface.folder import KEYS


def resolved(spec: JobSpec) -> JobSpec:
    """The job with absolute paths, and with the data keys that are derived from its model.

    Raises:
        InputError: data and model do not fit together.
    """
    model = resolve_model_paths(spec.model)
    return spec.model_copy(update={"model": model, "data": resolve_paths(resolve_text_keys(spec.data, model))})


def resolve_model_paths(model: ModelConfig) -> ModelConfig:
    """Make `init_from` absolute on the driver and, for builders that read a folder, `path` too."""
    changed = {} if model.init_from is None else {"init_from": _absolute(model.init_from, must_exist=False)}
    if model.builder in KEYS and "path" in model.keys:
        changed["path"] = _absolute(model.keys["path"], must_exist=False)
    return model.model_copy(update=changed) if changed else model


def local_paths(spec: JobSpec, *, missing: bool = False) -> dict[str, str]:
    """Every local path that workers read, by key; the entries of a list are numbered (`key[0]`).

    Args:
        missing: those where nothing exists, instead of those where something does.
    """
    given = {f"data.{key}": value for key, value in spec.data.keys.items()}
    given |= {"model.init_from": spec.model.init_from, "model.path": spec.model.keys.get("path")}
    found = {}
    for key, value in given.items():
        values = value if isinstance(value, list | tuple) else [value]
        for number, path in enumerate(values):
            local = isinstance(path, str) and os.path.isabs(path)
            if local and (os.path.exists(path) or bool(glob(path))) is not missing:
                found[key if len(values) == 1 else f"{key}[{number}]"] = path
    return found


def resolve_paths(data: DataConfig) -> DataConfig:
    """The section with relative paths made absolute on the driver; URIs are unchanged.

    A built-in source declares which of its keys are paths. In a user's own source, a string is a path if its key ends
    like one (`path`, `..._path`, `_file`, `_dir`) and the path exists.
    """
    own = ":" in (data.source or "")
    changed = {
        key: _absolute(value, must_exist=own) for key, value in data.keys.items() if is_path_key(data.source, key)
    }
    return data.model_copy(update=changed) if changed else data


def absolute_path(path: str) -> str:
    """A local path made absolute on this machine; a URI is unchanged."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def path_from_here(path: str) -> str:
    """A path as a user types it: relative where it is below the current folder, otherwise as it is. A submitted job
    runs in a folder of the cluster, where nobody types anything."""
    if "://" in path or not os.path.isabs(path) or is_submitted():
        return path
    try:
        relative = os.path.relpath(path)
    except OSError:  # the current folder was deleted
        return path
    if relative.partition(os.sep)[0] == os.pardir:
        return path
    return f"./{relative}" if relative[0] in "-~$" or "=" in relative else relative  # no option, variable or key


def text_from_here(text: str, path: str) -> str:
    """A text with this path as in `path_from_here`, also where it begins another path."""
    return re.sub(rf"{re.escape(path)}(?![\w-])", lambda _: path_from_here(path), text)


def _absolute(value: Any, *, must_exist: bool) -> Any:
    if isinstance(value, list | tuple):
        return [_absolute(item, must_exist=must_exist) for item in value]
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text or "://" in text:
        return value
    path = absolute_path(text)
    return path if not must_exist or os.path.exists(path) else value
