"""What raytrain needs to know about Ray's processes: the settings of a private cluster, placement, and forks.

`raytrain.execution.ray_start` starts Ray with these settings. Actors are pinned to a node by `on_node`; a child that is
forked from a process connected to Ray must leave its parent's objects alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# ---------------------------------------------------------------- private ray

TOKEN_FILE = "token"
#: First letters of the names of private folders; short, since socket paths end at 107 bytes.
PREFIX = "rt-"
#: Where a private cluster is when the temporary directory has a longer path than `LONGEST_BASE`.
SHORT_BASE = "/tmp"
#: Bytes of a path, of the 107 that a socket may have: Ray's sockets are up to 82 bytes below, such as
#: /rt-xxxxxxxx/r2/session_2026-01-31_12-00-00_123456_1234567/sockets/plasma_store.1
LONGEST_BASE = 25
#: A file in each private folder that its process holds locked: the kernel unlocks it when the process ends in any way.
OWNER_FILE = "owner"

#: Imported by each process that Ray starts in advance, and the variable that says where these take their numbers and
#: how many of them will be workers.
PRELOAD_MODULE, PRELOAD = "raytrain.execution.preload", "RAYTRAIN_PRELOAD"

#: Processes that Ray may start at the same time. Its own limit is the number of cores, and a start is mostly waiting.
STARTS = 8

#: Ray's time limits, in its own units, where a first start was too slow and for several nodes of one machine.
PATIENT = {
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_gcs_server_request_timeout_seconds": "120",
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_raylet_client_connect_timeout_milliseconds": "10000",
}
#: In a line of a daemon's log: when, which process, and the advice to report a bug, which a lack of memory is not.
RAYS_PREFIX = r"(?m)^\[[^\]]*\] \(\w+\) |An unexpected system state .*(?=Check failed:)"
#: One secret for all private clusters of this process: a Ray without a way to reset its token reads it only once.
_TOKEN = secrets.token_hex(32)


@dataclass(frozen=True)
class PrivateRay:
    """How to start one private cluster: with these arguments of ``ray.init``, and so many processes that import torch
    in advance. `folder` is a new directory that only this user can read; it holds the token and Ray's files."""

    folder: str
    options: Mapping[str, Any]
    workers: int = 0

    def set_environment(self, environ: MutableMapping[str, str]) -> None:
        """Set the variables of the process that starts the cluster, before its first ``import ray``.

        They replace values set by the user: these would open the cluster to others, or belong to another cluster.
        """
        environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # keeps every port on loopback
        environ["RAY_AUTH_MODE"] = "token"
        environ["RAY_AUTH_TOKEN_PATH"] = os.path.join(self.folder, TOKEN_FILE)
        environ.pop("RAY_AUTH_TOKEN", None)
        environ["RAY_worker_maximum_startup_concurrency"] = str(STARTS)
        if self.workers:
            environ["RAY_preload_python_modules"] = PRELOAD_MODULE
            environ[PRELOAD] = f"{self.workers}:{os.path.join(self.folder, 'p')}"
        else:  # of another cluster of this process
            environ.pop("RAY_preload_python_modules", None)
            environ.pop(PRELOAD, None)


@contextlib.contextmanager
def private_ray(*, workers: int = 0) -> Iterator[PrivateRay]:
    """Create the folder and the token of a private cluster; the folder is removed at the end. So many `workers` will
    compute with torch."""
    with contextlib.ExitStack() as stack:
        base = _socket_folder()
        folder = stack.enter_context(private_folder(base))
        _write_token(folder)
        options = {"include_dashboard": False, "_temp_dir": os.path.join(folder, "r"), "_node_ip_address": "127.0.0.1"}
        if base != tempfile.gettempdir():  # what Ray moves out of memory may be large: it stays where TMPDIR says
            options["object_spilling_directory"] = stack.enter_context(private_folder())
        stack.callback(end_daemons, folder)
        yield PrivateRay(folder, options, workers)


def _socket_folder() -> str:
    """The temporary directory, or `SHORT_BASE` if sockets below it would have too long a path and this one is usable:
    others must not be able to rename what a user has there, which the sticky bit ensures."""
    base = tempfile.gettempdir()
    if len(os.fsencode(base)) <= LONGEST_BASE or len(os.fsencode(SHORT_BASE)) >= len(os.fsencode(base)):
        return base
    try:
        found = os.stat(SHORT_BASE)
    except OSError:
        return base
    safe = found.st_mode & stat.S_ISVTX or (found.st_uid == os.geteuid() and not found.st_mode & 0o022)
    return SHORT_BASE if safe and os.access(SHORT_BASE, os.W_OK | os.X_OK) else base


