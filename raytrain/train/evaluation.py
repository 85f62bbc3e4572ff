"""Evaluates the eval split on all workers; the training state stays as it was."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from cluster.telemetry.work import WORK
from raytrain.train.mean_weight import CountedLabels, graph_alone
from raytrain.train.memory.allocator import release_cached
from raytrain.train.memory.oom import Shortage, StepDropped
from raytrain.train.parallel.collectives import Workers
from raytrain.train.step import MetricSums, TrainingStep, add_metrics
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
    zero = torch.zeros((), dtype=torch.float64, device=step.device)
    pairs = [result.get(name, (zero, 0.0)) for name in names]
    weights = torch.tensor([of for _, of in pairs], dtype=torch.float64, device=step.device)
    sums = torch.cat([torch.stack([total.to(zero) for total, _ in pairs]), weights])
    workers.all_reduce([sums])
    values = iter(sums.tolist())
    totals = dict(zip(names, values, strict=False))
    return {name: total / of if of else math.nan for (name, total), of in zip(totals.items(), values, strict=True)}


def _scored(step: TrainingStep, batches: Iterable[MicroBatch], *, passes: int, clear_every: int | None) -> MetricSums:
    """This worker's sums of loss and metrics, on the device, and their weights."""
    module = step.trainable.module
    total = MetricSums()
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
            add_metrics(total, replace(output, metrics={**output.metrics, "loss": output.loss}), share)
            WORK.add()
        for _ in range(passes if step.collective_passes else 0):
            step.idle()
    return total


def _agreed_names(step: TrainingStep, result: MetricSums | Shortage, workers: Workers) -> list[str]:
    """Names of the values that any worker has: one without eval rows still takes part in the sum.
    Where one had a shortage (None), all raise here."""
    rows = workers.all_gather_object(None if isinstance(result, Shortage) else list(result))
    if None in rows:
        raise step.reduction.dropped(result)
    return list(dict.fromkeys(name for row in rows for name in row)) or ["loss"]
