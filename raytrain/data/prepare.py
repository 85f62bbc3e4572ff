"""Before the first step: converts a source's rows, places them where training reads them, and checks tensors.

Called by `raytrain.train.session` through the loader; the checks also run on the first batches of a run.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain.accelerator import synchronize
from raytrain.config.messages import abbreviated
from raytrain.data.prefetch import LoaderPool
from raytrain.data.rows.contract import Batch, Source, Split
from raytrain.data.rows.map_style import DatasetSplit, PartialDataset, generators_kept, seed_item, users_rows
from raytrain.data.rows.residency import TRANSFERS, Storage, StreamSplit, is_on, place_split, tensors_of
from raytrain.data.rows.splits import TensorSplit
from raytrain.errors import DevicePlacementError, RunError
from raytrain.plan.choice import size_text

# ---------------------------------------------------------------- checks
# Checks of tensors: that each is on its device, and that no model writes into rows that are lent to it as views.


NAMED_AT_MOST = 5


def find_misplaced(value: Any, device: torch.device | str, *, name: str = "batch") -> list[str]:
    """Paths of all tensors in a batch, a module or its state that are not on `device`, which is not read. They begin
    with `name`; "" for a module's own names."""
    wanted = torch.device(device)
    return [path for path, tensor in tensors_of(value, name) if not is_on(tensor, wanted)]


def verify_placement(value: Any, device: torch.device | str, *, name: str = "batch") -> None:
    """Raise DevicePlacementError naming the tensors of `value` that are on another device, and which."""
    paths = find_misplaced(value, device, name=name)
    if not paths:
        return
    where = dict(tensors_of(value, name))
    named = abbreviated([f"{path} is on {where[path].device}" for path in paths], NAMED_AT_MOST)
    owner = f"; it is of {owner_of(value, paths[0])}" if isinstance(value, nn.Module) else ""
    raise DevicePlacementError(f"{named}, expected every tensor on {torch.device(device)}{owner}")


def owner_of(module: nn.Module, name: str) -> str:
    """Whose tensor `name` of a module is: the nearest class around it that is not torch's own, and the line at which
    that class begins."""
    path = name.split(".")[:-1]
    around = [module.get_submodule(".".join(path[:length])) for length in range(len(path), -1, -1)]
    own = next((part for part in around if not type(part).__module__.startswith("torch.")), around[0])
    kind = type(own)
    try:
        line = f" ({os.path.basename(inspect.getsourcefile(kind) or '?')}:{inspect.getsourcelines(kind)[1]})"
    except (OSError, TypeError):  # made in a notebook cell that is gone, or by a program
        line = ""
    return f"{kind.__name__}{line}"


@dataclass
class InputWriteGuard:
    """Detect a model that writes into its input batches, for one split that is kept on the device.

    The first batch is a copy. If the model did not write to it, later batches of neighbouring rows are views and are
    not copied; if it did, all batches stay copies. torch counts writes to a tensor and its views in `_version`, so
    that nothing is read from the device.
    """

    split: Split
    name: str
    _first: list[tuple[str, Tensor, int]] = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)
    _checked: bool = False

    def given(self, batch: Batch) -> None:
        """Remember the first batch that goes to the model, until the next `look`."""
        if not self._checked and not self._first and isinstance(self.split, TensorSplit):
            self._first = [(path, tensor, tensor._version) for path, tensor in tensors_of(batch, "batch")]

    def look(self) -> list[str]:
        """Between two passes over the batches: the tensors of the first batch that the model wrote to, reported
        once. Raises RunError: the model has overwritten kept rows, after it had not written to its first batch."""
        split = self.split
        if not isinstance(split, TensorSplit):
            return []
        if self._first:
            written = [path for path, tensor, version in self._first if tensor._version != version]
            self._first, self._checked = [], True
            split.returns_views = not written
            self._versions = _versions(split)
            return written
        if self._checked and split.returns_views and _versions(split) != self._versions:
            raise RunError(
                f"the model wrote into its input after it had not done so at first: {self.name} rows kept on the "
                "device are damaged; data.storage: stream gives it a copy each time"
            )
        return []


def _versions(split: TensorSplit) -> list[int]:
    return [column._version for column in split.columns.values() if isinstance(column, Tensor)]


