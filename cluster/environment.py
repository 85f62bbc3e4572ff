"""Where a run runs: the record of it, and the environment that Ray is started with."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from cluster.devices.inventory import Inventory, local_inventory
from cluster.devices.nvidia import driver_version

# fmt: off
PACKAGES = ("raytrain", "torch", "ray", "numpy", "pyarrow", "pydantic", "safetensors", "transformers")
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY", "CUBLAS_WORKSPACE_CONFIG",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "MALLOC_ARENA_MAX",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "RAY_ADDRESS", "RAY_TMPDIR", "LD_PRELOAD",
)
# fmt: on
"""What can change a run's speed or its numbers; nothing secret is among them."""


DEATH_NOTICE = "A worker died or was killed while executing a task by an unexpected system error"
"""Begins a paragraph that Ray prints on the driver for every process that dies."""


def ray_environment(*, local_cluster: bool = True, quiet: bool = False) -> dict[str, str]:
    """Variables to set before the first ``import ray``, and their values.

    A variable the user has set wins; merge with ``{**ray_environment(), **os.environ}``. The reasons, all
    measured: Ray polls its workers every 2 s, and the end of a run waits for two of them, while each poll holds up
    the training thread, which at every 0.2 s cost a small model 4 % of its time; Ray starts workers
    at niceness 15, so that on a busy machine everything else comes before the training; printed lines appear
    twice; workers are moved into an artifacts directory; a sweep's state is saved too seldom to be resumed; usage
    statistics are not ours to send; a call that comes after the end would start another cluster, one that listens on
    every interface. `CUDA_DEVICE_ORDER` makes an index mean the same GPU for torch, Ray and NVML.
    On a local cluster every port is kept on loopback, which Ray otherwise does not do, and nobody watches for the
    preemption of a machine that is ours alone.

    Args:
        quiet: of a process that died, the driver prints no line of Ray's (`DEATH_NOTICE`): the run tells of it in its
            own words. Other lines of Ray's, and all of what workers print, come through.
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
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        variables["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] = "0"
    if quiet:
        variables["RAY_DEDUP_LOGS_SKIP_REGEX"] = DEATH_NOTICE
    return variables


def environment_record(
    *,
    inventory: Inventory | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """What environment.json holds: machine, versions, devices, commit and the variables that matter.

    Versions are read from the installed packages' metadata; nothing is imported for it.

    Args:
        inventory: the machines, by default this one.
        environ: the environment, by default the process's own.
        folder: where the user's code lies, by default the working directory; its git commit is recorded.
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
    """{"commit", "dirty"} of the repository `folder` is in; None where there is none, or no git."""
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
    """Of an installed package; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
