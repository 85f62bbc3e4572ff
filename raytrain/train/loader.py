"""Loads the rows of each step as this worker's micro-batches, each with its weight, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from raytrain.data.loading.checks import InputWriteGuard, verify_placement
from raytrain.data.loading.pinned_upload import UPLOAD_DEPTH, BatchUploader
from raytrain.data.loading.prefetch import BatchRequest, PendingBatch, Prefetcher, prefetch, prefetched_results
from raytrain.data.loading.prepare import DataPlan, open_pool, reads_items
from raytrain.data.loading.processes import LoaderPool
from raytrain.data.rows.batches import Cursor, GlobalBatch, StepBatches, part_of_rank, rank_micro_batches
from raytrain.data.rows.contract import Batch, Source, Split
from raytrain.data.rows.map_style import gathered
from raytrain.data.rows.residency import StreamSplit
from raytrain.data.rows.token_budget import padding_waste
from raytrain.data.transfer import rebuild
from raytrain.plan.choice import Resolved
from raytrain.plan.shares import shares_in_force
from raytrain.train.job import TrainJob
from raytrain.train.parallel.collectives import Workers
from raytrain.trainable import MicroBatch, labels_weight, shifted_labels_weight

#: A forward pass without gradients keeps no activations: an eval batch of this many micro-batches fits beside it.
EVAL_MICRO_BATCHES = 4
#: Global batches of the first epoch from which the waste of a token budget is estimated.
WASTE_BATCHES = 50

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
        uploads: BatchUploader[MicroBatch] | None = None,
    ) -> None:
        self.batches = batches
        self.device = device
        self._weight = weight
        self._cast = dtype if dtype is torch.float64 else None
        self._verified = False
        self.tokens_per_row = batches.split.tokens_per_row or 0
        self.pool, self.uploads = pool, uploads
        self._ahead = Prefetcher(partial(self._begun, batches.split)) if pool or uploads else None
        self._at, self._following = Cursor(), Cursor()
        self._guards: dict[int, InputWriteGuard] = {}
        self._notices: list[tuple[str, dict[str, Any]]] = []

    @classmethod
    def open(
        cls, job: TrainJob, source: Source, *, workers: Workers, device: torch.device,
        weight: Callable[[Batch], int] | None, dtype: torch.dtype,
    ) -> BatchLoader:  # fmt: skip
        """The loader that the plan asks for, over a prepared source (`raytrain.data.loading.prepare`); the caller
        closes it."""
        micro, data = job.plan.micro_batch_size, data_plan(job)
        batches = StepBatches(
            source.train,
            seed=job.seed,
            global_batch_size=int(job.planned("global_batch_size")),
            micro_batch=int(micro.candidates[-1]),  # until it is measured
            rank=workers.rank,
            world_size=workers.world_size,
            storage=None,
            tokens_per_batch=job.data.tokens_per_batch,
        )
        batches.shares = shares_in_force(job.plan.shares)
        pool = open_pool(source, data)
        # rows that a dataset reads here draw from the generators that the model draws from too: never prefetched
        ahead = device.type == "cuda" and data.storage in ("pinned", "partial") and (pool or not reads_items(source))
        uploads: BatchUploader[MicroBatch] | None = (
            BatchUploader(device, parts=lambda micro: micro.batch) if ahead else None
        )
        if weight is shifted_labels_weight and source.first_labels_ignored:
            weight = None  # the split knows it, and no batch has to be read for it
        loader = cls(batches, device=device, weight=weight, dtype=dtype, pool=pool, uploads=uploads)
        if job.data.tokens_per_batch is not None:
            loader._report_waste(job.data.tokens_per_batch)
        return loader

    def _report_waste(self, budget: int) -> None:
        """Report what padding costs in the first global batches, against batches of as many rows as always fit."""
        cursor, lengths, longest = Cursor(), [], 1
        while cursor.epoch == 0 and len(lengths) < WASTE_BATCHES:
            indices, cursor = self.batches.global_batch(cursor)
            found = self.batches.split.lengths(indices)
            assert found is not None, "checked before the start (check_budget)"
            lengths.append(found)
            longest = max(longest, int(found.max()))
        rows = max(1, budget // longest)
        waste = padding_waste(lengths, budget=budget, most_rows=self.micro_batch, fixed_rows=rows)
        self.notice(
            "token_budget",
            **waste._asdict(),
            reason=f"{waste.budget:.1%} of what is computed is padding, in {waste.micro_batches} micro-batches; "
            f"{waste.fixed:.1%} in {waste.fixed_micro_batches} of {rows} rows each",
        )

    @property
    def micro_batch(self) -> int:
        """Rows of one forward pass, at most; changed while a run goes on, by all workers alike. The rows of a window
        and of an evaluation stay the same."""
        return self.batches.micro_batch

    @micro_batch.setter
    def micro_batch(self, rows: int) -> None:
        self.batches.micro_batch = rows

    def global_batch(self, cursor: Cursor) -> GlobalBatch:
        """The rows of the step at `cursor`."""
        window = self.batches.global_batch(cursor)
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
            indices, following = self.batches.global_batch(cursor)
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
        yield from prefetched_results(self._begun(split, wanted))

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
        return split.eval_order()[: None if limit is None else limit * self.batches.global_batch_size]

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
            yield from prefetch(wanted, lambda one: uploads.begin(partial(make, split, one)), depth=UPLOAD_DEPTH)
            return
        read = prefetch(wanted, pool.begin, depth=pool.depth)
        if uploads is None:
            for one, loading in read:
                yield one, _OnHost(loading, partial(self._gather, split, one))
            return
        copied = prefetch(
            read,
            lambda pair: uploads.begin(partial(self._gather, split, pair[0], read=pair[1].result), pair[1].cancel),
            depth=UPLOAD_DEPTH,
        )
        for (one, _), uploading in copied:
            yield one, uploading

    # -- rows that are lent -----------------------------------------------------------------------

    def _guard(self, split: Split, name: str) -> InputWriteGuard:
        guard = self._guards.setdefault(id(split), InputWriteGuard(split, name))
        written = guard.look()
        if written:
            why = f"the model writes into its input ({', '.join(written)}): {name} rows go to it as copies, always"
            self.notice("input_written", split=name, tensors=written, reason=why)
        return guard

    @staticmethod
    def _given(guard: InputWriteGuard, micro: MicroBatch) -> MicroBatch:
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


def data_plan(job: TrainJob) -> DataPlan:
    """How the plan has rows stored and moved to the device."""
    planned = {name: getattr(job.plan, name) for name in ("resident_rows", "loader_workers")}
    numbers = {name: int(choice.value) for name, choice in planned.items() if isinstance(choice, Resolved)}
    return DataPlan(job.planned("storage"), prefetch=job.data.prefetch, seed=job.seed, **numbers)


def most_passes(rows: int, *, micro_batch: int, world_size: int) -> int:
    """How many micro-batches the busiest of `world_size` workers has, of so many rows."""
    return math.ceil(math.ceil(rows / micro_batch) / world_size)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a nested batch in `dtype`, the rest as it is (a float64 run needs float64 inputs)."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return rebuild(value, lambda part: cast_floating(part, dtype))
