"""Code in Ray Train's controller process: forms the process group, and records workers that died, and why.

`trainer.py` hands it to Ray Train as backend and callbacks.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import ray.exceptions
import ray.train
from ray.train import UserCallback, WorkerGroupError
from ray.train.backend import Backend, BackendConfig

from cluster.devices.limits import oom_kills
from cluster.network import join_network
from raytrain.errors import RunError
from raytrain.execution.driver_channel import ANSWER_S, RESTARTING, SETTING_UP, step_of
from raytrain.execution.ray_private import DEATH_ERRORS, end_workers, worker_stderr
from raytrain.runs.faults import Fault, write_fault
from raytrain.runs.folder import RunFolder

#: What Ray writes of the end of an actor: its process id, and its exit code where it left by itself.
_PID, _EXIT_CODE = re.compile(r"^\s*pid: (\d+)$", re.MULTILINE), re.compile(r"\bexit code (-?\d+)")
#: Of a process that Ray's own memory monitor ended.
_RAY_MEMORY = re.compile(r"NODE_OUT_OF_MEMORY|running low on memory|memory usage threshold")
#: What a process itself writes last: Ray's handler of signals, Python's, and the C++ library.
_CRASH_LINE = re.compile(
    r"\*\*\* (?P<signal>SIG[A-Z]+) received|Fatal Python error: (?P<error>.+)|(?P<cpp>terminate called .+)"
)


def words_of_death(rank: int, error: str, *, stderr: Callable[[int], str] | None, memory: bool) -> str:
    """One line: `the process of rank 0 (pid 4711) ended unexpectedly`, and why where that is known.

    Args:
        error: the text of Ray's exception.
        stderr: returns the end of what a process of this machine wrote to stderr; None: it ran on another machine.
        memory: the kernel killed a process of this machine for its memory since the workers started.
    """
    pid = int(found[1]) if (found := _PID.search(error)) else None
    who = f"the process of rank {rank}{f' (pid {pid})' if pid else ''}"
    if _RAY_MEMORY.search(error):
        return f"{who} was ended by Ray's memory monitor: its node was out of memory"
    if memory:
        return f"{who} ended unexpectedly, and the kernel killed a process out of memory meanwhile (OOM killer)"
    last = _CRASH_LINE.search(stderr(pid)) if stderr is not None and pid else None
    if last is not None:
        return f"{who} ended with {last['signal'] or last['error'] or last['cpp']}"
    if code := _EXIT_CODE.search(error):
        return f"{who} ended with exit code {code[1]}"
    return f"{who} ended unexpectedly"


#: After this many consecutive failures without a new attempt number, the workers cannot start at all.
START_FAILURES = 5
#: Retries of forming the process group, which fails if a worker dies in the meantime.
RENDEZVOUS_RETRIES = 2
#: Timeout for leaving the process group, the same as in Ray's own backend.
LEAVING_S = 30.0
#: Timeout for a worker's abort of NCCL's calls.
ABORT_S = 10.0

_WORKER_NODES: dict[int, str] = {}
"""Rank -> id of its node, of the newest worker group; known to the controller process only."""
_OOM_KILLS: list[int] = []
"""How often the kernel had killed a process of this machine for its memory when the newest worker group started."""


class FaultWriter(UserCallback):
    """Records a worker that died without writing a fault record, and tells the `channel` that the workers restart. Runs
    in Ray's controller process. Once another driver than `owner` owns the newest attempt, nothing is written and Ray
    gives up."""

    def __init__(self, run_path: str, owner: dict[str, Any], channel: Any) -> None:
        self._run_path = run_path
        self._owner = owner
        self._channel = channel
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
            raise RunError(f"the workers failed {START_FAILURES} times before they could start: {worker_exceptions}")
        try:
            step = step_of(ray.get(self._channel.progress.remote(), timeout=ANSWER_S))
        except ray.exceptions.RayError:  # nobody answers
            step = None
        self._channel.report_group.remote(RESTARTING)
        starts = {
            row["attempt"]: int(row["from_step"]) for row in run.read_rows(run.events) if row["kind"] == "attempt"
        }
        # an attempt that has not recorded its start would have loaded the newest checkpoint
        from_step = starts.get(attempt, max(run.saved_steps(), default=0))
        known = {entry.name for entry in run.store.entries("faults")}
        lost = lost_nodes(ray.nodes(), _WORKER_NODES)
        for rank, error in worker_exceptions.items():
            if f"{attempt:04d}-rank{rank:05d}.json" in known:
                continue
            died = rank in lost or type(error).__name__ in DEATH_ERRORS
            if rank in lost:
                message = f"the node {lost[rank]} of rank {rank} was lost"
            elif died:
                here = _WORKER_NODES.get(rank) == ray.get_runtime_context().get_node_id()
                killed = oom_kills() if here and _OOM_KILLS else None
                memory = killed is not None and killed > _OOM_KILLS[0]
                message = words_of_death(rank, str(error), stderr=worker_stderr if here else None, memory=memory)
            else:
                message = (str(error).splitlines() or [""])[0]
            fault = Fault(
                attempt, rank, step if died else None, "WorkerDied" if died else type(error).__name__,
                message, traceback="" if died else str(error), from_step=from_step, node=_WORKER_NODES.get(rank),
            )  # fmt: skip
            write_fault(run, fault)


def lost_nodes(nodes: list[dict[str, Any]], ranks: dict[int, str]) -> dict[int, str]:
    """Rank -> address of its node, for the ranks whose node Ray reports as dead. `nodes` are `ray.nodes()`, `ranks` the
    ids of their nodes."""
    dead = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if not node["Alive"]}
    return {rank: dead[node] for rank, node in ranks.items() if node in dead}


def on_loopback(nodes: list[dict[str, Any]], ranks: dict[int, str]) -> bool:
    """Whether the nodes of all ranks have loopback addresses, as in a cluster of several nodes on one machine."""
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in nodes}
    return all(addresses.get(node, "").startswith("127.") for node in ranks.values())


@dataclass
class Collectives(BackendConfig):
    """Configuration of the process group, in place of Ray's `TorchConfig`: on one machine, loopback only.

    torch's `env://` store and `TCPStore(host)` listen on every interface, whichever host they are given; a store on a
    socket that is already bound to loopback does not. One worker needs no process group.
    """

    backend: str | None = None
    init_method: str = "env"
    timeout_s: int = 1800
    loopback: bool = False
    interface: str | None = None
    channel: Any = None

    @property
    def backend_cls(self) -> type[Backend]:
        return LoopbackBackend

    @property
    def train_func_context(self) -> Any:
        """The context manager that Ray's workers train in."""
        return _torch_config().train_func_context

    @property
    def framework(self) -> Any:
        return _torch_config().framework


