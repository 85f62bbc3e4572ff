"""`fit`: hand a `TrainJob` to Ray Train's `TorchTrainer` and bring back rank 0's ending. Driver side.

Ray restarts the whole worker group after any failure (`max_failures=-1`); whether that makes sense is decided by rank 0
at the start of the next attempt (`raytrain.recovery`). Deaths that leave no record of their own are recorded here, in
Ray's controller process.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.exceptions
import torch.distributed as dist
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.torch.config import _set_torch_distributed_env_vars, _TorchBackend
from ray.train.v2.api.exceptions import WorkerGroupError
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (where torch documents it)

from raytrain.errors import RunError
from raytrain.faults import write_fault
from raytrain.link import RunLink
from raytrain.recovery import Fault
from raytrain.run_folder import RunFolder
from raytrain.train_job import TrainJob
from raytrain.worker import train_loop_per_worker

#: Deaths in a row before any worker came as far as taking an attempt number: the workers cannot start at all.
START_FAILURES = 5
#: A group that does not come together in a process group (a worker died meanwhile) is tried again so many times.
MEETING_FAILURES = 2


def fit(job: TrainJob, *, data: Any, link: Any, local: bool, interface: str | None, storage: str) -> dict[str, Any]:
    """Run the job's workers to their end.

    Args:
        job: what the workers do.
        data: object to hand over (bytes of the default text, in-memory tensors), or None.
        link: the `RunLink` actor (`make_link`).
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
            "link": link,
            "data": None if data is None else ray.put(data),
        },
        scaling_config=ScalingConfig(
            num_workers=int(job.planned("workers")),
            use_gpu=on_gpu,
            resources_per_worker=_resources(job, on_gpu=on_gpu, local=local),
            placement_strategy=job.planned("placement"),
            accelerator_type=_accelerator_type(job) if on_gpu and not local else None,
        ),
        torch_config=Collectives(
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
    """A trainer for a cluster that ends with the command: it starts two processes fewer, two seconds on two cores.

    They hand out Ray Datasets, of which there are none here, and clear up what a controller leaves in a cluster that
    lives on.
    """

    def _create_default_callbacks(self) -> list[Any]:
        unneeded = ("PlacementGroupCleanerCallback", "DatasetsCallback")
        return [entry for entry in super()._create_default_callbacks() if type(entry).__name__ not in unneeded]


def _resources(job: TrainJob, *, on_gpu: bool, local: bool) -> dict[str, float]:
    """What one worker reserves. On a cluster that others use too, a CPU worker reserves the cores it computes on."""
    cpus = 1 if on_gpu or local else int(job.planned("threads") or 1)
    return {"CPU": cpus, "GPU": 1} if on_gpu else {"CPU": cpus}


def _accelerator_type(job: TrainJob) -> str | None:
    """Ray's accelerator type where `scale.accelerator` named one; None for any."""
    name = str(job.planned("accelerator"))
    return None if name.split(":")[0] in ("cpu", "cuda", "auto") else name


def make_link() -> Any:
    """The `RunLink` actor: reserves no CPU, dies with the driver."""
    return ray.remote(RunLink).options(num_cpus=0, max_concurrency=64).remote()


def quiet_ray() -> None:
    """Silence Ray's and Train's own log lines in this process (`-v` keeps them)."""
    for name in ("ray", "ray.train", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a trial that fails: `jobs.tuning` tells it in a line


class FaultWriter(UserCallback):
    """Runs in Ray's controller process: records a worker that died without a word.

    Args:
        run_path: the run folder.
        owner: the driver; once another has taken an attempt number there, nothing is written and Ray gives up.
    """

    def __init__(self, run_path: str, owner: dict[str, Any]) -> None:
        self._run_path = run_path
        self._owner = owner
        self._start_failures = 0
        self._last_attempt = -1

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Ray calls this once per failed worker group, before the restart."""
        run = RunFolder(self._run_path)
        attempt = run.current_attempt()
        if run.owner_of(attempt) != self._owner:
            raise RunError(f"attempt {attempt} of another command has taken over {run.path}")
        self._start_failures = self._start_failures + 1 if attempt == self._last_attempt else 0
        self._last_attempt = attempt
        if self._start_failures >= START_FAILURES:
            raise RunError(f"the workers failed {START_FAILURES} times before they could begin: {worker_exceptions}")
        known = {entry.name for entry in run.store.entries("faults")}
        for rank, error in worker_exceptions.items():
            if f"{attempt:04d}-rank{rank:05d}.json" in known:
                continue
            died = type(error).__name__ in ("WorkerHealthCheckFailedError", "ActorDiedError", "RayActorError")
            fault = Fault(
                attempt=attempt,
                rank=rank,
                step=None,
                error="WorkerDied" if died else type(error).__name__,
                message=(str(error).splitlines() or [""])[0],
                traceback="" if died else str(error),
                precision="",
                reduced=False,
                final=False,
                from_step=0,
                time=time.time(),
            )
            write_fault(run, fault)


@dataclass
class Collectives(TorchConfig):
    """Ray's torch backend with a store of our own: on a local cluster it listens on loopback alone.

    torch's `env://` store and `TCPStore(host)` listen on every interface, whatever host they are given; only a store
    on a socket that we bound does not. One worker needs no process group at all.
    """

    loopback: bool = False
    interface: str | None = None

    @property
    def backend_cls(self) -> type[_TorchBackend]:
        """Ray instantiates this on the controller."""
        return _Backend


class _Backend(_TorchBackend):
    """Lives in Ray's controller for the whole run, over all restarts."""

    _failures = 0

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Bring a new group of workers together; one that dies meanwhile is lost like any other, and Ray restarts."""
        try:
            self._bring_together(worker_group, backend_config)
        except ray.exceptions.RayError as error:
            _end(worker_group)
            self._failures += 1
            why = str(error).strip().splitlines()[-1]
            if self._failures > MEETING_FAILURES:
                raise RunError(f"{self._failures} times in a row the workers did not come together: {why}") from error
            raise WorkerGroupError(why, {}) from error  # what else is raised here ends the run
        self._failures = 0

    def _bring_together(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_set_interface, backend_config.interface)
        world = len(worker_group)
        if world == 1:
            worker_group.execute(_set_torch_distributed_env_vars)
            return
        if not backend_config.loopback:
            super().on_start(worker_group, backend_config)
            return
        worker_group.execute(_set_torch_distributed_env_vars)
        port = worker_group.execute_single(0, _open_store, world)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank,
                    _join,
                    port=port,
                    world_rank=rank,
                    world=world,
                    backend=backend_config.backend,
                    timeout_s=backend_config.timeout_s,
                )
                for rank in range(world)
            ]
        )


def _end(worker_group: Any) -> None:
    """Ray 2.60 forgets a group that did not come together, and the next one would wait for its processes for ever."""
    for worker in worker_group.get_workers():
        ray.kill(worker.actor)
    worker_group.shutdown()


_STORE: dict[str, TCPStore] = {}


def _set_interface(interface: str | None) -> None:
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


def _open_store(world: int) -> int:
    """Worker 0: a store on a socket bound to loopback; returns its port."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    port = int(listener.getsockname()[1])
    _STORE["master"] = TCPStore(
        "127.0.0.1", port, world, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return port


def _join(*, port: int, world_rank: int, world: int, backend: str, timeout_s: int) -> None:
    store = _STORE["master"] if world_rank == 0 else TCPStore("127.0.0.1", port, world, is_master=False)
    dist.init_process_group(
        backend=backend, store=store, rank=world_rank, world_size=world, timeout=timedelta(seconds=timeout_s)
    )
