"""Where batches live: all rows on the device, or batches moved to it; and proof that they are there."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from raytrain.data.contract import Batch, Split
from raytrain.errors import DevicePlacementError

NAMED_AT_MOST = 5


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


def with_fields(value: Any, fields: Mapping[str, Any]) -> Any:
    """A copy of a dataclass with other values, also for frozen ones and fields `__init__` does not take."""
    changed = copy.copy(value)
    for name, part in fields.items():
        object.__setattr__(changed, name, part)
    return changed


def move(value: Any, device: torch.device | str) -> Any:
    """`value` with every tensor in it on `device`, whatever the nesting; the rest is untouched.

    A tensor that is there already comes back as the same object. The copy does not wait where the source is
    pinned. Objects with a `to` of their own (a packed sequence) are moved by it.
    """
    if isinstance(value, Tensor):
        pinned = value.device.type == "cpu" and torch.device(device).type != "cpu" and value.is_pinned()
        return value.to(device, non_blocking=pinned)
    if isinstance(value, PackedSequence):
        return value.to(device)  # pyright: ignore[reportArgumentType]  (torch's stub knows the overload for dtypes alone)
    return rebuild(value, lambda part: move(part, device))


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


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether `tensor` is on `device`; a device without an index ("cuda") stands for any of its kind."""
    same_index = device.index is None or tensor.device.index in (None, device.index)
    return tensor.device.type == device.type and same_index


def find_misplaced(value: Any, device: torch.device | str, *, name: str = "batch") -> list[str]:
    """Paths of all tensors in a batch, a module or its state that are not on `device`; no device is read.

    Args:
        value: nested containers of tensors, or a module.
        device: where they should be.
        name: what the path begins with; "" for a module's own names.
    """
    wanted = torch.device(device)
    return [path for path, tensor in tensors_of(value, name) if not is_on(tensor, wanted)]


def verify_placement(value: Any, device: torch.device | str, *, name: str = "batch") -> None:
    """Raises DevicePlacementError naming the tensors of `value` that are elsewhere, and where they are."""
    paths = find_misplaced(value, device, name=name)
    if not paths:
        return
    where = dict(tensors_of(value, name))
    named = ", ".join(f"{path} is on {where[path].device}" for path in paths[:NAMED_AT_MOST])
    more = f" and {len(paths) - NAMED_AT_MOST} more" if len(paths) > NAMED_AT_MOST else ""
    raise DevicePlacementError(f"{named}{more}, expected every tensor on {torch.device(device)}")


class StreamSplit:
    """A split gathered on the CPU, each batch then moved to the device."""

    def __init__(self, split: Split, *, device: torch.device | str) -> None:
        self.split = split
        self.device = torch.device(device)
        self.tokens_per_row = split.tokens_per_row

    def __len__(self) -> int:
        return len(self.split)

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.split.nbytes

    def order(self, seed: int, epoch: int) -> np.ndarray:
        return self.split.order(seed, epoch)

    def eval_order(self) -> np.ndarray:
        return self.split.eval_order()

    def gather(self, handles: np.ndarray) -> Batch:
        return move(self.split.gather(handles), self.device)

    def weights(self, handles: np.ndarray) -> int | None:
        return self.split.weights(handles)

    def to(self, device: torch.device | str) -> StreamSplit:
        """The same host data, streamed to another device."""
        return StreamSplit(self.split, device=device)


def place(split: Split, storage: Literal["resident", "stream"], device: torch.device | str) -> Split:
    """The split as training reads it; order and batches are the same for either storage.

    Args:
        split: as the source opened it, on the host.
        storage: "resident" puts all of it on the device once; "stream" moves each batch.
        device: where batches must be.
    Raises:
        ValueError: a storage that the plan has not resolved to one of the two.
    """
    if storage == "resident":
        return split.to(device)
    if storage == "stream":
        return StreamSplit(split, device=device)
    raise ValueError(f"storage is {storage!r}, expected 'resident' or 'stream'")
