"""The one preparation pass before the first step: rows read, converted and put where they stay; its time is its own.

It happens once in an attempt, whatever is measured or rolled back afterwards: a source that was prepared stays as it
is. The copy on the host is given up as soon as the rows are on a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from raytrain.data.loading.processes import LoaderPool
from raytrain.data.rows.collate import tensor_split
from raytrain.data.rows.contract import RowSplit, Source, Split
from raytrain.data.rows.map_style import DatasetSplit, ItemSplit, PartialDataset, generators_kept, seed_item
from raytrain.data.rows.residency import Storage, StreamSplit, place_split
from raytrain.data.transfer import TRANSFERS

ReportEvent = Callable[..., None]
"""(kind, **fields): events of a run."""

#: While a dataset is read whole, so many times something is said.
SAID_TIMES = 10
MB = 1e6


@dataclass(frozen=True)
class DataPlan:
    """What a plan says of the way to the device.

    Attributes:
        storage, resident_rows: where rows are kept (`raytrain.data.rows.residency.place_split`).
        loader_workers, prefetch: processes that read a dataset, and batches ahead for each.
        seed: of what a dataset draws.
    """

    storage: Storage
    resident_rows: int = 0
    loader_workers: int = 0
    prefetch: int = 2
    seed: int = 0


def prepare_source(
    source: Source, plan: DataPlan, *, device: torch.device, device_name: str = "", report: ReportEvent
) -> Source:
    """The source with both splits where training reads them; told as events `preparation` (start, progress, finished).
    One that was prepared before comes back as it is.

    Args:
        report: takes the events; seconds and bytes stand in the last one.
    """
    if source.placed:
        return source
    splits = {"train": source.train, **({} if source.eval is None else {"eval": source.eval})}
    rows = {name: len(split) for name, split in splits.items()}
    where = {"storage": plan.storage, "device": device_name or device.type}
    told = " and ".join(f"{count:,} rows ({name})" for name, count in rows.items())
    report("preparation", phase="start", rows=rows, reason=f"preparing {told}: {plan.storage}", **where)
    begin, copied = time.perf_counter(), replace(TRANSFERS)
    placed: dict[str, Split] = {}
    for name, split in splits.items():
        kept = plan.storage if name == "train" or plan.storage != "partial" else "stream"
        placed[name] = _placed(split, kept, plan, device=device, report=lambda done, of, name=name: report(
            "preparation", phase="progress", split=name, done=done, of=of, reason=f"{name}: {done:,}/{of:,} rows"
        ))  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # once: what follows finds every row in its place
    seconds, megabytes = time.perf_counter() - begin, _kept_bytes(placed, plan) / MB
    report(
        "preparation",
        phase="finished",
        rows=rows,
        megabytes=megabytes,
        copies=TRANSFERS.since(copied).copied,
        seconds=seconds,
        reason=f"{told} prepared in {seconds:.2f} s; {megabytes:,.1f} MB stay on {where['device']}",
        **where,
    )
    return replace(source, train=placed["train"], eval=placed.get("eval"), placed=True)


def _placed(
    split: Split, storage: Storage, plan: DataPlan, *, device: torch.device, report: Callable[[int, int], None]
) -> Split:
    if storage == "resident" and type(split) is DatasetSplit:
        return read_dataset(split, seed=plan.seed, report=report).to(device)
    if storage == "partial" and type(split) is DatasetSplit:
        with generators_kept():
            seeds = partial(seed_item, plan.seed, 0)
            placed = PartialDataset(split, device=device, rows=plan.resident_rows, before=seeds)
    else:
        placed = place_split(split, storage, device, resident_rows=plan.resident_rows)
    report(len(split), len(split))
    return placed


def _kept_bytes(placed: dict[str, Split], plan: DataPlan) -> float:
    """Bytes that stay on the device."""
    if plan.storage == "resident":
        return sum(split.nbytes for split in placed.values())
    if plan.storage == "partial":
        train = placed["train"]
        return train.nbytes * min(1.0, plan.resident_rows / len(train))
    return 0.0


def read_dataset(split: DatasetSplit, *, seed: int, report: Callable[[int, int], None]) -> RowSplit:
    """Every item asked for and converted once: a table of tensors where their shapes allow it.

    What an item draws at random is drawn once and for all, from (seed, row); the generators of this process are put
    back.
    """
    count = len(split)
    rows: list[dict[str, Any]] = []
    with generators_kept():
        for part in np.array_split(np.arange(count), min(SAID_TIMES, count)):
            for index in part:  # one by one: what an item draws does not depend on its neighbours
                rows += split.read(index.reshape(1), before=partial(seed_item, seed, 0))
            report(len(rows), count)
    return tensor_split(rows, key=split.key) or ItemSplit(rows, key=split.key)


def open_pool(source: Source, plan: DataPlan) -> LoaderPool | None:
    """The processes that read what is streamed of a map-style dataset; None where rows are in memory, or none is asked
    for."""
    named = {"train": source.train, "eval": source.eval}
    hosts = {name: split.split for name, split in named.items() if isinstance(split, StreamSplit)}
    read = {name: split for name, split in hosts.items() if type(split) is DatasetSplit}
    if not plan.loader_workers or not read or len(read) < len([split for split in named.values() if split is not None]):
        return None
    return LoaderPool(read, workers=plan.loader_workers, prefetch=plan.prefetch, seed=plan.seed)


def reads_items(source: Source) -> bool:
    """Whether rows are asked of a user's dataset as they are needed, whose draws then must come in order."""
    splits = (source.train, source.eval)
    return any(isinstance(getattr(split, "split", split), DatasetSplit) for split in splits)
