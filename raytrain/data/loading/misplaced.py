"""Proof that a batch, a module or its state is where it should be."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from raytrain.data.loading.transfer import is_on
from raytrain.errors import DevicePlacementError

NAMED_AT_MOST = 5


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
