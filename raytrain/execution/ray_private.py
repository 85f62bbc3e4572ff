"""The private names of Ray that raytrain uses, each with what happens where Ray no longer has it.

They were seen in Ray 2.60.0. Each is looked up when it is used, and each has a fallback to Ray's public interface: the
run works without the name, only slower to start or less well protected from signals.

| private name | used for | without it |
|---|---|---|
| `ray._raylet.Config.initialize` | have Ray read the environment again | Ray must not be imported earlier |
| `ray._private.services.ConsolePopen` | start the daemons in process groups of their own | they stay in ours |
| `DataParallelTrainer._create_default_callbacks` | leave out two callbacks, each an actor | they are started |
| `DataParallelTrainer._initialize_and_run_controller` | pass our scaling policy | Ray's own policy |
| `...scaling_policy.FixedScalingPolicy` | ask no autoscaler for workers | Ray's own policy asks one |
| `WorkerGroup.get_workers`, `.shutdown`, `Worker.actor` | end workers that formed no process group | left to Ray |

Without `Config.initialize`, a private cluster cannot start in a process that imported Ray before the command: Ray then
does not know the cluster's token. The command itself imports Ray after it has set the environment.

`ray.init(_temp_dir=, _node_ip_address=)` (`jobs/driver/runtime.py`) has no fallback on purpose: without these a private
cluster would listen on every interface.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import subprocess
from collections.abc import Iterator
from typing import Any

#: Default callbacks that a cluster which ends with the command does not need: one hands out Ray Datasets, of which
#: there are none here, the other removes what a controller leaves behind in a cluster that continues to run.
UNNEEDED_CALLBACKS = ("PlacementGroupCleanerCallback", "DatasetsCallback")

#: Exceptions by which Ray Train reports a worker whose process died; the first one is private, so all go by name.
DEATH_ERRORS = ("WorkerHealthCheckFailedError", "ActorDiedError", "RayActorError")


def find(owner: Any, name: str) -> Any | None:
    """An attribute of a module, by its dotted name, or of an object of Ray's; None where it is missing."""
    try:
        return getattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name, None)
    except ImportError:
        return None


def reread_environment() -> None:
    """Have Ray read its settings from the environment again; whoever imported Ray earlier had it read them then."""
    config = find("ray._raylet", "Config")
    if config is not None:
        with contextlib.suppress(AttributeError, TypeError):
            config.initialize("")


@contextlib.contextmanager
def own_process_groups() -> Iterator[None]:
    """Inside, `ray.init` starts Ray's daemons in process groups of their own.

    A shell, `timeout` and service managers signal a whole process group: the daemons would end before the workers
    could save. They still end with this process: the kernel signals its death to them.
    """
    original = find("ray._private.services", "ConsolePopen")
    if not (isinstance(original, type) and issubclass(original, subprocess.Popen)):
        yield
        return
    services: Any = importlib.import_module("ray._private.services")
    services.ConsolePopen = functools.partial(original, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = original


def fixed_scaling_policy(scaling_config: Any) -> Any | None:
    """A policy of as many workers as were planned, which asks no autoscaler: Ray would start a process for that.

    None where Ray's own class is missing or takes other arguments; then Ray's default policy is right.
    """
    parent = find("ray.train.v2._internal.execution.scaling_policy", "FixedScalingPolicy")
    if parent is None:
        return None

    class PlannedWorkers(parent):
        def after_controller_start(self, *_: Any, **__: Any) -> None:
            """Ray's would start the process that asks."""

        def _maybe_send_resource_request(self) -> None:
            """Ray's would ask for resources."""

    with contextlib.suppress(TypeError):
        return PlannedWorkers(scaling_config)
    return None


def local_trainer() -> type[Any]:
    """`TorchTrainer` for a cluster that ends with the command: three processes fewer, three seconds on two cores.

    Where Ray has none of the overridden methods they are never called, and it is a plain `TorchTrainer`.
    """
    from ray.train.torch import TorchTrainer

    class LocalTrainer(TorchTrainer):
        def _create_default_callbacks(self, *given: Any, **named: Any) -> list[Any]:
            callbacks = super()._create_default_callbacks(*given, **named)
            return [entry for entry in callbacks if type(entry).__name__ not in UNNEEDED_CALLBACKS]

        def _initialize_and_run_controller(self, *given: Any, **named: Any) -> Any:
            policy = fixed_scaling_policy(self.scaling_config) if "scaling_policy" in named else None
            return super()._initialize_and_run_controller(
                *given, **(named if policy is None else {**named, "scaling_policy": policy})
            )

    overridden = ("_create_default_callbacks", "_initialize_and_run_controller")
    return LocalTrainer if all(find(TorchTrainer, name) for name in overridden) else TorchTrainer


def end_workers(worker_group: Any) -> None:
    """End the processes of a worker group that formed no process group.

    Ray forgets such a group without ending it, and the next one would wait for its resources forever.
    """
    import ray

    get_workers, shutdown = find(worker_group, "get_workers"), find(worker_group, "shutdown")
    if get_workers is None or shutdown is None:
        return
    with contextlib.suppress(AttributeError, TypeError):
        for worker in get_workers():
            ray.kill(worker.actor)
        shutdown()
