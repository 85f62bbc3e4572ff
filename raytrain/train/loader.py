"""What the loop eats: the rows of a window as this worker's micro-batches, each with its weight, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from raytrain.data.loading.guard import Guard
from raytrain.data.loading.misplaced import verify_placement
from raytrain.data.loading.pinned_upload import AHEAD, Uploads
from raytrain.data.loading.prefetch import Ahead, BatchRequest, PendingBatch, begun_ahead, results
from raytrain.data.loading.processes import LoaderPool
from raytrain.data.loading.resident import StreamSplit
from raytrain.data.loading.transfer import rebuild
from raytrain.data.rows.batches import Cursor, GlobalBatch, StepBatches, part_of_rank, rank_micro_batches
from raytrain.data.rows.contract import Batch, Split
from raytrain.data.rows.draws import gathered
from raytrain.train.step import MicroBatch
from raytrain.trainable import labels_weight

#: A forward pass without gradients keeps no activations: an eval batch of this many micro-batches fits beside it.
EVAL_MICRO_BATCHES = 4

Ready = PendingBatch[MicroBatch]


class BatchLoader:
    """Micro-batches with weights.

    Args:
        batches: which rows make up a step, and which are this rank's.
        device: where batches must be.
        weight: `Trainable.weight`, or None to count labels (other than -100), else rows.
        dtype: float tensors of a batch are cast to it where it is float64; others keep their own.
        pool: processes that read rows of a dataset ("train" and "eval" by name); None reads them here.
        uploads: what copies ahead to a GPU; None copies each batch as it is asked for.
    """

    def __init__(
        self,
        batches: StepBatches,
        *,
        device: torch.device,
        weight: Callable[[Batch], int] | None,
        dtype: torch.dtype,
        pool: LoaderPool | None = None,
        uploads: Uploads[MicroBatch] | None = None,
    ) -> None:
        self.batches = batches
        self.device = device
        self._weight = weight
        self._cast = dtype if dtype is torch.float64 else None
        self._verified = False
        self.tokens_per_row = batches.split.tokens_per_row or 0
        self.pool, self.uploads = pool, uploads
        self._ahead = Ahead(partial(self._begun, batches.split)) if pool or uploads else None
        self._at, self._following = Cursor(), Cursor()
        self._guards: dict[int, Guard] = {}
        self._notices: list[tuple[str, dict[str, Any]]] = []

    @property
    def micro_batch(self) -> int:
        """Rows of one forward pass, at most; changed while a run goes on, by all workers alike. The rows of a window
        and of an evaluation stay the same."""
        return self.batches.micro_batch

    @micro_batch.setter
    def micro_batch(self, rows: int) -> None:
        self.batches.micro_batch = rows

    def window(self, cursor: Cursor) -> GlobalBatch:
        """The rows of the step at `cursor`."""
        window = self.batches.window(cursor)
        self._at = cursor if cursor.position < len(self.batches.split) else Cursor(cursor.epoch + 1)
        self._following = window.next
        return window

    def global_weight(self, indices: np.ndarray) -> int | None:
        """The weight of a whole window where it is known without its batches; None where they must be added up."""
        return None if self._weight is not None else self.batches.split.weights(indices)

    def micro_batches(self, indices: np.ndarray) -> Iterator[MicroBatch]:
        """This rank's micro-batches of a window (the one asked for last), one by one as they are asked for."""
        split, epoch, following = self.batches.split, self._at.epoch, self._following
        own = [BatchRequest("train", epoch, rows) for rows in self.batches.rank_indices(indices)]
        guard = self._guard(split, "train")
        for number, wanted in enumerate(own):
            if self._ahead is None:
                micro = self._given(guard, self._gather(split, wanted))
            else:
                micro = self._ahead.take(wanted, then=lambda n=number: chain(own[n:], self._later(following)))
            yield micro if number + 1 < len(own) else replace(micro, last=True)

    def _later(self, cursor: Cursor) -> Iterator[BatchRequest]:
        """This rank's micro-batches from `cursor` on, without end."""
        while True:
            indices, following = self.batches.window(cursor)
            yield from (BatchRequest("train", cursor.epoch, rows) for rows in self.batches.rank_indices(indices))
            cursor = following

    def passes(self, indices: np.ndarray) -> int:
        """Micro-batches of the busiest worker in a window of these rows."""
        if self.batches.tokens_per_batch is not None:
            return math.ceil(len(self.batches.parts(indices, self.batches.split)) / self.batches.world_size)
        return self._most_passes(len(indices), micro_batch=self.batches.micro_batch)

    def eval_passes(self, split: Split, *, limit: int | None) -> int:
        """Batches of the busiest worker in an evaluation."""
        rows = self._scored(split, limit)
        if self.batches.tokens_per_batch is not None:
            return math.ceil(len(self.batches.parts(rows, split, times=EVAL_MICRO_BATCHES)) / self.batches.world_size)
        return self._most_passes(len(rows), micro_batch=EVAL_MICRO_BATCHES * self.micro_batch)

    def eval_batches(self, split: Split, *, limit: int | None) -> Iterator[MicroBatch]:
        """This rank's share of the eval split, in file order. `limit` counts global batches, so that the same rows are
        scored by any number of workers in micro-batches of any size."""
        guard = self._guard(split, "eval")
        wanted = (BatchRequest("eval", 0, own) for own in self._eval_indices(split, limit))
        if self._ahead is None:
            for one in wanted:
                yield self._given(guard, self._gather(split, one))
            return
        yield from results(self._begun(split, wanted))

    def _eval_indices(self, split: Split, limit: int | None) -> list[np.ndarray]:
        batches, rows = self.batches, self._scored(split, limit)
        place = {"rank": batches.rank, "world_size": batches.world_size}
        if batches.tokens_per_batch is not None:
            parts = batches.parts(rows, split, times=EVAL_MICRO_BATCHES)
            return parts[part_of_rank(len(parts), **place)]
        micro = EVAL_MICRO_BATCHES * self.micro_batch
        return rank_micro_batches(rows, micro_batch=micro, shares=batches.shares, **place)

    def _scored(self, split: Split, limit: int | None) -> np.ndarray:
        """Rows of an evaluation: not as many as `len`, which is a training epoch's."""
        return split.eval_order()[: None if limit is None else limit * self.batches.global_batch]

    def _most_passes(self, rows: int, *, micro_batch: int) -> int:
        shares = self.batches.shares
        if shares is None:
            return most_passes(rows, micro_batch=micro_batch, world_size=self.batches.world_size)
        every = (shares.passes(rows, rank=rank, micro_batch=micro_batch) for rank in range(self.batches.world_size))
        return max(map(len, every))

    def one(self, rows: np.ndarray, *, split: Split | None = None) -> MicroBatch:
        """These rows as one micro-batch, whoever's they are (the probe); of the training split unless said."""
        return self._gather(self.batches.split if split is None else split, BatchRequest("", self._at.epoch, rows))

    def first(self, rows: np.ndarray) -> MicroBatch:
        """As many of these training rows, from the first on, as one micro-batch may have (the probe)."""
        return self.one(self.batches.fitting(rows[: self.micro_batch], self.batches.split))

    def weight(self, rows: np.ndarray) -> int:
        """The weight of these training rows, gathered only where nothing else tells."""
        known = self.global_weight(rows)
        return self.one(rows).weight if known is None else known

    def notices(self) -> list[tuple[str, dict[str, Any]]]:
        """Events (kind, fields) since the last call."""
        told, self._notices = self._notices, []
        return told

    def notice(self, kind: str, **fields: Any) -> None:
        """An event to be told with the next step."""
        self._notices.append((kind, fields))

    def close(self) -> None:
        """End what reads and copies ahead; may be called twice."""
        if self._ahead is not None:
            self._ahead.stop()
        if self.uploads is not None:
            self.uploads.close()
        if self.pool is not None:
            self.pool.close()

    # -- one batch --------------------------------------------------------------------------------

    def _gather(self, split: Split, one: BatchRequest, *, read: Callable[[], Batch] | None = None) -> MicroBatch:
        known = None if self._weight is not None else split.weights(one.rows)
        drawn = {"seed": self.batches.seed, "epoch": one.epoch}
        if isinstance(split, StreamSplit):  # weigh on the host, then move: no device value is read
            host = gathered(split.split, one.rows, **drawn) if read is None else read()
            weight = self._weigh(host) if known is None else known
            batch = split.moved(host)
        else:
            batch = gathered(split, one.rows, **drawn)
            weight = self._weigh(batch) if known is None else known
        if not self._verified:
            verify_placement(batch, self.device)
            self._verified = True
        return MicroBatch(batch if self._cast is None else cast_floating(batch, self._cast), weight)

    def _weigh(self, batch: Batch) -> int:
        return int(self._weight(batch)) if self._weight is not None else labels_weight(batch)

    def _begun(self, split: Split, wanted: Iterator[BatchRequest]) -> Generator[tuple[BatchRequest, Ready]]:
        """Batches begun ahead: read by processes, copied by the uploads, or both one after the other."""
        pool, uploads = self.pool, self.uploads
        if pool is None:
            assert uploads is not None, "nothing is begun ahead without the one or the other"
            make = self._gather
            yield from begun_ahead(wanted, lambda one: uploads.begin(partial(make, split, one)), depth=AHEAD)
            return
        read = begun_ahead(wanted, pool.begin, depth=pool.depth)
        if uploads is None:
            for one, loading in read:
                yield one, _OnHost(loading, partial(self._gather, split, one))
            return
        copied = begun_ahead(
            read,
            lambda pair: uploads.begin(partial(self._gather, split, pair[0], read=pair[1].result), pair[1].cancel),
            depth=AHEAD,
        )
        for (one, _), uploading in copied:
            yield one, uploading

    # -- rows that are lent -----------------------------------------------------------------------

    def _guard(self, split: Split, name: str) -> Guard:
        guard = self._guards.setdefault(id(split), Guard(split, name))
        written = guard.look()
        if written:
            why = f"the model writes into its input ({', '.join(written)}): {name} rows go to it as copies, always"
            self.notice("input_written", split=name, tensors=written, reason=why)
        return guard

    @staticmethod
    def _given(guard: Guard, micro: MicroBatch) -> MicroBatch:
        guard.given(micro.batch)
        return micro


class _OnHost:
    """A batch that a process reads, put where it is wanted when it is asked for."""

    def __init__(self, loading: PendingBatch[Batch], gather: Callable[..., MicroBatch]) -> None:
        self._loading, self._gather = loading, gather

    def result(self) -> MicroBatch:
        return self._gather(read=self._loading.result)

    def cancel(self) -> None:
        self._loading.cancel()


def most_passes(rows: int, *, micro_batch: int, world_size: int) -> int:
    """How many micro-batches the busiest of `world_size` workers has, of so many rows."""
    return math.ceil(math.ceil(rows / micro_batch) / world_size)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a nested batch in `dtype`, the rest as it is (a float64 run needs float64 inputs)."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return rebuild(value, lambda part: cast_floating(part, dtype))
