"""Measures the gradient norms that the gradient noise scale is estimated from, on the real model; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from raytrain.autotune.probe.state_guard import preserve_model
from raytrain.autotune.search.noise_scale import NormPair
from raytrain.errors import RunError
from raytrain.train.session import Session
from raytrain.trainable import MicroBatch

#: Micro-batches of a draw, and draws: the passes of eight steps of eight accumulated micro-batches.
MICRO_BATCHES, DRAWS = 8, 8


def measure_norms(
    session: Session, *, micro_batch_size: int, micro_batches: int = MICRO_BATCHES, draws: int = DRAWS
) -> list[NormPair]:
    """Squared gradient norms of one micro-batch and of all that a step accumulates, at the current weights.

    The small norm is read after the first micro-batch has been accumulated, so that nothing is computed twice and no
    second gradient is kept. Collective; all workers get the same pairs: the small norm is the mean over the workers,
    the big one that of the summed gradient.

    Args:
        session: prepared, in a precision without a loss scale.

    Raises:
        RunError: parts of the model are in other processes, whose gradients are not available here.
        ValueError: fewer than two micro-batches in all.
    """
    world_size = session.workers.world_size
    if session.trainable.remote.distributed:
        raise RunError("the gradient noise scale needs the whole model in the workers: experts.hosts=0")
    if micro_batches * world_size < 2:
        raise ValueError("the gradient noise scale needs at least two micro-batches")
    rows = micro_batch_size * micro_batches * world_size
    drawn = session.loader.batches.rows_from(session.state.cursor, rows * draws)
    with preserve_model(session.trainable, session.device):
        squares = [_squares(session, part, micro_batches) for part in np.split(drawn, draws)]
    smalls = torch.stack([small for small, _ in squares]).tolist()
    bigs = torch.stack([big for _, big in squares]).tolist()
    means = [sum(column) / world_size for column in zip(*session.workers.all_gather_floats(smalls), strict=True)]
    return [NormPair(micro_batch_size, rows, small, big) for small, big in zip(means, bigs, strict=True)]


def _squares(session: Session, rows: np.ndarray, micro_batches: int) -> tuple[Tensor, Tensor]:
    """Squared norms of the first micro-batch's mean gradient and of the mean gradient of all rows; float64, on the
    device."""
    step, loader, workers = session.step, session.loader, session.workers
    total = max(1, loader.weight(rows))
    shares = [np.split(share, micro_batches) for share in np.split(rows, workers.world_size)]
    cut = [[loader.batches.cut(part) for part in parts] for parts in shares]
    small: list[Tensor] = []

    def micros() -> Iterator[MicroBatch]:
        for number, parts in enumerate(cut[workers.rank]):
            if number == 1:  # requested after the first one's backward
                small.append(step.gradients.sum_of_squares())
            yield from map(loader.one, parts)

    passes = max(sum(map(len, parts)) for parts in cut)
    step.backward(micros(), global_weight=total, passes=passes)
    if not small:
        small.append(step.gradients.sum_of_squares())
    share = max(1, loader.weight(shares[workers.rank][0])) / total  # gradients are of the mean over the whole step
    workers.all_reduce(step.gradients.buffers)
    unscaled = step.scale.inverse.double() ** 2
    return small[0] * unscaled / share**2, step.gradients.sum_of_squares() * unscaled