def _torch_config() -> Any:
    from ray.train.torch import TorchConfig

    return TorchConfig()


class LoopbackBackend(Backend):
    """Forms the workers' process group. One object in Ray's controller for the whole run, over all restarts."""

    share_cuda_visible_devices = True
    _failures = 0

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        try:
            self._form_process_group(worker_group, backend_config)
        except ray.exceptions.RayError as error:
            end_workers(worker_group)
            self._failures += 1
            why = str(error).strip().splitlines()[-1]
            if self._failures > RENDEZVOUS_RETRIES:
                text = f"the workers could not form a process group {self._failures} times in a row: {why}"
                raise RunError(text) from error
            raise WorkerGroupError(why, {}) from error  # Ray retries after this error; any other ends the run
        self._failures = 0

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """Have the workers leave their process group before Ray ends their processes, which it does in any case."""
        if len(worker_group) > 1:
            with contextlib.suppress(ray.exceptions.GetTimeoutError):
                ray.get(worker_group.execute_async(_leave_group), timeout=LEAVING_S)

    def _form_process_group(self, worker_group: Any, backend_config: Any) -> None:
        nodes = worker_group.execute(_set_interface, backend_config.interface)
        _WORKER_NODES.clear()
        _WORKER_NODES.update(enumerate(nodes))
        _OOM_KILLS[:] = [killed] if (killed := oom_kills()) is not None else []
        backend_config.channel.report_group.remote(SETTING_UP, nodes=dict(_WORKER_NODES))
        world_size = len(worker_group)
        if world_size > 1 and not (backend_config.loopback or on_loopback(ray.nodes(), _WORKER_NODES)):
            _torch_config().backend_cls().on_start(worker_group, backend_config)
            return
        worker_group.execute(_set_environment)
        if world_size == 1:
            return
        port = worker_group.execute_single(0, _open_store, world_size)
        given = {"world_size": world_size, "backend": backend_config.backend, "timeout_s": backend_config.timeout_s}
        ranks = range(world_size)
        ray.get([worker_group.execute_single_async(rank, _join, port=port, world_rank=rank, **given) for rank in ranks])


_STORE: dict[str, Any] = {}


def _set_interface(interface: str | None) -> str:
    """Worker: choose the network interface of the collectives; returns the id of this node.

    On ROCm, Ray gives each worker its own GPU in HIP_VISIBLE_DEVICES, and Ray Train those of all workers of the node in
    CUDA_VISIBLE_DEVICES only. HIP reads the former first; torch has not read either yet.
    """
    join_network(interface, address=ray.util.get_node_ip_address())
    if "HIP_VISIBLE_DEVICES" in os.environ and "CUDA_VISIBLE_DEVICES" in os.environ:
        os.environ["HIP_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    return ray.get_runtime_context().get_node_id()


def _set_environment() -> None:
    """Set the environment variables of torchrun and Accelerate, as Ray's own backend does."""
    from ray.train.torch import get_device

    context = ray.train.get_context()
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "WORLD_SIZE"):
        os.environ[name] = str(getattr(context, f"get_{name.lower()}")())
    os.environ["RANK"] = str(context.get_world_rank())
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(get_device())


def _leave_group() -> None:
    """Worker: leave the default process group, if there is one.

    `destroy_process_group` waits until NCCL has finished all calls, also those that need a peer that is gone. Nobody
    needs their results any more, so they are aborted, in a thread: an abort may wait for the device.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if "nccl" not in dist.get_backend():
        dist.destroy_process_group()
        return
    from torch.distributed.distributed_c10d import _abort_process_group

    def abort() -> None:
        with contextlib.suppress(RuntimeError):  # torch's own time limit; Ray ends the process next
            _abort_process_group()

    leaving = threading.Thread(target=abort, daemon=True, name="leave-group")
    leaving.start()
    leaving.join(ABORT_S)


def _open_store(world_size: int) -> int:
    """Worker 0: open a store on a socket bound to loopback; returns its port."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (documented there)

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
