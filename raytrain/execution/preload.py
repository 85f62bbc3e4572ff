"""Imported by each process of a private cluster when Ray starts it, before it has work (`cluster.ray_runtime`).

Ray starts the processes of a private cluster together with its daemons. While the driver prepares the job, each of them
imports Ray Train in a thread; those that have no work afterwards import torch, which only the workers need. Which
process Ray uses for what cannot be chosen or known in advance. An actor is created after these imports: two threads
that import the same package at once may both see it half imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from cluster.ray_runtime import PRELOAD
from raytrain.execution.ray_private import class_loader

#: What every process of a run needs but the driver's channel, which starts before the others: Ray Train, and the
#: slowest imports of it.
FOR_ALL = ("pyarrow", "pandas", "ray.train")
#: What a worker needs besides.
FOR_WORKERS = ("torch", "raytrain.execution.worker")


def take_number(folder: str, *, most: int) -> int:
    """The lowest number below `most` that no other process has taken in this folder; else `most`."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    for number in range(most):
        with contextlib.suppress(FileExistsError):
            os.close(os.open(os.path.join(folder, str(number)), os.O_CREAT | os.O_EXCL, 0o600))
            return number
    return most


class Preload(threading.Thread):
    """Imports in advance until this process has work. `workers` processes of the cluster will compute with torch; these
    take their numbers in `folder`."""

    def __init__(self, workers: int, folder: str) -> None:
        super().__init__(daemon=True, name="preload")
        self._workers, self._folder = workers, folder
        self._has_work = threading.Event()

    def run(self) -> None:
        if self._imported(FOR_ALL) and take_number(self._folder, most=self._workers) < self._workers:
            self._imported(FOR_WORKERS)

    def before(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """A function that waits for the import under way, starts no other, and then calls `create`."""

        def create_alone(*given: Any, **named: Any) -> Any:
            self._has_work.set()
            self.join()
            return create(*given, **named)

        return create_alone

    def _imported(self, modules: tuple[str, ...]) -> bool:
        """Whether all were imported before this process had work."""
        for name in modules:
            if self._has_work.is_set():
                return False
            with contextlib.suppress(ImportError):  # whoever needs the module reports it
                importlib.import_module(name)
        return not self._has_work.is_set()


def preload(environ: Mapping[str, str], *, loader: Any) -> Preload | None:
    """Start the imports of this process; None where it has none. `environ` holds `PRELOAD`, "WORKERS:FOLDER"; `loader`
    is Ray's object that loads the class of an actor (`load_actor_class`)."""
    workers, _, folder = environ.get(PRELOAD, "").partition(":")
    load = getattr(loader, "load_actor_class", None)
    if load is None or not (workers.isdecimal() and folder):
        return None
    thread = Preload(int(workers), folder)
    loader.load_actor_class = thread.before(load)
    thread.start()
    return thread


if PRELOAD in os.environ:
    preload(os.environ, loader=class_loader())
