"""The execution environment of a run: the variables to start Ray with, and the content of environment.json."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cluster.devices.gpus import driver_version
from cluster.devices.inventory import Inventory, local_inventory

# fmt: off
PACKAGES = ("raytrain", "torch", "ray", "numpy", "pyarrow", "pydantic", "safetensors", "transformers")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_AFFINITY",
    "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "RAY_ADDRESS", "RAY_TMPDIR", "LD_PRELOAD",
)
# fmt: on
"""Environment variables that can change the speed or the numerics of a run; none of them is secret."""


UNCACHED = "glibc.malloc.tcache_count=0"
"""Makes glibc (measured: 2.36) reuse the memory of freed tensors. torch aligns tensors to 64 bytes, for which glibc
splits off up to 96 bytes around each. Kept in a thread's cache, these pieces are not joined with the tensor's memory
when it is freed, so that another tensor of the same size does not fit there, and the heap grows: a process that trained
the default recipe, whose experts get different rows in each step, to 2,340 MiB within 10 steps where 390 MiB were in
use. Without these caches it stayed at 500 MiB."""

DEATH_NOTICE = (
    "A worker died or was killed while executing a task by an unexpected system error"
    "|Raylet is terminated|has been marked dead because"
)
"""Matches the messages that Ray prints on the driver for every process or node that dies."""


LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With it Ray's address of this machine is 127.0.0.1, also where Ray is given that address to connect to."""


def ray_environment(*, local_cluster: bool = True, quiet: bool = False) -> dict[str, str]:
    """Environment variables to set before the first ``import ray``, with their values.

    Variables set by the user take precedence; merge with ``{**ray_environment(), **os.environ}``. The reasons, all
    measured:

    - Health checks: Ray polls its workers every 2 s, and the end of a run waits for two polls. Each poll delays the
      training thread: polling every 0.2 s cost a small model 4 % of its time.
    - Niceness: Ray starts workers at niceness 15, so that on a busy machine every other process runs first.
    - Printed lines appear twice, and workers change into an artifacts directory.
    - The state of a sweep is saved too rarely to be resumed.
    - Usage statistics are not sent.
    - Auto-connect: a Ray call after the end of the run would start another cluster, which listens on all interfaces.
    - `CUDA_DEVICE_ORDER`: an index means the same GPU for torch, Ray and NVML.

    A local cluster keeps every port on loopback, which is not Ray's default, and does not watch for preemption of the
    machine. Its processes inherit glibc's allocator without the caches of its threads (`UNCACHED`).

    Args:
        quiet: do not print Ray's messages about a process that died (`DEATH_NOTICE`) on the driver: the run reports it
            itself. Other messages of Ray and everything that workers print are still shown.
    """
    variables = {
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
        "RAY_worker_niceness": "0",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "TUNE_GLOBAL_CHECKPOINT_S": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if local_cluster:
        variables |= LOOPBACK
        variables["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
        variables["RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"] = "0"  # Ray Train's own default for its controller
        variables["GLIBC_TUNABLES"] = UNCACHED
    if quiet:
        variables["RAY_DEDUP_LOGS_SKIP_REGEX"] = DEATH_NOTICE
    return variables


#: Variables that a command changes in its own process besides those of Ray: it chooses devices, and Ray a debugger.
CHANGED = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GLIBC_TUNABLES", "PYTHONBREAKPOINT")
RAYS_OWN = ("RAY_", "TUNE_", "RAYTRAIN_PRELOAD")
"""Beginnings of the names of Ray's variables, and of the one that the processes of a private cluster read."""


@contextlib.contextmanager
def restored_environment(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Context manager after which the variables of Ray, and those of `CHANGED`, are as they were before.

    A program that trains from Python may start a Ray of its own afterwards, for which ours would be wrong. Other
    variables are left alone: they may be the program's.
    """

    def relevant() -> dict[str, str]:
        return {name: value for name, value in environ.items() if name.startswith(RAYS_OWN) or name in CHANGED}

    before = relevant()
    try:
        with warnings.catch_warnings():
            leave_rays_warnings()
            yield
    finally:
        for name in relevant().keys() - before.keys():
            environ.pop(name, None)
        environ.update(before)


# fmt: off
#: Meant for the user's program. A daemon of Ray would end at its first warning (PYTHONWARNINGS=error), or without its
#: docstrings (PYTHONOPTIMIZE=2).
FOR_THE_PROGRAM = (
    "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONINSPECT", "PYTHONVERBOSE", "PYTHONASYNCIODEBUG", "PYTHONOPTIMIZE",
)
# fmt: on
KEPT = "RAYTRAIN_FOR_THE_PROGRAM"  # hands them to the processes of a private cluster


@contextlib.contextmanager
def variables_kept_from_ray(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Context manager in which processes of Ray are started: without what is meant for the user's program."""
    kept = {name: environ.pop(name) for name in FOR_THE_PROGRAM if name in environ}
    environ[KEPT] = json.dumps(kept)
    try:
        yield
    finally:
        environ.pop(KEPT, None)
        environ.update(kept)


def take_variables(environ: MutableMapping[str, str] = os.environ) -> None:
    """In a process of a private cluster that runs the user's program: it has its variables again, from now on."""
    kept: dict[str, str] = json.loads(environ.pop(KEPT, "{}"))
    environ.update(kept)
    if "PYTHONWARNINGS" in kept:
        warnings._processoptions(kept["PYTHONWARNINGS"].split(","))  # pyright: ignore[reportAttributeAccessIssue]
        leave_rays_warnings()


def leave_rays_warnings() -> None:
    """From now on, warnings about code of Ray are no errors in this process: it works with them."""
    warnings.filterwarnings("ignore", module=r"ray\.")


def environment_record(
    *, inventory: Inventory | None = None, environ: Mapping[str, str] | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """The content of environment.json: machine, package versions, devices, git commit and relevant variables.

    Versions are read from package metadata, without importing the packages. `folder` is that of the user's code, whose
    git commit is recorded; by default the working directory.
    """
    environ = os.environ if environ is None else environ
    inventory = inventory or local_inventory(environ=environ)
    return {
        "time": time.time(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "versions": {name: package_version(name) for name in PACKAGES},
        "cpu_model": inventory.cpu_model,
        "cpu_flags": dict(inventory.cpu_flags),
        "cores": inventory.cpus,
        "memory_bytes": sum(node.memory_bytes for node in inventory.nodes),
        "driver": driver_version(),
        "gpus": [device.name for device in inventory.devices()],
        "inventory": inventory.to_json(),
        "git": git_commit(folder or Path.cwd()),
        "variables": {name: environ[name] for name in VARIABLES if name in environ},
    }


def git_commit(folder: Path) -> dict[str, Any] | None:
    """{"commit", "dirty"} of the repository that contains `folder`; None without a repository or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def package_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
