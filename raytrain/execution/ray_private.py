"""The private names of Ray that raytrain uses, each with its fallback.

The names exist in Ray 2.60.0. Each is looked up when it is used and falls back to Ray's public interface: without the
name, the run still works, but starts more slowly or is less well protected from signals.

| private name | used for | without it |
|---|---|---|
| `ray._raylet.Config.initialize` | make Ray read the environment again | Ray must not be imported earlier |
| `ray._raylet.AuthenticationTokenLoader` | Ray reads the token of each cluster | all clusters need the same |
| `ray._private.auto_init_hook.enable_auto_connect` | a Ray call may start a cluster again | it raises an error |
| `ray._private.ray_constants.ENABLE_RAY_CLUSTER` | a node's address is loopback | as for `Config` |
| `ray._private.worker.print_to_stdstream` | no pages of Ray's daemons in the output | they are printed |
| `ray._private.services.ConsolePopen` | start the daemons in process groups of their own | they stay in ours |
| `ray._private.parameter.RayParams` | the agent's port is not Ray's default | a later `ray start` has no agent |
| `ray._private.node.Node.start_monitor`, `.start_log_monitor`, `.start_api_server` | omit daemons | they start |
| `ray._private.services.get_node` | import while the daemons start | imports come afterwards |
| `DataParallelTrainer._create_default_callbacks` | omit two callbacks, each an actor | they are started |
| `DataParallelTrainer._initialize_and_run_controller` | pass our scaling policy | Ray's own policy |
| `...controller.TrainController` | the controller uses a prestarted process | a new one starts |
| `...constants.ENV_VARS_TO_PROPAGATE` | the workers use prestarted processes | new ones start |
| its `train_fn_ref._ref` | the driver owns no stored object | a failed agent ends the command without a result |
| `...scaling_policy.FixedScalingPolicy` | request no workers from an autoscaler | Ray's own policy requests them |
| `WorkerGroup.get_workers`, `.shutdown`, `Worker.actor` | end workers that formed no process group | left to Ray |
| `...execution.callback.ControllerCallback` | leave a faulty node out | it is used again |
| `ray._private.state.actors` | end Train's controller, so that the driver can leave Ray | the run ends with an error |
| `ray._private.state.available_resources_per_node` | room by node | elastic runs keep their number of workers |
| `ray._private.worker.global_worker.gcs_client`, `ray.autoscaler.v2.utils` | is there an autoscaler | one is assumed |
| `ray._private.worker._global_node.dead_processes` | notice at once that a daemon died | Ray's calls fail later |
| `ray._private.services.get_ray_address_from_environment` | "auto" finds a cluster on loopback | Ray looks itself |
| `ray._private.worker.global_worker.function_actor_manager` | imports end before an actor starts | no imports |
| `RAY_preload_python_modules`, `RAY_worker_maximum_startup_concurrency` | prestarted processes import | they do not |

What they save of a start, measured earlier on two cores: the omitted daemons 3 to 4 s; prestarted processes with their
imports about 2 s (0.53 instead of 0.70 of a bare TorchTrainer's time to its first step); the imports while the daemons
start about 1 s.

Without `Config.initialize`, a private cluster cannot start in a process that imported Ray before the command: Ray then
does not know the cluster's token. The command itself imports Ray after it has set the environment.

`ray.init(_temp_dir=, _node_ip_address=)` (`cluster/ray_runtime.py`) deliberately has no fallback: without these
arguments, a private cluster would listen on every interface.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.ray_runtime import PRELOAD

#: Default callbacks of Ray Train that no run needs, and then those that no run in a private cluster needs: this one
#: distributes Ray Datasets, which are not used there.
UNNEEDED_CALLBACKS = ("PlacementGroupCleanerCallback", "DatasetsCallback")

#: Exceptions by which Ray Train reports that a worker's process died. The first is private: all are matched by name.
DEATH_ERRORS = ("WorkerHealthCheckFailedError", "ActorDiedError", "RayActorError")


#: So much of a worker's stderr is read.
STDERR_BYTES = 256 << 10

#: Decides whether a node's address is that of the network, or loopback; Ray sets it when it is imported.
CLUSTER = "ENABLE_RAY_CLUSTER"

#: The label that Ray gives each node, with the node's id as the value.
NODE_ID_LABEL = "ray.io/node-id"

#: Daemons of a private cluster without which it does not work. Ray starts none of them again.
VITAL_DAEMONS = ("raylet", "gcs_server")


def find(owner: Any, name: str) -> Any | None:
    """Return an attribute of a module (given by its dotted name) or of a Ray object; None if it is missing."""
    try:
        return getattr(importlib.import_module(owner) if isinstance(owner, str) else owner, name, None)
    except ImportError:
        return None


@contextlib.contextmanager
def _in_place_of(owner: Any, name: str, replacement: Callable[[Any], Any]) -> Iterator[None]:
    """Context manager in which a name of a module of Ray (its dotted name) or of a class stands for
    `replacement(original)`, where Ray has it."""
    original = find(owner, name)
    if original is None:
        yield
        return
    holder = importlib.import_module(owner) if isinstance(owner, str) else owner
    setattr(holder, name, replacement(original))
    try:
        yield
    finally:
        setattr(holder, name, original)


def reread_environment() -> None:
    """Make Ray read its settings and the token from the environment again, while this process is not connected.

    It reads the settings once, when it is imported, and the token with the first cluster.
    """
    config = find("ray._raylet", "Config")
    if config is not None:
        with contextlib.suppress(AttributeError, TypeError):
            config.initialize("")
    constants = find("ray._private", "ray_constants")
    if constants is not None and hasattr(constants, CLUSTER):
        setattr(constants, CLUSTER, os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "1") != "0")
    loader = find(find("ray._raylet", "AuthenticationTokenLoader"), "instance")
    if loader is not None:
        with contextlib.suppress(AttributeError, TypeError):
            loader().reset_cache()
    allow_auto_connect(os.environ.get("RAY_ENABLE_AUTO_CONNECT", "") != "0")


def worker_stderr(pid: int) -> str:
    """What a worker of this node last wrote to stderr, in a process that Ray started; "" where it is not found."""
    with contextlib.suppress(OSError):
        logs = os.path.dirname(os.readlink("/proc/self/fd/2"))  # Ray has a file there for each of its processes
        for path in glob.glob(os.path.join(logs, f"worker-*-{pid}.err")):
            with open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - STDERR_BYTES))
                return file.read().decode(errors="replace")
    return ""


def running_address() -> str:
    """The address that `ray.init(address="auto")` would use; "auto" where Ray has no such function any more. Raises
    ConnectionError if there is no cluster."""
    look_up = find("ray._private.services", "get_ray_address_from_environment")
    return "auto" if look_up is None else str(look_up("auto", None))


def allow_auto_connect(allowed: bool) -> None:
    """Whether a Ray call of this process may start a cluster where none is running."""
    hook = find("ray._private", "auto_init_hook")
    if hook is not None and hasattr(hook, "enable_auto_connect"):
        hook.enable_auto_connect = allowed


@contextlib.contextmanager
def no_pages_of_daemons() -> Iterator[None]:
    """Context manager in which Ray prints no pages of its daemons, such as about a worker that died, in this process:
    raytrain says the same in a line, and those about other jobs on the cluster do not concern this one."""
    with _in_place_of("ray._private.worker", "print_to_stdstream", lambda _: lambda *_, **__: None):
        yield


@contextlib.contextmanager
def own_process_groups() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Context manager in which `ray.init` starts Ray's daemons in their own process groups; yields those it starts.

    A shell, `timeout` and service managers signal an entire process group, which would end the daemons before the
    workers could save. The daemons still end with this process: the kernel signals its death to them.
    """
    started = list[subprocess.Popen[bytes]]()

    def replacement(original: Any) -> Any:
        def start(*given: Any, **named: Any) -> Any:
            started.append(original(*given, process_group=0, **named))
            return started[-1]

        return start if isinstance(original, type) and issubclass(original, subprocess.Popen) else original

    with _in_place_of("ray._private.services", "ConsolePopen", replacement):
        yield started


