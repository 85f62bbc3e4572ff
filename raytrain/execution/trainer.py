"""`fit`: run a `TrainJob` with Ray Train's `TorchTrainer` and return rank 0's result. Driver side.

Ray restarts all workers after any failure (`max_failures=-1`); rank 0 decides at the start of the next attempt whether
to continue (`raytrain.execution.recovery.failure_policy`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import ray
import ray.exceptions
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig

from raytrain.errors import ClusterLost, RunError, first_line
from raytrain.execution.controller import Collectives, FaultWriter
from raytrain.execution.driver_channel import AttemptResult
from raytrain.execution.ray_private import free_by_node, node_callbacks, trainer_class
from raytrain.execution.recovery.faulty_nodes import NodeChoice
from raytrain.execution.worker import train_loop_per_worker
from raytrain.plan.choice import Resolved
from raytrain.plan.plan import Plan
from raytrain.plan.room import TYPE_SHARE, Need, room_for
from raytrain.runs.storage import split
from raytrain.train.job import TrainJob


def fit(
    job: TrainJob,
    *,
    data: Any,
    channel: Any,
    local: bool,
    interface: str | None,
    storage: str,
    least: int | None = None,
) -> AttemptResult:
    """Run the job's workers until the run ends.

    Args:
        data: what the driver read for all workers (the default text, in-memory tensors), or None.
        channel: the `DriverChannel` actor.
        local: the cluster is private to this command, on this machine: everything stays on loopback.
        interface: `cluster.interface`, the network interface for collectives, or None.
        storage: a directory for Ray's own state.
        least: workers with which an elastic run can continue; None: the planned number.

    Raises:
        RunError: Ray Train gave up, with its reason.
        ClusterLost: a process of Ray died that Ray Train cannot do without.
    """
    on_gpu = job.planned("device") == "cuda"
    resources = worker_resources(job.plan, local=local)
    choice = NodeChoice(job.run_path, resources, least or int(job.planned("workers")), channel)
    choosing = [] if local else node_callbacks(partial(choice.selector, ray.nodes))
    _hand_over(job, data, channel)
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
            backend=job.planned("backend"),
            loopback=local,
            interface="lo" if local else interface,
            channel=channel,
        ),
        run_config=RunConfig(
            name=split(job.run_path)[1],
            storage_path=storage,
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[FaultWriter(job.run_path, job.owner, channel), *choosing],
        ),
    )
    return _result_of(trainer)


def _hand_over(job: TrainJob, data: Any, channel: Any) -> None:
    """Give the channel what the workers read from it. The workers wait for it, not this process, so that Ray Train's
    controller starts at the same time as the channel."""
    # the job may contain Python objects; Ray re-exports `dumps` without declaring it
    channel.keep.remote("job", cloudpickle.dumps(job))  # pyright: ignore[reportPrivateImportUsage]
    if data is not None:
        channel.keep.remote("data", data)


def _result_of(trainer: Any) -> AttemptResult:
    try:
        result = trainer.fit().return_value
    except Exception as error:
        raise _explained(error) from error
    if not isinstance(result, AttemptResult):
        raise RunError(f"the workers returned {result!r} instead of a result")
    return result


def _explained(error: Exception) -> RunError:
    """What an exception of `TorchTrainer.fit` means: Ray itself was lost, or Ray Train gave up with this reason."""
    raised_by_a_call = isinstance(error, ray.exceptions.RayTaskError | ray.exceptions.RuntimeEnvSetupError)
    if isinstance(error, ray.exceptions.RayError | ConnectionError) and not raised_by_a_call:
        if isinstance(error, ray.exceptions.RayActorError):
            return ClusterLost("the controller process of Ray Train died")
        return ClusterLost(f"the connection to Ray was lost ({type(error).__name__}: {first_line(error)})")
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # Ray colours the names of actors
    return RunError(f"Ray Train gave up: {type(error).__name__}: {text}")


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
    """What so many workers of a plan need of a cluster."""
    each, kind = worker_resources(plan, local=False), accelerator_type(plan, local=False)
    return Need(
        "scale.workers", "worker", number, each | ({} if kind is None else {f"accelerator_type:{kind}": TYPE_SHARE})
    )


def free_room(plan: Plan, *, without: Collection[str] = ()) -> int:
    """Workers that fit what the nodes of the cluster have free.

    Args:
        plan: says what a worker needs.
        without: ids of nodes that do not count.
    """
    return room_for(workers_need(plan, 1).each, free_by_node(without=without))


def waits_for_room(groups: Mapping[str, Mapping[str, Any]], job: str) -> bool:
    """Whether a placement group of a job has not been placed, so that its workers cannot start.

    While the workers' group is placed and their processes start, nothing is free either.

    Args:
        groups: `ray.util.placement_group_table()`.
        job: the id of the driver's job, with which the ids of its groups end.
    """
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
