"""`fit`: runs a `TrainJob` with Ray Train's `TorchTrainer` and returns rank 0's result.

`jobs.driver.watch` calls it in a thread. Nodes on which workers failed again and again in a machine's way are left out.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import ray
import ray.exceptions
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig

from raytrain.errors import ClusterLost, RunError, first_line
from raytrain.execution.controller import Collectives, FaultWriter
from raytrain.execution.driver_channel import AttemptResult
from raytrain.execution.ray_private import NODE_ID_LABEL, free_by_node, node_callbacks, trainer_class
from raytrain.execution.worker import train_loop_per_worker
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.plan.room import TYPE_SHARE, Need, room_for
from raytrain.runs.faults import Fault, read_faults
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import split
from raytrain.train.job import TrainJob

#: With this many such faults, a node is left out.
MOST_FAULTS = 2
#: Part of the messages of CUDA and HIP for errors of the device itself (CUDA runtime API, `cudaError_t`).
DEVICE_ERRORS = (
    "uncorrectable ECC", "NVLink", "hardware stack error", "hardware error", "unspecified launch failure",
    "busy or unavailable", "fallen off the bus",
)  # fmt: skip


def is_hardware(fault: Fault) -> bool:
    """Whether a fault may come from the machine: the process died without an exception, or the device reported it."""
    return fault.error == "WorkerDied" or any(words in fault.message for words in DEVICE_ERRORS)


def faulty_nodes(faults: Iterable[Fault]) -> list[str]:
    """Ids of the nodes with at least `MOST_FAULTS` such faults, of the decisive ones of each failed attempt."""
    counts = Counter(fault.node for fault in faults if fault.node and is_hardware(fault))
    return sorted(node for node, count in counts.items() if count >= MOST_FAULTS)


def choose_nodes(
    run_path: str, each: Mapping[str, float], least: int, channel: Any, nodes: Callable[[], list[dict[str, Any]]]
) -> dict[str, str] | None:
    """Ray's label selector that leaves the faulty nodes out of the next worker group; None if there are none, or if the
    others have no room for `least` workers with the resources `each`. Called in Ray Train's controller before each
    group starts; `nodes` returns what `ray.nodes()` does, and the `DriverChannel` receives each node that is left out.
    """
    faulty = faulty_nodes(read_faults(RunFolder(run_path), since=0))
    if not faulty:
        return None
    alive = {node["NodeID"]: node for node in nodes() if node["Alive"]}
    left_out = [node for node in faulty if node in alive]
    others = [dict(node["Resources"]) for name, node in alive.items() if name not in left_out]
    if not left_out or room_for(each, others) < least:
        return None
    for node in left_out:
        address = alive[node]["NodeManagerAddress"]
        text = f"workers on node {address} failed {MOST_FAULTS} times as on a broken machine: it is left out"
        channel.warn.remote(f"node_left_out:{node}", "node_left_out", text, {"node": node, "address": address})
    return {NODE_ID_LABEL: f"!in({','.join(left_out)})"}


def fit(
    job: TrainJob, *, data: Any, channel: Any, local: bool, interface: str | None, storage: str,
    least: int | None = None,
) -> AttemptResult:  # fmt: skip
    """Run the job's workers until the run ends.

    Args:
        data: what the driver read for all workers (the default text, in-memory tensors), or None.
        local: the cluster is private to this command, on this machine: everything stays on loopback.
        storage: a directory for Ray's own state.
        least: workers with which an elastic run can continue; None: the planned number.

    Raises RunError if Ray Train gave up, and ClusterLost if a process of Ray died that it cannot do without.
    """
    on_gpu = job.planned("device") == "cuda"
    resources = worker_resources(job.plan, local=local)
    needed = least or int(job.planned("workers"))
    selector = partial(choose_nodes, job.run_path, resources, needed, channel, ray.nodes)
    choosing = [] if local else node_callbacks(selector)
    # the job may contain Python objects; Ray re-exports `dumps` without declaring it
    channel.keep.remote("job", cloudpickle.dumps(job))  # pyright: ignore[reportPrivateImportUsage]
    if data is not None:
        channel.keep.remote("data", data)
    trainer = trainer_class(local=local)(
        train_loop_per_worker,
        train_loop_config={
            "import_path": job.import_path,
            "run_path": job.run_path,
            "channel": channel,
            "data": data is not None,
        },
        scaling_config=ScalingConfig(
            num_workers=int(job.planned("workers")),
            use_gpu=on_gpu,
            resources_per_worker=resources,
            placement_strategy=job.planned("placement"),
            accelerator_type=accelerator_type(job.plan, local=local),
        ),
        torch_config=Collectives(  # pyright: ignore[reportArgumentType]  (has all the attributes that Ray uses, without importing torch)
            backend=job.planned("backend"), loopback=local, interface="lo" if local else interface, channel=channel
        ),
        run_config=RunConfig(
            name=split(job.run_path)[1],
            storage_path=storage,
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[FaultWriter(job.run_path, job.owner, channel), *choosing],
        ),
    )
    try:
        result = trainer.fit().return_value
    except Exception as error:
        raised_by_a_call = isinstance(error, ray.exceptions.RayTaskError | ray.exceptions.RuntimeEnvSetupError)
        if isinstance(error, ray.exceptions.RayError | ConnectionError) and not raised_by_a_call:
            if isinstance(error, ray.exceptions.RayActorError):
                raise ClusterLost("the controller process of Ray Train died") from error
            text = f"the connection to Ray was lost ({type(error).__name__}: {first_line(error)})"
            raise ClusterLost(text) from error
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Ray colours the names of actors
        raise RunError(f"Ray Train gave up: {type(error).__name__}: {text}") from error
    if not isinstance(result, AttemptResult):
        raise RunError(f"the workers returned {result!r} instead of a result")
    return result


def worker_resources(plan: Plan, *, local: bool) -> dict[str, float]:
    """What one worker reserves: on a shared cluster, a CPU worker reserves the cores it computes on."""
    on_gpu = _value(plan.device) == "cuda"
    cpus = 1 if on_gpu or local else int(_value(plan.threads) or 1)
    return {"CPU": cpus, "GPU": plan.gpu_share} if on_gpu else {"CPU": cpus}


def accelerator_type(plan: Plan, *, local: bool) -> str | None:
    """Ray's accelerator type where `scale.accelerator` names one; None for any."""
    name = str(_value(plan.accelerator))
    any_kind = local or _value(plan.device) != "cuda" or name.split(":")[0] in ("cpu", "cuda", "auto")
    return None if any_kind else name