@contextlib.contextmanager
def only_needed_daemons(*, logs: bool) -> Iterator[None]:
    """Context manager in which `ray.init` omits daemons that a private cluster on one machine does not need.

    Omitted are the autoscaler's monitor and the dashboard's server, which Ray starts and waits for also with
    `include_dashboard=False` (the server looks up the machine's cloud provider on the network), and without `logs` the
    process that forwards the output of workers. On two cores this saves 3 to 4 seconds of a run.
    """
    node = find("ray._private.node", "Node")
    with contextlib.ExitStack() as stack:
        for name in ("start_monitor", "start_api_server", *(() if logs else ("start_log_monitor",))):
            stack.enter_context(_in_place_of(node, name, lambda _: lambda *_, **__: None))
        yield


@contextlib.contextmanager
def free_agent_port() -> Iterator[None]:
    """Context manager in which `ray.init` leaves the default port of an agent to a `ray start` on this machine."""
    port = {"dashboard_agent_listen_port": 0}
    with _in_place_of("ray._private.parameter", "RayParams", lambda original: functools.partial(original, **port)):
        yield


@contextlib.contextmanager
def first_look(*, meanwhile: Callable[[], object], daemons: Sequence[Any] = ()) -> Iterator[None]:
    """Context manager in which `ray.init`, before it looks whether its node has started, calls `meanwhile`. One of the
    `daemons` that has ended by then raises a `ChildProcessError(exit code, text, name)` in `ray.init`, which would look
    for its node until a time limit."""

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_node(*given: Any) -> Any:
            meanwhile()
            for one in (one for one in daemons if one.poll() is not None):
                name, code = os.path.basename(one.args[0]), one.returncode
                by = f"exit code {code}" if code >= 0 else f"signal {-code}, {signal.Signals(-code).name}"
                raise ChildProcessError(code, f"Ray's process {name} ended at once ({by})", name)
            return original(*given)

        return get_node

    with _in_place_of("ray._private.services", "get_node", replacement):
        yield


