"""Evaluates the eval split on all workers; the training state stays as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cluster.telemetry.work import WORK
from raytrain.train.mean_weight import CountedLabels, graph_alone
from raytrain.train.memory.allocator import release_cached
from raytrain.train.memory.oom import Shortage, StepDropped
from raytrain.train.parallel.collectives import Workers
from raytrain.train.step import TrainingStep
from raytrain.trainable import MicroBatch, in_eval


def evaluate(
    step: TrainingStep, batches: Iterable[MicroBatch], *, workers: Workers, passes: int = 0,
    clear_every: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Mean loss and metrics over all workers' batches, each weighted by its samples or tokens.

    Dropout is off, no gradient is kept, and no random number is drawn by the loop; a router's counters do not advance
    (modules count in training mode only). A failing batch raises; none is skipped.

    Args:
        passes: as in `TrainingStep.backward`.
        clear_every: after this many batches cached memory is released, which other processes on the device may need.

    Raises:
        StepDropped: a worker ran out of memory.

    Returns:
        {"loss": ..., "accuracy": ... where the model reports one, ...} as host floats; one device read.
    """
    result = step.reduction.run_or_shortage(lambda: _scored(step, batches, passes=passes, clear_every=clear_every))
    names = _agreed_names(step, result, workers)
    assert not isinstance(result, Shortage)
    shortages = step.trainable.remote.shortages()
    if shortages:
        step.trainable.remote.discard()
        raise StepDropped(shortages)
    total, weight = result
    zero = torch.zeros((), dtype=torch.float64, device=step.device)
    sums = torch.stack([*(total.get(name, zero) for name in names), zero + weight])
    workers.all_reduce([sums])
    *values, count = sums.tolist()
    return {name: value / count for name, value in zip(names, values, strict=True)} if count else {"loss": float("nan")}


def _scored(
    step: TrainingStep, batches: Iterable[MicroBatch], *, passes: int, clear_every: int | None
) -> tuple[dict[str, Tensor], float]:
    """This worker's sums of loss and metrics, on the device, and their weight."""
    module = step.trainable.module
    total: dict[str, Tensor] = {}
    weight = 0.0
    with in_eval(module), torch.no_grad():
        for number, micro in enumerate(batches, 1):
            if clear_every and number % clear_every == 0:
                release_cached(step.device)
            if micro.weight == 0:
                continue
            passes -= 1
            labels = CountedLabels.of(micro.batch)
            graph = step.tells_weight and not step.collective_passes
            with graph_alone() if graph else contextlib.nullcontext():
                output = step.forward(micro.batch, global_weight=micro.weight)
            share = step.weigh(output, micro.weight, labels)
            for name, value in {"loss": output.loss, **output.metrics}.items() if share else ():
                total[name] = total.get(name, torch.zeros((), dtype=torch.float64, device=step.device)) + (
                    value.detach().double() * share
                )
            weight += share
            WORK.add()
        for _ in range(passes if step.collective_passes else 0):
            step.idle()
    return total, weight


def _agreed_names(
    step: TrainingStep, result: tuple[dict[str, Tensor], float] | Shortage, workers: Workers
) -> list[str]:
    """Names of the values, from the first worker that has any: one without eval rows still takes part in the sum.
    Where one had a shortage (None), all raise here."""
    rows = workers.all_gather_object(None if isinstance(result, Shortage) else list(result[0]))
    if None in rows:
        raise step.reduction.dropped(result)
    return next(filter(None, rows), ["loss"])
