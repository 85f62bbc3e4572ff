"""Batch inference with Ray Data: units go through a pool of actors, each of which loads the model once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from raytrain.errors import RaytrainError
from raytrain.infer.units import Unit
from raytrain.infer.worker import InferenceWorker, UnitReport, Work


class UnitActor:
    """An actor of the pool."""

    def __init__(self, work: Work) -> None:
        import ray

        context = ray.get_runtime_context()
        if work.model.device.startswith("cuda"):
            import torch

            torch.cuda.set_device(0)  # Ray shows each actor its own GPUs
        name = f"{context.get_node_id()[:8]}-{os.getpid()}"
        self._worker = InferenceWorker(work, name)
        self._worker.load()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        numbers, starts, rows = (batch[name].tolist() for name in ("number", "start", "rows"))
        reports = [self._worker.run(Unit(*one)) for one in zip(numbers, starts, rows, strict=True)]
        columns = asdict(reports[0]).keys()
        return {name: [getattr(report, name) for report in reports] for name in columns}


def run_units(
    work: Work, units: Sequence[Unit], *, workers: int, at_once: int, cpus: float, gpus: float
) -> Iterator[UnitReport]:
    """Compute units on a Ray cluster that this process is connected to; yields what is finished, in any order.

    A unit whose actor dies is computed again by another.

    Args:
        workers: actors of the pool at most.
        at_once: actors that must start before the first unit; 1 in a shared cluster, whose other jobs may hold it.
        cpus, gpus: Ray resources of each actor.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext
    from ray.exceptions import RayError

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    items = [asdict(unit) for unit in units]
    rows = ray.data.from_items(items, override_num_blocks=len(items))
    finished = rows.map_batches(
        UnitActor, fn_constructor_args=(work,), batch_size=1, batch_format="numpy", num_cpus=cpus,
        num_gpus=gpus or None,
        compute=ActorPoolStrategy(min_size=at_once, max_size=workers, max_tasks_in_flight_per_actor=2),
    )  # fmt: skip
    try:
        for row in finished.iter_rows():
            yield UnitReport(**row)
    except RayError as error:
        own = _own_error(error)
        if own is None:
            raise
        raise own from error


def _own_error(error: BaseException | None) -> RaytrainError | None:
    """The error of ours that an actor raised, inside those that Ray puts around it."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        if isinstance(error, RaytrainError):
            return error
        seen.add(id(error))
        error = getattr(error, "cause", None) or error.__cause__
    return None