def class_loader() -> Any | None:
    """Of a process that Ray started: loads the class of the actor that the process becomes."""
    return find(find("ray._private.worker", "global_worker"), "function_actor_manager")


def propagate_nothing() -> None:
    """In the controller of a private cluster: give the workers no variables of their own, for the same reason."""
    propagated = find("ray.train.v2._internal.constants", "ENV_VARS_TO_PROPAGATE")
    if isinstance(propagated, set) and PRELOAD in os.environ:
        propagated.clear()


def fixed_scaling_policy(scaling_config: Any) -> Any | None:
    """A scaling policy with the planned number of workers that requests nothing from an autoscaler, for which Ray would
    start a process. None if Ray's class is missing or takes different arguments: its default policy applies then."""
    parent = find("ray.train.v2._internal.execution.scaling_policy", "FixedScalingPolicy")
    if parent is None:
        return None

    class PlannedWorkers(parent):
        def after_controller_start(self, *_: Any, **__: Any) -> None:
            """Do not start the process that requests resources. Ray calls this in the controller."""
            propagate_nothing()

        def _maybe_send_resource_request(self) -> None:
            """Request no resources."""

    with contextlib.suppress(TypeError):
        return PlannedWorkers(scaling_config)
    return None


@dataclass(frozen=True)
class InlineFunction:
    """In place of Ray Train's reference to the workers' function, which it stores as an object of the driver.

    Ray ends a process that owns a stored object as soon as its node is dead, as it then is after one of Ray's agents
    failed: it marks the object as lost in a store that has gone.
    """

    pickled: bytes  # only a worker unpickles it: that imports torch, which the controller does not need

    def get(self) -> Any:
        from ray import cloudpickle

        return cloudpickle.loads(self.pickled)


