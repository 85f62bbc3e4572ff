"""Batch inference with Ray Data: units go through a pool of actors, each of which loads the model once."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from cluster.ray_runtime import on_this_node
from raytrain.config.user_code import import_from
from raytrain.errors import InputError, RaytrainError, RunError, StateLost, first_line, printable
from raytrain.infer.input import Unit, UnitReport
from raytrain.infer.output import WorkerProgress, written_report
from raytrain.infer.stages.actors import ReplicaPlaces, remote_pipeline
from raytrain.infer.worker import InferenceWorker, Work

#: Actors in a row that may die in one unit, or while they start, as where a node is lost, and replicas in a row that
#: may lose a stage before they have computed a unit; errors of the model do not count as such.
LOST_STARTS = 3
ANSWER_S = 5.0
RESULT = "result"


class UnitStarts:
    """The actor that knows whether a worker has started, and counts how often each unit was begun by one that had been
    started again: Ray repeats the unit of a dead actor without limit, or with one that counts each failed
    connection."""

    def __init__(self) -> None:
        self._starts = Counter[int]()
        self._workers = 0

    def arrive(self) -> None:
        """A worker has its place, and starts."""
        self._workers += 1

    def workers(self) -> int:
        return self._workers

    def begin(self, number: int) -> int:
        """Count a start of a unit, before it is computed; returns how many that makes."""
        self._starts[number] += 1
        return self._starts[number]


class UnitActor:
    """An actor of the pool: a worker, or the first stage of a divided model with actors for the others.

    It returns errors instead of raising them: Ray passes on what its code raised as a text only, and of what kept it
    from starting nothing. `starts`: the `UnitStarts` actor. `cpus`, `gpus`, `accelerator`: what each further stage
    needs, as for `run_units`."""

    def __init__(self, work: Work, starts: Any, cpus: float, gpus: float, accelerator: str | None) -> None:
        import ray

        context = ray.get_runtime_context()
        needs = {"cpus": cpus, "gpus": gpus, "accelerator": accelerator}
        self._work, self._name = work, f"{context.get_node_id()[:8]}-{os.getpid()}"
        self._connect = None if work.split is None else partial(remote_pipeline, work, **needs)
        starts.arrive.remote()
        self._starts = starts if context.was_current_actor_reconstructed else None
        import_from(work.import_path)
        self._worker = self._new_worker()
        self._error: RaytrainError | None = None
        self._lost = 0
        self._load()

    def _new_worker(self) -> InferenceWorker:
        return InferenceWorker(
            self._work, self._name, WorkerProgress(self._work.parts, self._name).report, self._connect
        )  # fmt: skip

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        numbers, starts, rows = (batch[name].tolist() for name in ("number", "start", "rows"))
        return {RESULT: [self._run(Unit(*one)) for one in zip(numbers, starts, rows, strict=True)]}

    def _load(self) -> None:
        """Load the model, again where a process with a part of it ends meanwhile; keeps the error."""
        while self._error is None:
            try:
                self._worker.load()
                return
            except StateLost as error:
                reason = str(error)
            except Exception as error:
                self._error = _as_own(error, "the model did not load")
                return
            self._count_lost(reason)

    def _count_lost(self, reason: str) -> None:
        """Let go of a replica that lost a part of its model, for a new one; an error, once `LOST_STARTS` have computed
        nothing."""
        self._worker.close()
        self._worker = self._new_worker()
        gc.collect()  # the tensors of the first stage
        self._lost += 1
        if self._lost >= LOST_STARTS:
            what = "a stage" if self._work.split is not None else "a process with a part of the model"
            self._error = RunError(f"{self._lost} times in a row {what} ended before a unit was complete; {reason}")

    def _run(self, unit: Unit) -> str:
        import ray

        written = None if self._starts is None else written_report(self._work.parts, unit, self._work.job)
        if written is not None:  # the process that this one replaces ended before its report had arrived
            return json.dumps(asdict(written))
        # the first end is that of this actor's first process, which has not counted its units
        starts: int = 0 if self._starts is None else ray.get(self._starts.begin.remote(unit.number))
        if starts >= LOST_STARTS:
            return _encoded(
                RunError(
                    f"the process of a worker ended {LOST_STARTS} times while it computed rows {unit.start:,} to "
                    f"{unit.start + unit.rows - 1:,}, by a crash of the model's code or because memory ran out; "
                    "less memory: infer.batch_size, infer.unit_rows"
                )
            )
        while self._error is None:
            try:
                report = self._worker.run(unit)
                self._lost = 0
                return json.dumps(asdict(report))
            except StateLost as error:
                reason = str(error)
            except Exception as error:
                return _encoded(_as_own(error, f"rows {unit.start} to {unit.start + unit.rows} failed"))
            self._count_lost(reason)
            self._load()
        return _encoded(self._error)


def _as_own(error: Exception, what: str) -> RaytrainError:
    if isinstance(error, RaytrainError):
        return error
    text = printable("".join(traceback.format_exception(error)).rstrip())
    return RunError(f"{what}: {type(error).__name__}: {first_line(error)}\n{text}")


def _encoded(error: RaytrainError) -> str:
    if isinstance(error, InputError):
        return json.dumps({"wrong": [error.key, error.got, error.expected, error.remedy]})
    return json.dumps({"failed": str(error)})


def run_units(
    work: Work, units: Sequence[Unit], *, workers: int, at_once: int, cpus: float, gpus: float,
    accelerator: str | None = None, told: Callable[[Callable[[], int]], None] = lambda started: None,
) -> Iterator[UnitReport]:  # fmt: skip
    """Compute units on a Ray cluster that this process is connected to; yields what is finished, in any order.

    A unit whose actor dies is computed again, up to `LOST_STARTS` times. Of `workers` actors, each with such resources,
    `at_once` must start before the first unit: 1 in a shared cluster, whose other jobs may hold it. `told` is given a
    function that returns how many have started. Raises RaytrainError: the model does not load in an actor, a unit
    cannot be computed or ends its actor each time, or the cluster has no room for all processes of a worker."""
    import ray
    from ray.data import ActorPoolStrategy
    from ray.exceptions import RayError

    required: dict[str, Any] = {} if accelerator is None else {"accelerator_type": accelerator}
    with contextlib.ExitStack() as stack:
        if work.processes_of_worker > 1:
            places = ReplicaPlaces(
                workers, work.processes_of_worker, cpus=cpus, gpus=gpus, accelerator=accelerator, at_once=at_once,
                hosts=work.hosts,
            )  # fmt: skip
            stack.callback(places.close)
            required["ray_remote_args_fn"] = places.next_first_stage
        items = [asdict(unit) for unit in units]
        rows = ray.data.from_items(items, override_num_blocks=len(items))
        # Options of this Dataset alone. Units return a few numbers each, so that nothing has to be held back for
        # memory; Ray Data would do so in its first second, in which it takes the resources of the cluster for zero, and
        # keep one of the actors busy.
        rows.context.enable_progress_bars = False
        rows.context.print_on_execution_start = False
        rows.context.max_consecutive_actor_init_deaths = LOST_STARTS
        rows.context.op_resource_reservation_enabled = False
        rows.context.downstream_capacity_backpressure_ratio = None
        starts: Any = ray.remote(UnitStarts).options(num_cpus=0, scheduling_strategy=on_this_node()).remote()
        stack.callback(ray.kill, starts)  # Ray Data may keep the arguments of a pool

        def started() -> int:
            """How many workers have started; 1 where nobody answers, since nothing is known of a wait then."""
            try:
                return ray.get(starts.workers.remote(), timeout=ANSWER_S)
            except RayError:
                return 1

        told(started)
        finished = rows.map_batches(
            UnitActor, fn_constructor_args=(work, starts, cpus, gpus, accelerator), batch_size=1, batch_format="numpy",
            num_cpus=cpus, num_gpus=gpus or None, **required,
            compute=ActorPoolStrategy(min_size=at_once, max_size=workers, max_tasks_in_flight_per_actor=2),
        )  # fmt: skip
        for row in finished.iter_rows():
            found = json.loads(row[RESULT])
            if "wrong" in found:
                key, got, expected, remedy = found["wrong"]
                raise InputError(key, got=got, expected=expected, remedy=remedy)
            if "number" not in found:
                raise RunError(found["failed"])
            yield UnitReport(**found)


def dataset_tables(dataset: Any) -> Iterator[Any]:
    """The rows of a Ray Dataset in its order, as Arrow tables."""
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield from dataset.iter_batches(batch_size=None, batch_format="pyarrow")
    finally:
        options.preserve_order = before
