"""From a plan to a feed: rows in their place, and what reads and copies them ahead."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raytrain.data.batches import StepBatches
from raytrain.data.contract import Batch, Source
from raytrain.data.prepared import DataPlan, open_pool, reads_items
from raytrain.data.upload import Uploads
from raytrain.feed import Feed
from raytrain.gradients import Workers
from raytrain.plan import Resolved
from raytrain.search.shares import shares_in_force
from raytrain.step import MicroBatch
from raytrain.train_job import TrainJob


def data_plan(job: TrainJob) -> DataPlan:
    """What the plan says of the rows' way to the device."""
    planned = {name: getattr(job.plan, name) for name in ("resident_rows", "loader_workers")}
    numbers = {name: int(choice.value) for name, choice in planned.items() if isinstance(choice, Resolved)}
    return DataPlan(job.planned("storage"), prefetch=job.data.prefetch, seed=job.seed, **numbers)


def open_feed(
    job: TrainJob, source: Source, *, workers: Workers, device: torch.device, weight: Callable[[Batch], int] | None,
    dtype: torch.dtype,
) -> Feed:  # fmt: skip
    """The feed over a prepared source (`raytrain.data.prepared.prepare_source`); close it in the end."""
    micro, data = job.plan.micro_batch_size, data_plan(job)
    batches = StepBatches(
        source.train,
        seed=job.seed,
        global_batch=int(job.planned("global_batch_size")),
        micro_batch=int(micro.value if isinstance(micro, Resolved) else micro.bounds[-1]),  # until it is settled
        rank=workers.rank,
        world=workers.world,
        storage=None,
        tokens_per_batch=job.data.tokens_per_batch,
    )
    batches.shares = shares_in_force(job.plan.shares)
    pool = open_pool(source, data)
    # rows that a dataset reads here draw from generators that the model draws from too: never ahead of their turn
    ahead = device.type == "cuda" and data.storage in ("pinned", "partial") and (pool or not reads_items(source))
    uploads = Uploads(device, parts=_batch_of) if ahead else None
    return Feed(batches, device=device, weight=weight, dtype=dtype, pool=pool, uploads=uploads)


def _batch_of(micro: MicroBatch) -> Batch:
    return micro.batch
