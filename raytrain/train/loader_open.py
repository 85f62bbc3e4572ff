"""From a plan to a feed: rows in their place, and what reads and copies them ahead."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raytrain.data.loading.pinned_upload import Uploads
from raytrain.data.loading.prepare import DataPlan, open_pool, reads_items
from raytrain.data.rows.batches import Cursor, StepBatches
from raytrain.data.rows.contract import Batch, Source
from raytrain.data.rows.token_budget import waste_of
from raytrain.plan.choice import Resolved
from raytrain.plan.shares import shares_in_force
from raytrain.train.job import TrainJob
from raytrain.train.loader import BatchLoader
from raytrain.train.parallel.collectives import Workers
from raytrain.train.step import MicroBatch
from raytrain.trainable import shifted_labels_weight

#: Windows of the first epoch by which the waste of a budget of tokens is told.
LOOKED_AT = 50


def data_plan(job: TrainJob) -> DataPlan:
    """What the plan says of the rows' way to the device."""
    planned = {name: getattr(job.plan, name) for name in ("resident_rows", "loader_workers")}
    numbers = {name: int(choice.value) for name, choice in planned.items() if isinstance(choice, Resolved)}
    return DataPlan(job.planned("storage"), prefetch=job.data.prefetch, seed=job.seed, **numbers)


def open_loader(
    job: TrainJob, source: Source, *, workers: Workers, device: torch.device, weight: Callable[[Batch], int] | None,
    dtype: torch.dtype,
) -> BatchLoader:  # fmt: skip
    """The feed over a prepared source (`raytrain.data.loading.prepare.prepare_source`); close it in the end."""
    micro, data = job.plan.micro_batch_size, data_plan(job)
    batches = StepBatches(
        source.train,
        seed=job.seed,
        global_batch=int(job.planned("global_batch_size")),
        micro_batch=int(micro.candidates[-1]),  # until it is settled
        rank=workers.rank,
        world_size=workers.world_size,
        storage=None,
        tokens_per_batch=job.data.tokens_per_batch,
    )
    batches.shares = shares_in_force(job.plan.shares)
    pool = open_pool(source, data)
    # rows that a dataset reads here draw from generators that the model draws from too: never ahead of their turn
    ahead = device.type == "cuda" and data.storage in ("pinned", "partial") and (pool or not reads_items(source))
    uploads = Uploads(device, parts=_batch_of) if ahead else None
    if weight is shifted_labels_weight and source.first_labels_ignored:
        weight = None  # the split knows it, and no batch has to be read for it
    loader = BatchLoader(batches, device=device, weight=weight, dtype=dtype, pool=pool, uploads=uploads)
    if job.data.tokens_per_batch is not None:
        _tell_waste(loader, job.data.tokens_per_batch)
    return loader


def _tell_waste(loader: BatchLoader, budget: int) -> None:
    """What padding will cost, by the first windows, against batches of as many rows as always fit the budget."""
    cursor, windows, longest = Cursor(), [], 1
    while cursor.epoch == 0 and len(windows) < LOOKED_AT:
        indices, cursor = loader.batches.window(cursor)
        lengths = loader.batches.split.lengths(indices)
        assert lengths is not None, "checked before the start (check_budget)"
        windows.append(lengths)
        longest = max(longest, int(lengths.max()))
    rows = max(1, budget // longest)
    waste = waste_of(windows, budget=budget, most_rows=loader.micro_batch, fixed_rows=rows)
    loader.notice(
        "token_budget",
        **waste._asdict(),
        reason=f"{waste.budget:.1%} of what is computed is padding, in {waste.micro_batches} micro-batches; "
        f"{waste.fixed:.1%} in {waste.fixed_micro_batches} of {rows} rows each",
    )


def _batch_of(micro: MicroBatch) -> Batch:
    return micro.batch