@contextlib.contextmanager
def private_folder(base: str | None = None) -> Iterator[str]:
    """Create a temporary folder in `base` that only this user can read (mode 0700); it is removed at the end.

    A process that is killed cannot remove its own: the next one of this user removes it (`remove_left_folders`).
    """
    remove_left_folders()
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=base)
    try:
        # under another name until it is locked: nobody may take the folder for one that was left
        unlocked, path = os.path.join(folder, "new"), os.path.join(folder, OWNER_FILE)
        with open(unlocked, "x") as owner:
            fcntl.flock(owner, fcntl.LOCK_EX)
            os.rename(unlocked, path)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_left_folders() -> list[str]:
    """Remove the private folders of this user whose process has ended, and return their paths.

    A folder stays if its process lives, in another container as well, and if it has no owner file: it is not known
    whose it is.
    """
    removed = []
    bases = dict.fromkeys((tempfile.gettempdir(), _socket_folder()))
    for folder in (folder for base in bases for folder in Path(base).glob(f"{PREFIX}*")):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # no folder, no owner file, or another command removes it
            continue
        with os.fdopen(descriptor, "r+") as owner:
            try:
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # its process lives
            with contextlib.suppress(OSError):  # a start must not fail because of what an earlier one left
                for entry in folder.iterdir():
                    if entry.is_dir() and not entry.is_symlink():
                        shutil.rmtree(entry, ignore_errors=True)
                    elif entry.name != OWNER_FILE:
                        entry.unlink(missing_ok=True)
                if os.listdir(folder) == [OWNER_FILE]:  # else a daemon that is about to end has written: next time
                    shutil.rmtree(folder, ignore_errors=True)
                    removed.append(str(folder))
    return removed


def _write_token(folder: str) -> None:
    descriptor = os.open(os.path.join(folder, TOKEN_FILE), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(_TOKEN)


def last_words(folder: str, *, process: str) -> str:
    """What the logs of the cluster in `folder` say of a daemon that ended: the exception of an agent, which its daemon
    follows, else the last lines of the daemon itself before its stack trace; without any, how to see more."""
    for path in sorted(Path(folder).glob("session_2*/logs/*_agent.*")):
        _, raised, text = path.read_text(errors="replace").rpartition("Traceback (most recent call last)")
        if raised:
            return _ending(path, text, lines=3)
    for kind, lines in {"err": 3, "out": 1}.items():  # the latter says what the daemon did when a signal ended it
        for path in Path(folder).glob(f"session_2*/logs/{process}.{kind}"):
            text = path.read_text(errors="replace").partition("*** StackTrace")[0]
            if text := re.sub(RAYS_PREFIX, "", text).strip():
                return _ending(path, text, lines=lines)
    return "--verbose shows Ray's own messages"


def _ending(path: Path, text: str, *, lines: int) -> str:
    return f"{path.name} ends with: {' / '.join(line.strip() for line in text.strip().splitlines()[-lines:])}"


def end_daemons(folder: str) -> list[int]:
    """End the processes of this user whose command line names the cluster's `folder`, and return their pids.

    Ray ends the daemons that it has started only when this process exits, and their agents end by themselves, after all
    their imports: on a machine that is busy, long after the command.
    """
    ended = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            mine = entry.stat().st_uid == os.geteuid() and int(entry.name) != os.getpid()
            if mine and os.fsencode(folder) in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
                ended.append(int(entry.name))
        except OSError:
            continue  # it has exited
    return ended


# ---------------------------------------------------------------- placement


def on_node(node: str) -> Any:
    """The scheduling strategy for the node of an id and for no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=False)


def on_this_node() -> Any:
    """The scheduling strategy of an actor that must live on the node of this process.

    Ray places an actor that reserves nothing on any node; the driver's actors must not die with another node.
    """
    import ray

    return on_node(ray.get_runtime_context().get_node_id())


# ---------------------------------------------------------------- forks
# Forks of a process that is connected to Ray: the child leaves what belongs to its parent alone.


@functools.cache
def keep_parents_objects() -> None:
    """From now on no child that this process forks deletes objects of this process by garbage collection, which is off
    while a thread forks."""
    forking, enabled = 0, True

    def before() -> None:
        nonlocal forking, enabled
        enabled = enabled if forking else gc.isenabled()
        forking += 1
        gc.disable()

    def in_parent() -> None:
        nonlocal forking
        forking -= 1
        if not forking and enabled:
            gc.enable()

    def in_child() -> None:
        nonlocal forking
        gc.freeze()
        forking = 0
        if enabled:
            gc.enable()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)
