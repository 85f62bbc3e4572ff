"""The process that calls a user's function and writes its Ray Datasets (`raytrain.data.sources.ray_dataset`)."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any

from cluster.environment import leave_rays_warnings, take_variables
from raytrain.config.user_code import make_importable, resolve
from raytrain.data.sources.ray_dataset import COMPLETE, GROUP_ROWS, is_ray_dataset
from raytrain.errors import RaytrainError
from raytrain.execution.ray_start import start_ray
from raytrain.models.registry import call_builder


def write_datasets(request: dict[str, Any]) -> dict[str, Any]:
    """Call the function and write the Ray Datasets that it returns.

    Ray is started by the first call that needs it, which is `ray.init` of the function itself, or Ray's own call of it:
    a function that returns something else, from a module that only imports Ray, starts none.
    """
    leave_rays_warnings()
    import ray

    rays_own, failed = ray.init, list[RaytrainError]()

    def start(*_: Any, **__: Any) -> Any:
        if not ray.is_initialized():
            ray.init = rays_own
            try:
                start_ray(**request["cluster"], imports="ray.data", key="RAY_ADDRESS")
            except RaytrainError as error:
                failed.append(error)
                raise
            finally:
                ray.init = start
        return rays_own(ignore_reinit_error=True)

    ray.init = start
    make_importable(os.getcwd())
    take_variables()
    try:
        return _called_and_written(request)
    except Exception:
        if failed:  # not the fault of the function
            return {"ray": [str(failed[0]), vars(failed[0])]}
        raise


def _called_and_written(request: dict[str, Any]) -> dict[str, Any]:
    import ray

    function = resolve(request["source"], key="data.source")
    made = call_builder(function, request["keys"], sections={}, key="data")
    result = made if isinstance(made, dict) else {}
    parts = {name: value for name, value in result.items() if value is not None}
    others = [name for name, value in parts.items() if not is_ray_dataset(value)]
    if not parts or len(others) == len(parts):
        return {"written": False}
    if others:
        return {"mixed": f"a {type(parts[others[0]]).__name__} for {others[0]} together with a Ray Dataset"}
    ray.init()  # a function that only describes rows has not used Ray yet
    from ray.data import DataContext

    folder = request["folder"]
    DataContext.get_current().execution_options.preserve_order = True  # the same dataset always gives the same rows
    shutil.rmtree(folder, ignore_errors=True)  # left by a process that was killed before COMPLETE
    for name, dataset in parts.items():
        dataset.write_parquet(os.path.join(folder, name), row_group_size=GROUP_ROWS)
    with open(os.path.join(folder, COMPLETE), "w") as file:
        json.dump({"parts": [*parts, *(["none"] if "eval" in result and "eval" not in parts else [])]}, file)
    return {"written": True}


if __name__ == "__main__":
    print(json.dumps(write_datasets(json.loads(sys.argv[1]))), flush=True)