def trainer_class(*, local: bool) -> type[Any]:
    """`TorchTrainer` without callbacks that are not needed, each of which starts a process; in a private cluster the
    controller and the workers also use processes that Ray has started in advance. The plain `TorchTrainer` if Ray lacks
    an overridden method.

    The callback that removes the placement group of a controller that died asks Ray's dashboard every second, and fails
    noisily where there is none. It has nothing to remove: a driver that lost its controller leaves Ray (`ClusterLost`),
    and Ray then removes all groups of its job.
    """
    from ray import cloudpickle
    from ray.train.torch import TorchTrainer

    class PromptTrainer(TorchTrainer):
        def _create_default_callbacks(self, *given: Any, **named: Any) -> list[Any]:
            unneeded = UNNEEDED_CALLBACKS if local else UNNEEDED_CALLBACKS[:1]
            callbacks = super()._create_default_callbacks(*given, **named)
            return [entry for entry in callbacks if type(entry).__name__ not in unneeded]

        def _initialize_and_run_controller(self, **named: Any) -> Any:
            if not local:
                return super()._initialize_and_run_controller(**named)
            policy = fixed_scaling_policy(self.scaling_config) if "scaling_policy" in named else None
            named |= {} if policy is None else {"scaling_policy": policy}
            if find(function := named.get("train_fn_ref"), "_ref") is not None:
                pickled = cloudpickle.dumps(function.get())  # pyright: ignore[reportPrivateImportUsage, reportOptionalMemberAccess]
                named["train_fn_ref"], function._ref = InlineFunction(pickled), None  # pyright: ignore[reportOptionalMemberAccess]
            controller = find("ray.train.v2._internal.execution.controller", "TrainController")
            if controller is None or PRELOAD not in os.environ:
                return super()._initialize_and_run_controller(**named)
            # As Ray does it, but without environment variables of its own: Ray gives an actor that has some a new
            # process, and leaves those unused that it started in advance. Processes of a private cluster inherit the
            # driver's environment, with the same variables.
            import ray

            here = {NODE_ID_LABEL: ray.get_runtime_context().get_node_id()}
            actor = ray.remote(num_cpus=0, label_selector=here)(controller).remote(**named)
            ray.get(actor.run.remote())
            return ray.get(actor.get_result.remote())

    overridden = ("_create_default_callbacks", "_initialize_and_run_controller")
    return PromptTrainer if all(find(TorchTrainer, name) for name in overridden) else TorchTrainer


def node_callbacks(selector: Callable[[], dict[str, str] | None]) -> list[Any]:
    """The callback through which Ray Train's controller asks, before each worker group, which nodes it may use:
    `selector` returns a label selector for all workers, or None for every node."""
    parent = find("ray.train.v2._internal.execution.callback", "ControllerCallback")
    if parent is None or not hasattr(parent, "on_controller_start_worker_group"):
        return []

    class ChooseNodes(parent):
        def on_controller_start_worker_group(self, **_: Any) -> dict[str, str] | None:
            return selector()

    return [ChooseNodes()]


def controller_pid() -> int | None:
    """Process id of Ray Train's controller of this driver, which Ray starts on the driver's node; None without one."""
    import ray

    actors = find("ray._private.state", "actors")
    job = ray.get_runtime_context().get_job_id()
    alive = [
        row
        for row in (actors() if actors is not None else {}).values()
        if row["JobID"] == job and row["ActorClassName"] == "TrainController" and row["State"] == "ALIVE"
    ]
    return max(alive, key=lambda row: row["StartTime"])["Pid"] if alive else None


def free_by_node(*, without: Collection[str] = ()) -> list[dict[str, float]]:
    """What each node has free: {resource: amount}, those with the ids in `without` left out; nothing where Ray does not
    tell."""
    free = find("ray._private.state", "available_resources_per_node")
    return [] if free is None else [amounts for node, amounts in free().items() if node not in without]


def autoscales() -> bool:
    """Whether an autoscaler may add nodes to the connected cluster, where each node is no type of its own ("node_ID");
    True where Ray does not tell."""
    client: Any = find(find("ray._private.worker", "global_worker"), "gcs_client")
    try:
        second: Any = find("ray.autoscaler.v2.utils", "is_autoscaler_v2")
        status = client.internal_kv_get(b"__autoscaling_status", None)
        kinds = (json.loads(status or "{}").get("autoscaler_report") or {}).get("active_nodes", {})
        return second(gcs_client=client) or any(not kind.startswith("node_") for kind in kinds)
    except Exception:  # of another version of Ray, in any form
        return True


def dead_daemons() -> list[str]:
    """Names of the vital daemons that died, of the cluster that this process started."""
    node: Any = find("ray._private.worker", "_global_node")
    dead_processes = find(node, "dead_processes")
    if node is None or dead_processes is None:
        return []
    return [name for name, _ in dead_processes() if name in VITAL_DAEMONS]


def end_workers(worker_group: Any) -> None:
    """End the processes of a worker group that formed no process group.

    Ray drops such a group without ending it, and the next group would wait for its resources forever.
    """
    import ray

    get_workers, shutdown = find(worker_group, "get_workers"), find(worker_group, "shutdown")
    if get_workers is None or shutdown is None:
        return
    with contextlib.suppress(AttributeError, TypeError):
        for worker in get_workers():
            ray.kill(worker.actor)
        shutdown()
