"""Move batches to a device, and count the copies.

Batches may be of any nesting: dicts, tuples, named tuples, lists, dataclasses, packed sequences; None, strings and
other objects in them stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


@dataclass
class TransferCounts:
    """Copies that `to_device` has made in this process.

    Attributes:
        copied: tensors that were really copied, `nbytes` of them together.
        in_place: tensors that were on the device already and were returned as the same object.
        blocking: copies that the host waited for; those from pinned memory run in the background.
    """

    copied: int = 0
    nbytes: int = 0
    in_place: int = 0
    blocking: int = 0

    def since(self, before: TransferCounts) -> TransferCounts:
        """The difference to an earlier state (`dataclasses.replace(copies)` keeps one)."""
        names = [field.name for field in dataclasses.fields(self)]
        return TransferCounts(**{name: getattr(self, name) - getattr(before, name) for name in names})


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
        TRANSFERS.copied += 1
        TRANSFERS.nbytes += value.data.nbytes
        TRANSFERS.blocking += 1
        return value.to(device)  # pyright: ignore[reportArgumentType]  (torch's stub knows the overload for dtypes alone)
    return rebuild(value, lambda part: to_device(part, device))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    tensor = dense(tensor)
    if is_on(tensor, device):
        TRANSFERS.in_place += 1
        return tensor
    pinned = tensor.device.type == "cpu" and device.type != "cpu" and tensor.is_pinned()
    TRANSFERS.copied += 1
    TRANSFERS.nbytes += tensor.nbytes
    TRANSFERS.blocking += not pinned
    return tensor.to(device, non_blocking=pinned)


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
        return value.pin_memory() if value.device.type == "cpu" and not value.is_pinned() else value
    if isinstance(value, PackedSequence):
        return value.pin_memory()
    return rebuild(value, pin)
