"""`fit`: hand a `TrainJob` to Ray Train's `TorchTrainer` and bring back rank 0's ending. Driver side.

Ray restarts the whole worker group after any failure (`max_failures=-1`); whether that makes sense is decided by rank 0
at the start of the next attempt (`raytrain.execution.failure_policy`).
"""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import ray
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raytrain.errors import RunError
from raytrain.execution.controller import Collectives, FaultWriter, PlannedWorkers
from raytrain.execution.driver_channel import DriverChannel
from raytrain.execution.worker import train_loop_per_worker
from raytrain.train.job import TrainJob


def fit(job: TrainJob, *, data: Any, channel: Any, local: bool, interface: str | None, storage: str) -> dict[str, Any]:
    """Run the job's workers to their end.

    Args:
        job: what the workers do.
        data: object to hand over (bytes of the default text, in-memory tensors), or None.
        link: the `DriverChannel` actor (`open_channel`).
        local: the cluster is this machine alone, so everything stays on loopback.
        interface: `cluster.interface`, the network interface for collectives, or None.
        storage: a directory for Ray's own bookkeeping.

    Returns:
        What `Worker.run` returned on rank 0: {"status", "reason", "steps", ...}.

    Raises:
        RunError: Ray itself gave up, with its reason.
    """
    on_gpu = job.planned("device") == "cuda"
    trainer = (LocalTrainer if local else TorchTrainer)(
        train_loop_per_worker,
        train_loop_config={
            # it may hold a model or data given in Python; Ray re-exports `dumps` without saying so
            "job": ray.put(cloudpickle.dumps(job)),  # pyright: ignore[reportPrivateImportUsage]
            "import_path": job.import_path,
            "run_path": job.run_path,
            "link": channel,
            "data": None if data is None else ray.put(data),
        },
        scaling_config=ScalingConfig(
            num_workers=int(job.planned("workers")),
            use_gpu=on_gpu,
            resources_per_worker=_resources(job, on_gpu=on_gpu, local=local),
            placement_strategy=job.planned("placement"),
            accelerator_type=_accelerator_type(job) if on_gpu and not local else None,
        ),
        torch_config=Collectives(  # pyright: ignore[reportArgumentType]  (all that Ray asks of it, without torch)
            backend=job.planned("backend"), loopback=local, interface="lo" if local else interface
        ),
        run_config=RunConfig(
            name=os.path.basename(job.run_path.rstrip("/")),
            storage_path=storage,
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[FaultWriter(job.run_path, job.owner)],
        ),
    )
    try:
        ending = trainer.fit().return_value
    except Exception as error:
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Ray colours names of actors
        raise RunError(f"Ray Train gave up: {type(error).__name__}: {text}") from error
    if not isinstance(ending, dict):
        raise RunError(f"the workers returned {ending!r} instead of an ending")
    return ending


class LocalTrainer(TorchTrainer):
    """A trainer for a cluster that ends with the command: it starts three processes fewer, three seconds on two cores.

    They hand out Ray Datasets, of which there are none here, clear up what a controller leaves in a cluster that lives
    on, and ask a cluster to grow, which this one cannot.
    """

    def _create_default_callbacks(self) -> list[Any]:
        unneeded = ("PlacementGroupCleanerCallback", "DatasetsCallback")
        return [entry for entry in super()._create_default_callbacks() if type(entry).__name__ not in unneeded]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        workers = PlannedWorkers(self.scaling_config)
        return super()._initialize_and_run_controller(**{**arguments, "scaling_policy": workers})


def _resources(job: TrainJob, *, on_gpu: bool, local: bool) -> dict[str, float]:
    """What one worker reserves. On a cluster that others use too, a CPU worker reserves the cores it computes on."""
    cpus = 1 if on_gpu or local else int(job.planned("threads") or 1)
    return {"CPU": cpus, "GPU": 1} if on_gpu else {"CPU": cpus}


def _accelerator_type(job: TrainJob) -> str | None:
    """Ray's accelerator type where `scale.accelerator` named one; None for any."""
    name = str(job.planned("accelerator"))
    return None if name.split(":")[0] in ("cpu", "cuda", "auto") else name


def open_channel() -> Any:
    """The `DriverChannel` actor: reserves no CPU, dies with the driver."""
    return ray.remote(DriverChannel).options(num_cpus=0, max_concurrency=64).remote()


def quiet_ray() -> None:
    """Silence Ray's and Train's own log lines in this process (`-v` keeps them)."""
    for name in ("ray", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a trial that fails: `jobs.tuning` tells it in a line
