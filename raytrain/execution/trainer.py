"""`fit`: run a `TrainJob` with Ray Train's `TorchTrainer` and return rank 0's result. Driver side.

Ray restarts all workers after any failure (`max_failures=-1`); rank 0 decides at the start of the next attempt whether
to continue (`raytrain.execution.failure_policy`).
"""

from __future__ import annotations

import logging
import re
from typing import Any

import ray
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raytrain.errors import RunError
from raytrain.execution.controller import Collectives, FaultWriter
from raytrain.execution.driver_channel import AttemptResult
from raytrain.execution.ray_private import local_trainer
from raytrain.execution.worker import train_loop_per_worker
from raytrain.runs.storage import split
from raytrain.train.job import TrainJob


def fit(job: TrainJob, *, data: Any, channel: Any, local: bool, interface: str | None, storage: str) -> AttemptResult:
    """Run the job's workers until the run ends.

    Args:
        data: what the driver read for all workers (the default text, in-memory tensors), or None.
        channel: the `DriverChannel` actor.
        local: the cluster is private to this command, on this machine: everything stays on loopback.
        interface: `cluster.interface`, the network interface for collectives, or None.
        storage: a directory for Ray's own state.

    Raises:
        RunError: Ray itself gave up, with its reason.
    """
    on_gpu = job.planned("device") == "cuda"
    trainer = (local_trainer() if local else TorchTrainer)(
        train_loop_per_worker,
        train_loop_config={
            # the job may contain Python objects; Ray re-exports `dumps` without declaring it
            "job": ray.put(cloudpickle.dumps(job)),  # pyright: ignore[reportPrivateImportUsage]
            "import_path": job.import_path,
            "run_path": job.run_path,
            "channel": channel,
            "data": None if data is None else ray.put(data),
        },
        scaling_config=ScalingConfig(
            num_workers=int(job.planned("workers")),
            use_gpu=on_gpu,
            resources_per_worker=_resources(job, on_gpu=on_gpu, local=local),
            placement_strategy=job.planned("placement"),
            accelerator_type=_accelerator_type(job) if on_gpu and not local else None,
        ),
        torch_config=Collectives(  # pyright: ignore[reportArgumentType]  (has all the attributes that Ray uses, without importing torch)
            backend=job.planned("backend"), loopback=local, interface="lo" if local else interface
        ),
        run_config=RunConfig(
            name=split(job.run_path)[1],
            storage_path=storage,
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[FaultWriter(job.run_path, job.owner)],
        ),
    )
    try:
        result = trainer.fit().return_value
    except Exception as error:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Ray colours the names of actors
        raise RunError(f"Ray Train gave up: {type(error).__name__}: {text}") from error
    if not isinstance(result, AttemptResult):
        raise RunError(f"the workers returned {result!r} instead of a result")
    return result


def _resources(job: TrainJob, *, on_gpu: bool, local: bool) -> dict[str, float]:
    """What one worker reserves: on a shared cluster, a CPU worker reserves the cores it computes on."""
    cpus = 1 if on_gpu or local else int(job.planned("threads") or 1)
    return {"CPU": cpus, "GPU": 1} if on_gpu else {"CPU": cpus}


def _accelerator_type(job: TrainJob) -> str | None:
    """Ray's accelerator type where `scale.accelerator` names one; None for any."""
    name = str(job.planned("accelerator"))
    return None if name.split(":")[0] in ("cpu", "cuda", "auto") else name


def quiet_ray() -> None:
    """Silence the log lines of Ray and its libraries in this process (`-v` keeps them)."""
    for name in ("ray", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # `jobs.tuning` reports a failed trial in one line
