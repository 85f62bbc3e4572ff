"""What runs in Ray Train's controller process: how the workers meet, how many they are, and who died without a word.

The controller starts between Ray and the workers, and everybody waits for it: nothing here imports torch at its head,
which would take it longer than all the rest.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.exceptions
from ray.train import UserCallback
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.util import TrainingFramework
from ray.train.v2.api.exceptions import WorkerGroupError

from raytrain.errors import RunError
from raytrain.runs.faults import Fault, write_fault
from raytrain.runs.folder import RunFolder

#: Deaths in a row before any worker came as far as taking an attempt number: the workers cannot start at all.
START_FAILURES = 5
#: A group that does not come together in a process group (a worker died meanwhile) is tried again so many times.
MEETING_FAILURES = 2
#: So long may workers take to leave their process group, as Ray's own backend has it.
LEAVING_S = 30.0


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


class PlannedWorkers(FixedScalingPolicy):
    """As many workers as were planned, without asking an autoscaler, for which Ray starts a process and waits."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """Nobody is told."""

    def _maybe_send_resource_request(self) -> None:
        """Nothing is asked for."""


@dataclass
class Collectives(BackendConfig):
    """Ray's torch backend with a store of our own: on a local cluster it listens on loopback alone.

    torch's `env://` store and `TCPStore(host)` listen on every interface, whatever host they are given; only a store
    on a socket that we bound does not. One worker needs no process group at all.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800
    loopback: bool = False
    interface: str | None = None

    @property
    def backend_cls(self) -> type[Backend]:
        """Ray instantiates this on the controller."""
        return _Backend

    @property
    def train_func_context(self) -> Any:
        """What Ray's workers are in while they train."""
        from ray.train.torch.config import TorchConfigContextManager

        return TorchConfigContextManager

    @property
    def framework(self) -> Any:
        """What Ray shows of the run."""
        return TrainingFramework.TORCH


class _Backend(Backend):
    """Lives in Ray's controller for the whole run, over all restarts."""

    share_cuda_visible_devices = True
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

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """The workers leave their group before Ray ends their processes, which it does whether they have or not."""
        if len(worker_group) > 1:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                ray.get(worker_group.execute_async(_leave_group), timeout=LEAVING_S)

    def _bring_together(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_set_interface, backend_config.interface)
        world_size = len(worker_group)
        if world_size > 1 and not backend_config.loopback:
            from ray.train.torch.config import _TorchBackend

            _TorchBackend().on_start(worker_group, backend_config)
            return
        worker_group.execute(_set_environment)
        if world_size == 1:
            return
        port = worker_group.execute_single(0, _open_store, world_size)
        ray.get(
            [
                worker_group.execute_single_async(
                    rank,
                    _join,
                    port=port,
                    world_rank=rank,
                    world_size=world_size,
                    backend=backend_config.backend,
                    timeout_s=backend_config.timeout_s,
                )
                for rank in range(world_size)
            ]
        )


def _end(worker_group: Any) -> None:
    """Ray 2.60 forgets a group that did not come together, and the next one would wait for its processes for ever."""
    for worker in worker_group.get_workers():
        ray.kill(worker.actor)
    worker_group.shutdown()


_STORE: dict[str, Any] = {}


def _set_interface(interface: str | None) -> None:
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


def _set_environment() -> None:
    from ray.train.torch.config import _set_torch_distributed_env_vars

    _set_torch_distributed_env_vars()


def _leave_group() -> None:
    """A worker's part in torch's default process group, where there is one."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _open_store(world_size: int) -> int:
    """Worker 0: a store on a socket bound to loopback; returns its port."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (where torch documents it)

    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    port = int(listener.getsockname()[1])
    _STORE["master"] = TCPStore(
        "127.0.0.1", port, world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return port


def _join(*, port: int, world_rank: int, world_size: int, backend: str, timeout_s: int) -> None:
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = _STORE["master"] if world_rank == 0 else TCPStore("127.0.0.1", port, world_size, is_master=False)
    dist.init_process_group(
        backend=backend, store=store, rank=world_rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
