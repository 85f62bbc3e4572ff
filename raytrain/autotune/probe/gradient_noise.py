"""The norms that the gradient noise scale is estimated from, measured on the real model; changes nothing."""

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

#: Micro-batches of a draw, and draws: the passes of eight steps that accumulate eight times.
MICRO_BATCHES, DRAWS = 8, 8


def measure_norms(
    session: Session, *, micro_batch_size: int, micro_batches: int = MICRO_BATCHES, draws: int = DRAWS
) -> list[NormPair]:
    """Squared gradient norms of one micro-batch and of all that a step accumulates, at the weights as they are.

    The small norm is read where the accumulation has seen its first micro-batch, so that nothing is computed twice and
    no second gradient is kept. Collective over the workers, all of which get the same pairs: the small norm is the mean
    of theirs, the big one that of their sum.

    Args:
        session: prepared, in a precision without a loss scale.

    Raises:
        RunError: parts of the model live in other processes, whose gradients are not seen here.
        ValueError: fewer than two micro-batches in all.
    """
    world_size = session.workers.world_size
    if session.trainable.remote is not None:
        raise RunError("the gradient noise scale needs the whole model in the workers: experts.hosts=0")
    if micro_batches * world_size < 2:
        raise ValueError("the gradient noise scale needs at least two micro-batches")
    rows = micro_batch_size * micro_batches * world_size
    taken = session.loader.batches.rows_from(session.state.cursor, rows * draws)
    with preserve_model(session.trainable, session.device):
        found = [_squares(session, part, micro_batches) for part in np.split(taken, draws)]
    smalls = torch.stack([small for small, _ in found]).tolist()
    bigs = torch.stack([big for _, big in found]).tolist()
    means = [sum(column) / world_size for column in zip(*session.workers.all_gather_floats(smalls), strict=True)]
    return [NormPair(micro_batch_size, rows, small, big) for small, big in zip(means, bigs, strict=True)]


def _squares(session: Session, rows: np.ndarray, micro_batches: int) -> tuple[Tensor, Tensor]:
    """(of the first micro-batch's mean gradient, of the mean gradient of all rows), float64 on the device."""
    step, loader, workers = session.step, session.loader, session.workers
    total = max(1, loader.weight(rows))
    shares = [np.split(share, micro_batches) for share in np.split(rows, workers.world_size)]
    cut = [[loader.batches.cut(part) for part in parts] for parts in shares]
    small: list[Tensor] = []

    def micros() -> Iterator[MicroBatch]:
        for number, parts in enumerate(cut[workers.rank]):
            if number == 1:  # asked for once the first has been taken backward
                small.append(step.gradients.sum_of_squares())
            yield from map(loader.one, parts)

    passes = max(sum(map(len, parts)) for parts in cut)
    step.backward(micros(), global_weight=total, passes=passes)
    if not small:
        small.append(step.gradients.sum_of_squares())
    share = max(1, loader.weight(shares[workers.rank][0])) / total  # gradients are of the whole step's mean
    workers.all_reduce(step.gradients.buffers)
    unscaled = step.scale.inverse.double() ** 2
    return small[0] * unscaled / share**2, step.gradients.sum_of_squares() * unscaled
