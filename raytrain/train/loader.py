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

from raytrain.accelerator import on_gpu
from raytrain.data.prefetch import (
    UPLOAD_DEPTH,
    BatchRequest,
    BatchUploader,
    LoaderPool,
    PendingBatch,
    Prefetcher,
    prefetch,
)
from raytrain.data.prepare import DataPlan, InputWriteGuard, open_pool, reads_items, verify_placement
from raytrain.data.rows.batches import (
    Cursor,
    GlobalBatch,
    StepBatches,
    known_lengths,
    padding_waste,
    part_of_rank,
    rank_micro_batches,
)
from raytrain.data.rows.contract import Batch, Source, Split
from raytrain.data.rows.float64 import Float64Columns
from raytrain.data.rows.map_style import gathered
from raytrain.data.rows.residency import StreamSplit, rebuild
from raytrain.plan.batch import EVAL_MICRO_BATCHES
from raytrain.plan.choice import Resolved
from raytrain.train.job import StepSettings, TrainJob
from raytrain.train.parallel.collectives import Workers
from raytrain.trainable import MicroBatch, labels_weight, shifted_labels_weight

#: Global batches of the first epoch used to estimate the padding waste of a token budget.
WASTE_BATCHES = 50

Ready = PendingBatch[MicroBatch]


