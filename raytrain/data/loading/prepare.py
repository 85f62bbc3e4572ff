"""Prepare a source before the first step: read and convert its rows, and place them where training reads them.

This happens once in an attempt and is timed separately; measurements and rollbacks reuse the prepared source. The copy
on the host is freed as soon as the rows are on a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from raytrain.data.loading.processes import LoaderPool
from raytrain.data.rows.contract import Source, Split
from raytrain.data.rows.map_style import DatasetSplit, PartialDataset, generators_kept, seed_item, users_rows
from raytrain.data.rows.residency import Storage, StreamSplit, place_split
from raytrain.data.transfer import TRANSFERS
from raytrain.plan.text import size_text

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
    placed = _place_all(splits, plan, device=device, report=report)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # once, so that every row has arrived
    seconds, kept = time.perf_counter() - begin, _kept_bytes(placed, plan)
    report(
        "preparation",
        phase="finished",
        rows=rows,
        megabytes=kept / MB,
        copies=TRANSFERS.since(copied).tensors,
        seconds=seconds,
        reason=f"{described} prepared in {seconds:.2f} s; {size_text(kept)} stay on {where['device']}",
        **where,
    )
    return replace(source, train=placed["train"], eval=placed.get("eval"), placed=True)


def _place_all(
    splits: Mapping[str, Split], plan: DataPlan, *, device: torch.device, report: ReportEvent
) -> dict[str, Split]:
    placed: dict[str, Split] = {}
    read: list[tuple[str, DatasetSplit, list[Any]]] = []
    for name, split in splits.items():
        progress = partial(_report_rows, report, name)
        if plan.storage == "resident" and type(split) is DatasetSplit:
            read.append((name, split, read_dataset(split, seed=plan.seed, report=progress)))
            continue
        if type(split) is DatasetSplit and split.collate is None:
            split.masked.names  # noqa: B018  # found here, before loader processes are forked
        kept = plan.storage if name == "train" or plan.storage != "partial" else "stream"
        placed[name] = _placed(split, kept, plan, device=device, report=progress)
    for name, split, rows in read:  # once the lengths of all rows are known
        placed[name] = split.kept(rows).to(device)
    return placed


def _report_rows(report: ReportEvent, name: str, done: int, of: int) -> None:
    report("preparation", phase="progress", split=name, done=done, of=of, reason=f"{name}: {done:,}/{of:,} rows")


def _placed(
    split: Split, storage: Storage, plan: DataPlan, *, device: torch.device, report: Callable[[int, int], None]
) -> Split:
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
        return sum(split.nbytes for split in placed.values() if not isinstance(split, StreamSplit))
    if plan.storage == "partial":
        train = placed["train"]
        return train.nbytes * min(1.0, plan.resident_rows / len(train))
    return 0.0


def read_dataset(split: DatasetSplit, *, seed: int, report: Callable[[int, int], None]) -> list[Any]:
    """Read and convert every item once, and take note of their lengths (`DatasetSplit.masked`).

    The random draws of an item are made only once, from (seed, row); the generators of this process are restored.
    """
    count = len(split)
    rows: list[Any] = []
    with generators_kept():
        for part in np.array_split(np.arange(count), min(PROGRESS_EVENTS, count)):
            for index in part:  # one by one, so that the draws of an item do not depend on its neighbours
                rows += split.read(index.reshape(1), before=partial(seed_item, seed, 0))
            report(len(rows), count)
    split.masked.observe(rows)
    return rows


def open_pool(source: Source, plan: DataPlan) -> LoaderPool | None:
    """The processes that read streamed map-style datasets; None if rows are in memory or `loader_workers` is 0."""
    named = {"train": source.train, "eval": source.eval}
    hosts = {name: split.split for name, split in named.items() if isinstance(split, StreamSplit)}
    read = {name: split for name, split in hosts.items() if type(split) is DatasetSplit}
    if not plan.loader_workers or not read or len(read) < len([split for split in named.values() if split is not None]):
        return None
    return LoaderPool(read, workers=plan.loader_workers, prefetch=plan.prefetch, seed=plan.seed)


def reads_items(source: Source) -> bool:
    """Whether the user's code makes batches during training; its random draws must then keep their order."""
    splits = [split for split in (source.train, source.eval) if split is not None]
    inside = [split.split if isinstance(split, StreamSplit) else split for split in splits]
    return any(isinstance(split, DatasetSplit) or users_rows(split) is not None for split in inside)
