"""The evaluation pass: the whole eval split, shared by the workers, without a trace on the training state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from raytrain.train.memory.allocator import give_back_free_pages
from raytrain.train.memory.oom import Shortage, StepDropped
from raytrain.train.parallel.collectives import Workers
from raytrain.train.step import TrainingStep
from raytrain.trainable import MicroBatch, in_eval


def evaluate(
    step: TrainingStep, batches: Iterable[MicroBatch], *, workers: Workers, passes: int = 0,
    clear_every: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Mean loss and metrics over all workers' batches, each weighted by its samples or tokens.

    Dropout is off, no gradient is kept, no random number is drawn by us; counters of a router are not advanced
    (modules count in training mode only). A failing batch raises; none is skipped. `passes` as in
    `TrainingStep.backward`; after each `clear_every` batches cached memory is given back, which other processes of the
    device may need (an evaluation keeps nothing from batch to batch, with it or without).

    Raises:
        StepDropped: a worker had no memory for it.

    Returns:
        {"loss": ..., "accuracy": ... where the model reports one, ...} as host floats; one device read.
    """
    came = step.reduction.run_or_shortage(lambda: _scored(step, batches, passes=passes, clear_every=clear_every))
    names = _agreed_names(step, came, workers)
    assert not isinstance(came, Shortage)
    remote = step.trainable.remote
    shortages = [] if remote is None else remote.shortages()
    if remote is not None and shortages:
        remote.discard()
        raise StepDropped(shortages)
    total, weight = came
    zero = torch.zeros((), dtype=torch.float64, device=step.device)
    sums = torch.stack([*(total.get(name, zero) for name in names), zero + weight])
    workers.all_reduce([sums])
    *values, count = sums.tolist()
    return {name: value / count for name, value in zip(names, values, strict=True)} if count else {"loss": float("nan")}


def _scored(
    step: TrainingStep, batches: Iterable[MicroBatch], *, passes: int, clear_every: int | None
) -> tuple[dict[str, Tensor], int]:
    """This worker's sums of loss and metrics, on the device, and their weight."""
    module = step.trainable.module
    total: dict[str, Tensor] = {}
    weight = 0
    with in_eval(module), torch.no_grad():
        for number, micro in enumerate(batches, 1):
            if clear_every and number % clear_every == 0:
                give_back_cached(step.device)
            if micro.weight == 0:
                continue
            passes -= 1
            output = step.forward(micro.batch, global_weight=micro.weight)
            share = float(micro.weight)
            for name, value in {"loss": output.loss, **output.metrics}.items():
                total[name] = total.get(name, torch.zeros((), dtype=torch.float64, device=step.device)) + (
                    value.detach().double() * share
                )
            weight += micro.weight
        for _ in range(passes if step.meets else 0):
            step.idle()
    return total, weight


def give_back_cached(device: torch.device) -> None:
    """What the allocator of a device, or on a CPU the C library, keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        give_back_free_pages()


def _agreed_names(step: TrainingStep, came: tuple[dict[str, Tensor], int] | Shortage, workers: Workers) -> list[str]:
    """A worker without eval rows still takes part in the sum: names come from whoever has them. Where somebody had a
    shortage, everybody hears of it here."""
    rows = workers.all_gather_object(None if isinstance(came, Shortage) else list(came[0]))
    if None in rows:
        raise step.reduction.dropped(came)
    return next(filter(None, rows), ["loss"])
