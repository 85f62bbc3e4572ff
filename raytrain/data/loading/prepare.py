"""Prepare a source before the first step: read and convert its rows, and place them where training reads them.

This happens once in an attempt and is timed separately; measurements and rollbacks reuse the prepared source. The copy
on the host is freed as soon as the rows are on a device.
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

#: Progress events while a dataset is read completely.
PROGRESS_EVENTS = 10
MB = 1e6


@dataclass(frozen=True)
class DataPlan:
    """The plan's decisions about how rows reach the device.

    Attributes:
        storage, resident_rows: where rows are kept (`raytrain.data.rows.residency.place_split`).
        loader_workers, prefetch: processes that read a dataset, and batches that each reads ahead.
        seed: for the random draws of a dataset.
    """

    storage: Storage
    resident_rows: int = 0
    loader_workers: int = 0
    prefetch: int = 2
    seed: int = 0


def prepare_source(
    source: Source, plan: DataPlan, *, device: torch.device, device_name: str = "", report: ReportEvent
) -> Source:
    """Place both splits of a source where training reads them. A prepared source is returned unchanged.

    Args:
        device_name: for the events; the type of the device if empty.
        report: receives `preparation` events (start, progress, finished); the last one has seconds and bytes.
    """
    if source.placed:
        return source
    splits = {"train": source.train, **({} if source.eval is None else {"eval": source.eval})}
    rows = {name: len(split) for name, split in splits.items()}
    where = {"storage": plan.storage, "device": device_name or device.type}
    described = " and ".join(f"{count:,} rows ({name})" for name, count in rows.items())
    report("preparation", phase="start", rows=rows, reason=f"preparing {described}: {plan.storage}", **where)
    begin, copied = time.perf_counter(), replace(TRANSFERS)
    placed: dict[str, Split] = {}
    for name, split in splits.items():
        kept = plan.storage if name == "train" or plan.storage != "partial" else "stream"
        placed[name] = _placed(split, kept, plan, device=device, report=lambda done, of, name=name: report(
            "preparation", phase="progress", split=name, done=done, of=of, reason=f"{name}: {done:,}/{of:,} rows"
        ))  # fmt: skip
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # once, so that every row has arrived
    seconds, megabytes = time.perf_counter() - begin, _kept_bytes(placed, plan) / MB
    report(
        "preparation",
        phase="finished",
        rows=rows,
        megabytes=megabytes,
        copies=TRANSFERS.since(copied).copied,
        seconds=seconds,
        reason=f"{described} prepared in {seconds:.2f} s; {megabytes:,.1f} MB stay on {where['device']}",
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
    """Read and convert every item once: a table of tensors if their shapes allow it.

    The random draws of an item are made only once, from (seed, row); the generators of this process are restored.
    """
    count = len(split)
    rows: list[dict[str, Any]] = []
    with generators_kept():
        for part in np.array_split(np.arange(count), min(PROGRESS_EVENTS, count)):
            for index in part:  # one by one, so that the draws of an item do not depend on its neighbours
                rows += split.read(index.reshape(1), before=partial(seed_item, seed, 0))
            report(len(rows), count)
    return tensor_split(rows, key=split.key) or ItemSplit(rows, key=split.key)


def open_pool(source: Source, plan: DataPlan) -> LoaderPool | None:
    """The processes that read streamed map-style datasets; None if rows are in memory or `loader_workers` is 0."""
    named = {"train": source.train, "eval": source.eval}
    hosts = {name: split.split for name, split in named.items() if isinstance(split, StreamSplit)}
    read = {name: split for name, split in hosts.items() if type(split) is DatasetSplit}
    if not plan.loader_workers or not read or len(read) < len([split for split in named.values() if split is not None]):
        return None
    return LoaderPool(read, workers=plan.loader_workers, prefetch=plan.prefetch, seed=plan.seed)


def reads_items(source: Source) -> bool:
    """Whether a user's dataset is read during training; its random draws must then keep their order."""
    splits = (source.train, source.eval)
    return any(isinstance(getattr(split, "split", split), DatasetSplit) for split in splits)