def workers_need(plan: Plan, number: int) -> Need:
    each, kind = worker_resources(plan, local=False), accelerator_type(plan, local=False)
    each |= {} if kind is None else {f"accelerator_type:{kind}": TYPE_SHARE}
    return Need("scale.workers", "worker", number, each)


def free_room(plan: Plan, *, without: Collection[str] = ()) -> int:
    """Workers that fit what the nodes of the cluster have free, those with the ids in `without` left out."""
    return room_for(workers_need(plan, 1).each, free_by_node(without=without))


def waits_for_room(groups: Mapping[str, Mapping[str, Any]], job: str) -> bool:
    """Whether a placement group of a job has not been placed, so that its workers cannot start: while the group is
    placed and their processes start, nothing is free either. `groups` is `ray.util.placement_group_table()`, whose ids
    end with the id of their job."""
    own = [group for name, group in groups.items() if name.endswith(job)]
    return any(group["state"] in ("PENDING", "PREPARED", "RESCHEDULING") for group in own)


def _value(choice: Any) -> Any:
    assert isinstance(choice, Resolved)  # what Ray reserves is never deferred to a measurement
    return choice.value


def quiet_ray() -> None:
    """Silence the log lines of Ray and its libraries in this process (`-v` keeps them)."""
    for name in ("ray", "ray.train"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in ("ray.tune", "ray.data"):  # a failed trial, or a failed unit of rows, is reported in one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