class DeviceGuard:
    """Check in every step that each parameter and buffer of a module is on its device, without reading the device.

    The module's own tables are listed once, so that a replaced tensor is checked too; a check costs a tenth of a
    microsecond for each tensor.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = torch.empty(0, device=device).device  # with its index
        self._slots = [
            (table, leaf, f"{path}.{leaf}" if path else leaf)
            for path, part in module.named_modules()
            for table in (part._parameters, part._buffers)
            for leaf, tensor in table.items()
            if tensor is not None
        ]

    def check(self) -> None:
        """Raise DevicePlacementError naming the first tensor on another device."""
        for table, leaf, name in self._slots:
            tensor = table.get(leaf)
            if tensor is not None and tensor.device != self._device:
                raise DevicePlacementError(
                    f"{name} is on {tensor.device}, expected every tensor on {self._device}; it is of "
                    f"{owner_of(self._module, name)}, and something moved it during training"
                )

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Check after the work inside; if the work fails, a misplaced tensor is the better explanation."""
        try:
            yield
        except RuntimeError as error:
            try:
                self.check()
            except DevicePlacementError as cause:
                raise cause from error
            raise
        self.check()


# ---------------------------------------------------------------- prepare
# Prepare a source before the first step: read and convert its rows, and place them where training reads them.


ReportEvent = Callable[..., None]
"""(kind, **fields): events of a run."""

#: Progress events while a dataset is read completely.
PROGRESS_EVENTS = 10
MB = 1e6


@dataclass(frozen=True)
class DataPlan:
    # storage, resident_rows: where rows are kept (`raytrain.data.rows.residency.place_split`)
    storage: Storage
    resident_rows: int = 0
    # loader_workers, prefetch: processes that read a dataset, and batches that each reads ahead
    loader_workers: int = 0
    prefetch: int = 2
    seed: int = 0  # for the random draws of a dataset


def prepare_source(
    source: Source, plan: DataPlan, *, device: torch.device, device_name: str = "", report: ReportEvent
) -> Source:
    """Place both splits of a source where training reads them. A prepared source is returned unchanged.
    `device_name`: for the events; the type of the device if empty. `report`: receives `preparation` events (start,
    progress, finished); the last one has seconds and bytes."""
    if source.placed:
        return source
    splits = {"train": source.train, **({} if source.eval is None else {"eval": source.eval})}
    rows = {name: len(split) for name, split in splits.items()}
    where = {"storage": plan.storage, "device": device_name or device.type}
    described = " and ".join(f"{count:,} rows ({name})" for name, count in rows.items())
    report("preparation", phase="start", rows=rows, reason=f"preparing {described}: {plan.storage}", **where)
    begin, copied = time.perf_counter(), replace(TRANSFERS)
    placed = _place_all(splits, plan, device=device, report=report)
    synchronize(device)  # once, so that every row has arrived
    seconds, kept = time.perf_counter() - begin, 0.0
    if plan.storage == "resident":
        kept = sum(split.nbytes for split in placed.values() if not isinstance(split, StreamSplit))
    elif plan.storage == "partial":
        kept = placed["train"].nbytes * min(1.0, plan.resident_rows / len(placed["train"]))
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

        def progress(done: int, of: int, name: str = name) -> None:
            reason = f"{name}: {done:,}/{of:,} rows"
            report("preparation", phase="progress", split=name, done=done, of=of, reason=reason)

        if plan.storage == "resident" and type(split) is DatasetSplit:
            read.append((name, split, read_dataset(split, seed=plan.seed, report=progress)))
            continue
        if type(split) is DatasetSplit and split.collate is None:
            split.masked.names  # noqa: B018  # found here, before loader processes are forked
        storage = plan.storage if name == "train" or plan.storage != "partial" else "stream"
        if storage == "partial" and type(split) is DatasetSplit:
            with generators_kept():
                seeds = partial(seed_item, plan.seed, 0)
                placed[name] = PartialDataset(split, device=device, rows=plan.resident_rows, before=seeds)
        else:
            placed[name] = place_split(split, storage, device, resident_rows=plan.resident_rows)
        progress(len(split), len(split))
    for name, split, rows in read:  # once the lengths of all rows are known
        placed[name] = split.kept(rows).to(device)
    return placed


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