class BatchLoader:
    """Yields this worker's micro-batches of each step and of an evaluation, with their weights.

    Args:
        batches: selects the rows of each step, and this rank's share of them. Its `micro_batch` may change during a
            run, to the same value on all workers.
        weight: `Trainable.weight`; None counts the labels other than -100, or the rows where there are no labels.
        dtype: if float64, floating-point tensors of a batch are cast to it; otherwise they keep their dtype, except for
            float64 columns that float32 holds as well (`raytrain.data.rows.float64`).
        whole: batches of an evaluation are no larger than a micro-batch.
        pool: worker processes that read dataset rows (splits "train" and "eval"); None reads in this process.
        uploads: copies batches to a GPU ahead of use; None copies each batch on demand.
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
        whole: bool = False,
    ) -> None:
        self.batches = batches
        self.device = device
        self._weight = weight
        self._cast = dtype if dtype is torch.float64 else None
        self.float64 = Float64Columns(batches.split, seed=batches.seed)
        self.eval_times = 1 if whole else EVAL_MICRO_BATCHES
        self._verified = False
        self.tokens_per_row = batches.split.tokens_per_row or 0
        self.pool, self.uploads = pool, uploads
        self._ahead = Prefetcher(partial(self._prefetch, batches.split)) if pool or uploads else None
        self._at, self._following = Cursor(), Cursor()
        self._guards: dict[int, InputWriteGuard] = {}
        self._notices: list[tuple[str, dict[str, Any]]] = []

    @classmethod
    def open(
        cls, job: TrainJob, settings: StepSettings, source: Source, *, workers: Workers, device: torch.device,
        weight: Callable[[Batch], int] | None, dtype: torch.dtype, whole: bool = False,
    ) -> BatchLoader:  # fmt: skip
        """Open the loader of a plan over a prepared source (`raytrain.data.prepare`). The caller closes it. `whole`: as
        above; also where the job forbids to split global batches."""
        data = data_plan(job)
        batches = StepBatches(
            source.train,
            seed=job.seed,
            global_batch_size=int(job.planned("global_batch_size")),
            micro_batch=settings.micro_batch or job.plan.micro_batch_size.candidates[-1],  # the largest, until measured
            rank=workers.rank,
            world_size=workers.world_size,
            tokens_per_batch=settings.tokens_per_batch,
            drop_last=job.data.drop_last,
        )
        batches.shares = settings.shares
        pool = open_pool(source, data)
        if weight is shifted_labels_weight and source.first_labels_ignored:
            weight = None  # the split knows the weights without reading a batch
        # a function that weighs resident rows reads the device: in the upload's stream, that does not wait for training
        copied = data.storage in ("pinned", "partial") or (data.storage == "resident" and weight is not None)
        # a dataset read in this process shares its random generators with the model: never prefetch its rows
        ahead = on_gpu(device) and copied and (pool or not reads_items(source))
        uploads: BatchUploader[MicroBatch] | None = BatchUploader(device) if ahead else None
        whole = whole or job.loop.micro_batch_size == "whole"  # an evaluation's loss is of as many rows as in training
        loader = cls(batches, device=device, weight=weight, dtype=dtype, pool=pool, uploads=uploads, whole=whole)
        if settings.tokens_per_batch is not None:
            loader._report_waste(settings.tokens_per_batch)
        return loader

    def _report_waste(self, budget: int) -> None:
        """Report the padding waste of the first global batches, against batches of a fixed, safe size."""
        cursor, lengths, longest = Cursor(), [], 1
        while cursor.epoch == 0 and len(lengths) < WASTE_BATCHES:
            indices, cursor = self.batches.global_batch(cursor)
            found = known_lengths(self.batches.split, indices)
            lengths.append(found)
            longest = max(longest, int(found.max()))
        rows = max(1, budget // longest)
        waste = padding_waste(lengths, budget=budget, most_rows=self.batches.micro_batch, fixed_rows=rows)
        self.notice(
            "token_budget",
            **waste._asdict(),
            reason=f"{waste.budget:.1%} of what is computed is padding, in {waste.micro_batches} micro-batches; "
            f"{waste.fixed:.1%} in {waste.fixed_micro_batches} of {rows} rows each",
        )

    def global_batch(self, cursor: Cursor) -> GlobalBatch:
        batch = self.batches.global_batch(cursor)
        self._at = self.batches.begun(cursor)
        self._following = batch.next
        return batch

    def global_weight(self, indices: np.ndarray) -> int | None:
        """Total weight of a global batch if known without reading it; None if the batches' weights must be added up."""
        return None if self._weight is not None else self.batches.split.weights(indices)

    def micro_batches(self, indices: np.ndarray) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the global batch requested last, on demand."""
        split, epoch, following = self.batches.split, self._at.epoch, self._following
        own = [BatchRequest("train", epoch, rows) for rows in self.batches.rank_indices(indices)]
        guard = self._guard(split, "train")
        for number, wanted in enumerate(own):
            if self._ahead is None:
                micro = self._guarded(guard, self._gather(split, wanted))
            else:
                micro = self._ahead.take(wanted, then=lambda n=number: chain(own[n:], self._later(following)))
            yield micro if number + 1 < len(own) else replace(micro, last=True)

    def _later(self, cursor: Cursor) -> Iterator[BatchRequest]:
        """Requests for this rank's micro-batches from `cursor` on, without end."""
        while True:
            indices, following = self.batches.global_batch(cursor)
            yield from (BatchRequest("train", cursor.epoch, rows) for rows in self.batches.rank_indices(indices))
            cursor = following

    def passes(self, indices: np.ndarray) -> int:
        """Micro-batches of the busiest worker in a global batch of these rows."""
        return self._most_passes(indices, self.batches.split, times=1)

    def eval_passes(self, split: Split, *, limit: int | None) -> int:
        """Batches of the busiest worker in an evaluation."""
        return self._most_passes(self._scored(split, limit), split, times=self.eval_times)

    def eval_batches(self, split: Split, *, limit: int | None) -> Iterator[MicroBatch]:
        """Yield this rank's share of the eval split, in file order. `limit` counts global batches, so the scored rows
        depend neither on the number of workers nor on the micro-batch size."""
        guard = self._guard(split, "eval")
        wanted = [BatchRequest("eval", 0, own) for own in self._eval_indices(split, limit)]
        if self._ahead is None:
            for one in wanted:
                yield self._guarded(guard, self._gather(split, one))
            return
        ahead = Prefetcher(partial(self._prefetch, split))
        try:
            for one in wanted:
                yield ahead.take(one, then=lambda: iter(wanted))
        finally:
            ahead.stop()

    def _eval_indices(self, split: Split, limit: int | None) -> list[np.ndarray]:
        batches, rows = self.batches, self._scored(split, limit)
        place = {"rank": batches.rank, "world_size": batches.world_size}
        if batches.tokens_per_batch is not None:
            parts = batches.parts(rows, split, times=self.eval_times)
            return parts[part_of_rank(len(parts), **place)]
        micro = self.eval_times * batches.micro_batch
        return rank_micro_batches(rows, micro_batch=micro, shares=batches.shares, **place)

    def _scored(self, split: Split, limit: int | None) -> np.ndarray:
        """Rows of an evaluation. Their number differs from `len(split)`, which counts a training epoch's rows."""
        return split.eval_order()[: None if limit is None else limit * self.batches.global_batch_size]

    def _most_passes(self, rows: np.ndarray, split: Split, *, times: int) -> int:
        batches, micro_batch = self.batches, times * self.batches.micro_batch
        if batches.tokens_per_batch is not None:
            return math.ceil(len(batches.parts(rows, split, times=times)) / batches.world_size)
        if batches.shares is None:
            return math.ceil(math.ceil(len(rows) / micro_batch) / batches.world_size)
        ranks = range(batches.world_size)
        return max(len(batches.shares.passes(len(rows), rank=rank, micro_batch=micro_batch)) for rank in ranks)

    def one(self, rows: np.ndarray, *, split: Split | None = None) -> MicroBatch:
        """These rows of `split` (default: training) as one micro-batch, whichever rank owns them; for probes."""
        return self._gather(self.batches.split if split is None else split, BatchRequest("", self._at.epoch, rows))

    def first(self, rows: np.ndarray) -> MicroBatch:
        """The first of these training rows, as many as fit in one micro-batch; for probes."""
        return self.one(self.batches.fitting(rows[: self.batches.micro_batch], self.batches.split))

    def weight(self, rows: np.ndarray) -> int:
        """The weight of these training rows; reads them only if the split does not know it."""
        known = self.global_weight(rows)
        return self.one(rows).weight if known is None else known

    def notices(self) -> list[tuple[str, dict[str, Any]]]:
        notices, self._notices = self._notices, []
        return notices

    def notice(self, kind: str, **fields: Any) -> None:
        """Queue an event to be reported with the next step."""
        self._notices.append((kind, fields))

    def close(self) -> None:
        """Stop prefetching and uploading; may be called twice."""
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
        if isinstance(split, StreamSplit):  # weigh on the host before moving, to read no device value
            host = gathered(split.split, one.rows, **drawn) if read is None else read()
            weight = self._weigh(host, len(one.rows)) if known is None else known
            batch = split.moved(host)
        else:
            batch = gathered(split, one.rows, **drawn)
            weight = self._weigh(batch, len(one.rows)) if known is None else known
        if not self._verified:
            verify_placement(batch, self.device)
            self._verified = True
        batch = self.float64.narrowed(batch) if self._cast is None else cast_floating(batch, self._cast)
        return MicroBatch(batch, weight)

    def _weigh(self, batch: Batch, count: int) -> int:
        return int(self._weight(batch)) if self._weight is not None else labels_weight(batch, count)

    def _prefetch(self, split: Split, wanted: Iterator[BatchRequest]) -> Generator[tuple[BatchRequest, Ready]]:
        """Start batches ahead of use: read by the pool, copied by the uploader, or read and then copied."""
        pool, uploads = self.pool, self.uploads
        if pool is None:
            assert uploads is not None, "prefetching needs a pool or an uploader"
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

    # -- guard against writes -----------------------------------------------------------------------

    def _guard(self, split: Split, name: str) -> InputWriteGuard:
        guard = self._guards.setdefault(id(split), InputWriteGuard(split, name))
        written = guard.look()
        if written:
            why = f"the model writes into its input ({', '.join(written)}): {name} rows go to it as copies, always"
            self.notice("input_written", split=name, tensors=written, reason=why)
        return guard

    @staticmethod
    def _guarded(guard: InputWriteGuard, micro: MicroBatch) -> MicroBatch:
        guard.given(micro.batch)
        return micro


class _OnHost:
    """A batch read by a pool process, moved to the device when its result is requested."""

    def __init__(self, loading: PendingBatch[Batch], gather: Callable[..., MicroBatch]) -> None:
        self._loading, self._gather = loading, gather

    def result(self) -> MicroBatch:
        return self._gather(read=self._loading.result)

    def cancel(self) -> None:
        self._loading.cancel()


def data_plan(job: TrainJob) -> DataPlan:
    planned = {name: getattr(job.plan, name) for name in ("resident_rows", "loader_workers")}
    numbers = {name: int(choice.value) for name, choice in planned.items() if isinstance(choice, Resolved)}
    return DataPlan(job.planned("storage"), prefetch=job.data.prefetch, seed=job.seed, **numbers)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors of a nested batch to `dtype` (a float64 run needs float64 inputs)."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return rebuild(value, lambda part: cast_floating(part, dtype))
