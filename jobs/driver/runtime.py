"""Starts and stops Ray for a command, and turns signals into stop requests. Driver side."""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from cluster.environment import ray_environment
from raytrain.errors import InputError
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.plan.rules.hosts import separate_hosts

#: Ray sets this variable in the driver of a submitted job, which uses the cluster that it was submitted to.
JOB_ENVIRONMENT = "RAY_JOB_CONFIG_JSON_ENV_VAR"


#: Signals less than this many seconds apart count as one.
SAME_SIGNAL_S = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to.

    Attributes:
        local: started by this command, for this command only, on loopback.
        folder: a private directory of the command.
        ended: once set, no thread may call Ray: it would start another cluster, or end the process.
    """

    local: bool
    address: str
    folder: str
    ended: threading.Event = field(default_factory=threading.Event)


def cluster_address(configured: str | None) -> str:
    """`cluster.address`, else the cluster this job was submitted to, else "local".

    Returns "connected" if this process (a notebook) is connected to a cluster already: it is used and left running.
    """
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return "connected"
    if configured:
        return configured
    if os.environ.get(JOB_ENVIRONMENT):
        return os.environ.get("RAY_ADDRESS") or "auto"
    return "local"


def cluster_size(plan: Plan | None) -> tuple[int, int]:
    """(CPUs, GPUs) that a private cluster declares: those that the plan needs, not all of the machine."""
    if plan is None:
        return 1, 0
    assert isinstance(plan.workers, Resolved) and isinstance(plan.device, Resolved)  # never deferred
    processes = int(plan.workers.value) + separate_hosts(plan.hosts)
    return processes + 1, processes if plan.device.value == "cuda" else 0


@contextlib.contextmanager
def connected(address: str, *, num_cpus: int, num_gpus: int, verbose: bool) -> Iterator[Cluster]:
    """Connect to `address`, or start a private cluster if it is "local"; shut down at the end.

    A local cluster listens only on loopback; its token and files are in a new directory that only this user can read.
    Call it in the main thread, since Ray ties the cluster's lifetime to the thread that started it.

    Args:
        num_cpus, num_gpus: logical resources that a local cluster declares.

    Raises:
        InputError: the address cannot be reached.
    """
    if address == "connected":
        yield from _already_connected(verbose=verbose)
        return
    local = address == "local"
    for name, value in ray_environment(local_cluster=local, quiet=not verbose).items():
        os.environ.setdefault(name, value)
    folder = tempfile.mkdtemp(prefix="rt-")  # mode 0700; short, since socket paths end at 107 bytes
    options: dict[str, Any] = {"log_to_driver": verbose, "logging_level": "info" if verbose else "error"}
    if local:
        options |= {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            "include_dashboard": False,
            "_temp_dir": os.path.join(folder, "r"),
            "_node_ip_address": "127.0.0.1",
        }
    cluster = Cluster(local, address, folder)
    try:
        if local:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN_PATH"] = _write_token(folder)
            os.environ.pop("RAY_AUTH_TOKEN", None)
        _start(address, options, verbose=verbose)
        yield cluster
    finally:
        cluster.ended.set()
        with contextlib.suppress(KeyboardInterrupt):  # a second signal: the exit of the process cleans up the rest
            if "ray" in sys.modules:
                sys.modules["ray"].shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def _start(address: str, options: dict[str, Any], *, verbose: bool) -> None:
    import ray

    from raytrain.execution.ray_private import own_process_groups, reread_environment

    reread_environment()
    # while Ray's daemons start, import pandas, the slowest import of Ray Train; it does not import Ray
    meanwhile = threading.Thread(target=importlib.import_module, args=("pandas",), daemon=True, name="imports")
    try:
        meanwhile.start()
        with own_process_groups():
            ray.init(address=address, ignore_reinit_error=True, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address == "local":
            raise
        raise InputError(
            "cluster.address", seen=f"{address} ({error})", expected="the address of a running Ray cluster"
        ) from error
    meanwhile.join()
    from raytrain.execution.trainer import quiet_ray

    if not verbose:
        quiet_ray()


def _already_connected(*, verbose: bool) -> Iterator[Cluster]:
    import ray

    from raytrain.execution.trainer import quiet_ray

    if not verbose:
        quiet_ray()
    context = ray.get_runtime_context()
    loopback = all(node["NodeManagerAddress"].startswith("127.") for node in ray.nodes() if node["Alive"])
    folder = tempfile.mkdtemp(prefix="rt-")
    try:
        yield Cluster(local=loopback, address=context.gcs_address, folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


#: One secret for all local clusters of this process, since Ray reads it only once.
_TOKEN = secrets.token_hex(32)


def _write_token(folder: str) -> str:
    path = os.path.join(folder, "token")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(_TOKEN)
    return path


class Interrupted(KeyboardInterrupt):
    """A signal arrived before anything has to be saved. Ray's calls only let a KeyboardInterrupt propagate."""


class StopSignals:
    """Handles SIGTERM and SIGINT while a command runs.

    Before `training` is set, a signal ends the command at once by raising `Interrupted`. Afterwards the first signal
    sets `asked` (the workers save and return), and the second ends the command at once. Outside the main thread (a
    notebook's executor), signals are not handled.

    The interpreter discards an exception raised by a signal handler inside a finalizer or a fork hook, and `ray.init`
    replaces the handler of SIGTERM. A thread therefore counts the signals on the interpreter's wake-up pipe, which
    misses none. Discarded exceptions are not printed, nor are the errors that follow from them, such as those of a
    library's fork hooks of which the exception skipped the first.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.training = False
        self.times = 0
        self._last = self._raised = float("-inf")
        self._previous: dict[int, Any] = {}
        self._writer: int | None = None
        self._unraisable: Any = None

    def install(self) -> None:
        """Install the handlers; called again after `ray.init`, which replaces the handler of SIGTERM.

        Raises:
            Interrupted: a signal arrived in the meantime whose exception was lost.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if self._writer is None:
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            threading.Thread(target=self._count, args=(reader,), daemon=True, name="stop-signals").start()
            self._unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        for number in _SIGNALS:
            previous = signal.signal(number, self._arrived)
            self._previous.setdefault(number, previous)
        if self.asked.is_set() and not self.training:
            raise Interrupted("before the first step")

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}
        if self._writer is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._writer)
            self._writer = None
            sys.unraisablehook = self._unraisable

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        again, self._raised = now - self._raised <= SAME_SIGNAL_S, now
        if not self.training and not again:
            raise Interrupted(signal.Signals(number).name)

    def _on_unraisable(self, unraisable: Any) -> None:
        leaving = self._raised > float("-inf") and not self.training
        if not leaving and not issubclass(unraisable.exc_type, KeyboardInterrupt | SystemExit):
            self._unraisable(unraisable)

    def _count(self, reader: int) -> None:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while numbers := pipe.read(64):
                now = time.monotonic()
                if not any(number in _SIGNALS for number in numbers):
                    continue
                if now - self._last > SAME_SIGNAL_S:  # `timeout` and shells signal both the process and its group
                    self.times += 1
                self._last = now
                self.asked.set()
