"""Move batches to a device, and count the copies.

Batches may be of any nesting: dicts, tuples, named tuples, lists, dataclasses, packed sequences; None, strings and
other objects in them stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from cluster.wording import counted


@dataclass
class TransferCounts:
    """Copies that `to_device` has made in this process.

    Attributes:
        tensors: that were really copied, `bytes` of them together.
        in_place: tensors that were on the device already and were returned as the same object.
        pinned: copies whose source was pinned host memory.
        non_blocking: copies that were queued, so that the host did not wait for them.
        pageable, other_device: copies that the host waited for, as their source was ordinary host memory, or as it was
            on another device.
    """

    tensors: int = 0
    bytes: int = 0
    in_place: int = 0
    pinned: int = 0
    non_blocking: int = 0
    pageable: int = 0
    other_device: int = 0

    @property
    def blocking(self) -> int:
        """Copies that the host waited for."""
        return self.pageable + self.other_device

    def since(self, before: TransferCounts) -> TransferCounts:
        """The difference to an earlier state (`dataclasses.replace(copies)` keeps one)."""
        return TransferCounts(*(now - then for now, then in zip(self.values(), before.values(), strict=True)))

    def values(self) -> list[int]:
        """The counts in the order of the fields, which `TransferCounts(*values)` takes."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    @classmethod
    def total(cls, counts: Iterable[TransferCounts]) -> TransferCounts:
        """The sum of the counts of several workers."""
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

    def add(self, nbytes: int, *, source: torch.device, pinned: bool, non_blocking: bool) -> None:
        """Count one copy of a tensor on `source`."""
        self.tensors += 1
        self.bytes += nbytes
        self.pinned += pinned
        if non_blocking:
            self.non_blocking += 1
        elif source.type == "cpu":
            self.pageable += 1
        else:
            self.other_device += 1


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
    Objects with a `to` of their own (a packed sequence) are moved by it.
    """
    if isinstance(value, Tensor):
        return _moved(value, torch.device(device))
    if isinstance(value, PackedSequence):
        if is_on(value.data, torch.device(device)):
            TRANSFERS.in_place += 1
            return value
        pinned = _from_pinned(value.data, torch.device(device))
        TRANSFERS.add(value.data.nbytes, source=value.data.device, pinned=pinned, non_blocking=pinned)
        return value.to(device, non_blocking=pinned)  # pyright: ignore[reportCallIssue, reportArgumentType]  (torch's stub)
    return rebuild(value, lambda part: to_device(part, device))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    tensor = dense(tensor)
    if is_on(tensor, device):
        TRANSFERS.in_place += 1
        return tensor
    pinned = _from_pinned(tensor, device)
    TRANSFERS.add(tensor.nbytes, source=tensor.device, pinned=pinned, non_blocking=pinned)
    return tensor.to(device, non_blocking=pinned)


def _from_pinned(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == "cpu" and device.type != "cpu" and tensor.is_pinned()


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
