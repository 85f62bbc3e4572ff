"""Where rows are kept (all on the device, some, or none), and the counted copies of batches to it.

The plan decides, `raytrain.data.prepare` applies it; every copy of a batch to a device goes through `to_device`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from cluster.wording import counted
from raytrain.accelerator import on_gpu
from raytrain.data.rows.contract import Batch, Order, Split, SplitView

# ---------------------------------------------------------------- transfer


@dataclass
class TransferCounts:
    """Copies that `to_device` has made in this process."""

    tensors: int = 0  # that were really copied, `bytes` of them together
    bytes: int = 0
    in_place: int = 0  # tensors that were on the device already and were returned as the same object
    pinned: int = 0  # copies whose source was pinned host memory
    non_blocking: int = 0  # copies that were queued, so that the host did not wait for them
    # pageable, other_device: copies that the host waited for, as their source was ordinary host memory, or as it was on
    # another device
    pageable: int = 0
    other_device: int = 0

    @property
    def blocking(self) -> int:
        return self.pageable + self.other_device

    def since(self, before: TransferCounts) -> TransferCounts:
        """The difference to an earlier state (`dataclasses.replace(copies)` keeps one)."""
        return TransferCounts(*(now - then for now, then in zip(self.values(), before.values(), strict=True)))

    def values(self) -> list[int]:
        """The counts in the order of the fields, which `TransferCounts(*values)` takes."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    @classmethod
    def total(cls, counts: Iterable[TransferCounts]) -> TransferCounts:
        return cls(*map(sum, zip(*(one.values() for one in counts), strict=True)))

    def describe(self, device: str) -> str:
        """One sentence: how many tensors of batches were copied to `device`, and how."""
        if not self.tensors:
            if self.in_place:
                return f"no copies: all {counted(self.in_place, 'tensor')} of batches were on {device} already"
            return f"no copies: batches were made on {device}"
        text = f"{counted(self.tensors, 'tensor')} of batches ({self.bytes / 1e6:,.1f} MB) copied to {device}"
        text += f": {self.pinned:,} from pinned memory, {self.non_blocking:,} non-blocking"
        waited = {"whose source was ordinary memory": self.pageable, "from another device": self.other_device}
        blocked = [f"{number:,} {why}" for why, number in waited.items() if number]
        return text + (f"; the host waited for {' and '.join(blocked)}" if blocked else "")

    def add(self, nbytes: int, *, source: torch.device, pinned: bool) -> None:
        """Count one copy of a tensor on `source`; from pinned memory it is queued."""
        self.tensors += 1
        self.bytes += nbytes
        self.pinned += pinned
        self.non_blocking += pinned
        self.pageable += not pinned and source.type == "cpu"
        self.other_device += not pinned and source.type != "cpu"


TRANSFERS = TransferCounts()
"""Counts of this process since its start."""


def rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """A container of the same kind with `change` applied to each part; anything else comes back itself."""
    if isinstance(value, Mapping):
        return {name: change(part) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(change(part) for part in value))
    if isinstance(value, (list, tuple)):
        return type(value)(change(part) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return with_fields(value, {name: change(getattr(value, name)) for name in names})
    return value


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside `value` with its path, such as ``batch.pixels[1].mask``.

    Of a module its parameters and buffers; of a packed sequence the data (its lengths belong on the host).
    """
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        for part, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield f"{name}.{part}" if name else part, tensor
    elif isinstance(value, PackedSequence):
        yield f"{name}.data", value.data
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_of(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, tuple) and (fields := getattr(value, "_fields", None)) is not None:
        for key, part in zip(fields, value, strict=True):
            yield from tensors_of(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from tensors_of(part, f"{name}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name), f"{name}.{field.name}")


def with_fields(value: Any, fields: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other values, also for frozen ones and fields `__init__` does not take."""
    changed = copy.copy(value)
    for name, part in fields.items():
        object.__setattr__(changed, name, part)
    return changed


def to_device(value: Any, device: torch.device | str) -> Any:
    """`value` with every tensor in it on `device`, dense in memory, whatever the nesting; the rest is untouched.

    A tensor that is on the device already is returned as the same object. A copy from pinned memory does not block.
    Packed sequences are moved by a `to` of their own.
    """
    if not isinstance(value, (Tensor, PackedSequence)):
        return rebuild(value, lambda part: to_device(part, device))
    value, device = dense(value) if isinstance(value, Tensor) else value, torch.device(device)
    tensor = value if isinstance(value, Tensor) else value.data
    if is_on(tensor, device):
        TRANSFERS.in_place += 1
        return value
    pinned = tensor.device.type == "cpu" and device.type != "cpu" and tensor.is_pinned()
    TRANSFERS.add(tensor.nbytes, source=tensor.device, pinned=pinned)
    return value.to(device, non_blocking=pinned)  # pyright: ignore[reportCallIssue, reportArgumentType]  (torch's stub)


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself where it is contiguous, in any order of channels that torch has a name for; else a copy.

    Every kernel that reads a slice or a transposed view would gather it again.
    """
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor
    if tensor.ndim == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return tensor
    return tensor.contiguous()


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether `tensor` is on `device`; a device without an index ("cuda") stands for any of its kind."""
    same_index = device.index is None or tensor.device.index in (None, device.index)
    return tensor.device.type == device.type and same_index


def pin(value: Any) -> Any:
    """`value` with every CPU tensor in it in pinned memory (torch keeps the blocks and reuses them)."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.is_pinned():
            return value
        return dense(value).pin_memory()  # made dense later, it would leave pinned memory
    if isinstance(value, PackedSequence):
        return value.pin_memory()
    return rebuild(value, pin)


# ---------------------------------------------------------------- residency
# Where rows are kept: all on the device, some of them, or none and each batch is moved to it.


Storage = Literal["resident", "partial", "pinned", "stream"]


class StreamSplit(SplitView):
    """A split gathered on the CPU; each batch is then moved to the device. `pinned`: move batches through pinned
    memory, so that the host does not wait for the copy."""

    def __init__(self, split: Split, *, device: torch.device | str, pinned: bool = False) -> None:
        super().__init__(split)
        self.device = torch.device(device)
        self.pinned = pinned

    def gather(self, indices: np.ndarray) -> Batch:
        token = _INTO_PINNED.set(self.pinned)
        try:
            return self.moved(self.split.gather(indices))
        finally:
            _INTO_PINNED.reset(token)

    def moved(self, host: Batch) -> Batch:
        return to_device(pin(host) if self.pinned else host, self.device)

    def to(self, device: torch.device | str, *, rows: int | None = None) -> Split:
        if rows is not None:
            return self.split.to(device, rows=rows)
        return StreamSplit(self.split, device=device, pinned=self.pinned)


class ReorderedSplit(SplitView):
    """Rows in memory in the order that a function of (seed, epoch) returns, such as that of their row groups."""

    def __init__(self, split: Split, order: Callable[[int, int], Order]) -> None:
        super().__init__(split)
        self._order = order

    def order(self, seed: int, epoch: int) -> Order:
        return self._order(seed, epoch)

    def to(self, device: torch.device | str, *, rows: int | None = None) -> ReorderedSplit:
        return ReorderedSplit(self.split.to(device, rows=rows), self._order)


def place_split(split: Split, storage: Storage, device: torch.device | str, *, resident_rows: int = 0) -> Split:
    """The split with its rows where training reads them. Order and batches are the same for every storage. Raises
    ValueError: another storage, such as an `auto` that the plan has not resolved.

    Args:
        split: as the source opened it, on the host.
        storage: "resident" keeps all rows on the device, "partial" the first `resident_rows`; "stream" moves each
            batch, "pinned" moves it through pinned memory.
        device: where batches must be.
    """
    if storage in ("resident", "partial"):
        return split.to(device, rows=resident_rows if storage == "partial" else None)
    if storage in ("stream", "pinned"):
        host = split.split if isinstance(split, StreamSplit) else split
        pinned = storage == "pinned" and torch.device(device).type != "cpu"
        return StreamSplit(host, device=device, pinned=pinned)
    raise ValueError(f"storage is {storage!r}, expected 'resident', 'partial', 'pinned' or 'stream'")


# -- columns in two parts ---------------------------------------------------------------------------


class PartialTensor:
    """A column (N, ...) whose first rows are on the device and the others on the host.

    Rows that are taken from it are always on the device. `head`: rows 0 to K - 1, on the device. `tail`: the others,
    on the host."""

    def __init__(self, head: Tensor, tail: Tensor) -> None:
        self.head, self.tail = head, tail
        self.device, self.dtype, self.ndim = head.device, head.dtype, head.ndim
        self.shape = torch.Size([head.shape[0] + tail.shape[0], *head.shape[1:]])
        self.numel, self.element_size = self.shape.numel, head.element_size
        self.is_floating_point, self.is_complex = head.is_floating_point, head.is_complex

    def take(self, index: np.ndarray) -> Tensor:
        """Rows by index (an array of any shape), on the device."""
        flat = index.reshape(-1)
        in_head = flat < self.head.shape[0]
        if in_head.all():
            rows = self.head.index_select(0, _index_tensor(flat, self.device))
        else:
            streamed = _select(self.tail, flat[~in_head] - self.head.shape[0], pinned=on_gpu(self.device))
            rows = streamed = to_device(streamed, self.device)
            if in_head.any():
                rows = torch.empty((len(flat), *self.head.shape[1:]), dtype=self.dtype, device=self.device)
                kept = self.head.index_select(0, _index_tensor(flat[in_head], self.device))
                rows.index_copy_(0, _index_tensor(np.flatnonzero(in_head), self.device), kept)
                rows.index_copy_(0, _index_tensor(np.flatnonzero(~in_head), self.device), streamed)
        return rows if index.ndim == 1 else rows.reshape(*index.shape, *rows.shape[1:])


Column = Tensor | PartialTensor


def _index_tensor(index: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(index)).to(device, non_blocking=True)


_INTO_PINNED: ContextVar[bool] = ContextVar("into_pinned", default=False)
"""Whether rows that this thread gathers on the host are on their way through pinned memory."""


def index_for(column: Column, index: np.ndarray) -> np.ndarray | Tensor:
    """The index for several calls of `take` on columns like this one: on a GPU it is copied once."""
    return _index_tensor(index, column.device) if isinstance(column, Tensor) and on_gpu(column.device) else index


def _select(column: Tensor, index: np.ndarray | Tensor, *, pinned: bool) -> Tensor:
    """Rows of a column; `pinned`: written to pinned memory at once, of which torch reuses blocks. Gathered to ordinary
    memory first, a batch of 256 MiB took 42 ms on an H200's host: new pages, and a second copy."""
    to = torch.empty((len(index), *column.shape[1:]), dtype=column.dtype, pin_memory=True) if pinned else None
    at = index if isinstance(index, Tensor) else _index_tensor(index, column.device)
    return torch.index_select(column, 0, at, out=to)


def take(column: Column, index: np.ndarray | Tensor) -> Tensor:
    """Rows of a column by index (of any shape; an array, or as `index_for` makes it), on the device of the column."""
    if isinstance(column, PartialTensor):
        assert isinstance(index, np.ndarray), "of a column in two parts, only the host knows which rows are where"
        return column.take(index)
    rows = _select(column, index.reshape(-1), pinned=_INTO_PINNED.get() and column.device.type == "cpu")
    return rows if index.ndim == 1 else rows.reshape(*index.shape, *rows.shape[1:])


def full_tensor(column: Column) -> Tensor:
    """The column, which must not be in two parts: it is split only after everything in it is counted."""
    assert isinstance(column, Tensor), "this column is in two parts already"
    return column


def placed_column(column: Column, device: torch.device | str, *, rows: int | None) -> Column:
    """A host column on `device`; with `rows` only its first rows, while the others stay where they are."""
    tensor = full_tensor(column)
    if rows is None or rows >= tensor.shape[0]:
        return tensor.to(device)
    return PartialTensor(tensor[:rows].to(device), tensor[rows:])
