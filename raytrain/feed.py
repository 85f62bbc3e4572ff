"""What the loop eats: the rows of a window as this worker's micro-batches, each with its weight, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from raytrain.data.batches import StepBatches, Window, eval_batches
from raytrain.data.contract import Batch, Split
from raytrain.data.resident import StreamSplit, move, rebuild, verify_placement
from raytrain.step import MicroBatch
from raytrain.trainable import labels_weight

#: A forward pass without gradients keeps no activations: an eval batch of this many micro-batches fits beside it.
EVAL_MICRO_BATCHES = 4


class Feed:
    """Micro-batches with weights.

    Args:
        batches: which rows make up a step, and which are this rank's.
        device: where batches must be.
        weight: `Trainable.weight`, or None to count labels (other than -100), else rows.
        dtype: float tensors of a batch are cast to it where it is float64; others keep their own.
    """

    def __init__(
        self,
        batches: StepBatches,
        *,
        device: torch.device,
        weight: Callable[[Batch], int] | None,
        dtype: torch.dtype,
    ) -> None:
        self.batches = batches
        self.device = device
        self._weight = weight
        self._cast = dtype if dtype is torch.float64 else None
        self._verified = False
        self.tokens_per_row = batches.split.tokens_per_row or 0

    @property
    def micro_batch(self) -> int:
        """Rows of one forward pass, at most; changed while a run goes on, by all workers alike. The rows of a window
        and of an evaluation stay the same."""
        return self.batches.micro_batch

    @micro_batch.setter
    def micro_batch(self, rows: int) -> None:
        self.batches.micro_batch = rows

    def window(self, cursor: Any) -> Window:
        """The rows of the step at `cursor`."""
        return self.batches.window(cursor)

    def global_weight(self, handles: np.ndarray) -> int | None:
        """The weight of a whole window where it is known without its batches; None where they must be added up."""
        return None if self._weight is not None else self.batches.split.weights(handles)

    def micro_batches(self, handles: np.ndarray) -> Iterator[MicroBatch]:
        """This rank's micro-batches of a window, gathered one by one as they are asked for."""
        for rows in self.batches.rank_handles(handles):
            yield self._gather(self.batches.split, rows)

    def passes(self, rows: int) -> int:
        """Micro-batches of the busiest worker in a window of so many rows."""
        return self._most_passes(rows, micro_batch=self.batches.micro_batch)

    def eval_passes(self, split: Split, *, limit: int | None) -> int:
        """Batches of the busiest worker in an evaluation."""
        rows = len(split) if limit is None else min(len(split), limit * self.batches.global_batch)
        return self._most_passes(rows, micro_batch=EVAL_MICRO_BATCHES * self.micro_batch)

    def eval_batches(self, split: Split, *, limit: int | None) -> Iterator[MicroBatch]:
        """This rank's share of the eval split, in file order. `limit` counts global batches, so that the same rows are
        scored by any number of workers in micro-batches of any size."""
        batches, rows = self.batches, None if limit is None else limit * self.batches.global_batch
        place = {"rank": batches.rank, "world": batches.world, "shares": batches.shares}
        for own in eval_batches(split, micro_batch=EVAL_MICRO_BATCHES * self.micro_batch, rows=rows, **place):
            yield self._gather(split, own)

    def _most_passes(self, rows: int, *, micro_batch: int) -> int:
        shares = self.batches.shares
        if shares is None:
            return most_passes(rows, micro_batch=micro_batch, world=self.batches.world)
        every = (shares.passes(rows, rank=rank, micro_batch=micro_batch) for rank in range(self.batches.world))
        return max(map(len, every))

    def one(self, rows: np.ndarray, *, split: Split | None = None) -> MicroBatch:
        """These rows as one micro-batch, whoever's they are (the probe); of the training split unless said."""
        return self._gather(self.batches.split if split is None else split, rows)

    def weight(self, rows: np.ndarray) -> int:
        """The weight of these training rows, gathered only where nothing else tells."""
        known = self.global_weight(rows)
        return self.one(rows).weight if known is None else known

    def _gather(self, split: Split, rows: np.ndarray) -> MicroBatch:
        known = None if self._weight is not None else split.weights(rows)
        if isinstance(split, StreamSplit):  # weigh on the host, then move: no device value is read
            host = split.split.gather(rows)
            weight = self._weigh(host) if known is None else known
            batch = move(host, self.device)
        else:
            batch = split.gather(rows)
            weight = self._weigh(batch) if known is None else known
        if not self._verified:
            verify_placement(batch, self.device)
            self._verified = True
        return MicroBatch(batch if self._cast is None else cast_floating(batch, self._cast), weight)

    def _weigh(self, batch: Batch) -> int:
        return int(self._weight(batch)) if self._weight is not None else labels_weight(batch)


def most_passes(rows: int, *, micro_batch: int, world: int) -> int:
    """How many micro-batches the busiest of `world` workers has, of so many rows."""
    return math.ceil(math.ceil(rows / micro_batch) / world)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a nested batch in `dtype`, the rest as it is (a float64 run needs float64 inputs)."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return rebuild(value, lambda part: cast_floating(part, dtype))
