"""What the stages of a split model pass on: the inputs of a forward pass, and the activation between two stages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Structure = Any
"""What a module returned, without values: {"shape", "dtype"} for a tensor, lists of such, and None for the rest."""


@dataclass(frozen=True)
class CacheUse:
    """The key/value cache that a pass uses; each stage holds its own layers' part.

    Attributes:
        number: of the cache.
        lengths: tokens of each prompt.
        capacity: tokens of the longest row at the end.
        keep: rows that continue since the pass before, None for all.
    """

    number: int
    lengths: tuple[int, ...]
    capacity: int
    keep: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StagePass:
    """One forward pass on its way through the stages.

    Attributes:
        number: of the pass.
        args, kwargs: of the model's forward; every stage gets them, since masks and positions are made of them.
        cache: None for a pass without one.
        ended: numbers of caches that are not used any more.
        hidden: what crosses the cut before the next stage; after the last stage the model's output.
        outputs: name of a part, or class of a repeated one -> the structure of its output, for stages without it.
        seconds: that each stage so far took to compute it.
        error: (whether memory ran out, message) of the stage that failed; later stages only pass it on.
    """

    number: int
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    cache: CacheUse | None = None
    ended: tuple[int, ...] = ()
    hidden: Tensor | None = None
    outputs: dict[str, Structure] = field(default_factory=dict)
    seconds: tuple[float, ...] = ()
    error: tuple[bool, str] | None = None


def to_device(value: Any, device: torch.device) -> Any:
    """A tensor, or a list or mapping of such, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(one, device) for one in value)
    if isinstance(value, dict):
        return {name: to_device(one, device) for name, one in value.items()}
    return value


# ---------------------------------------------------------------- bytes


def encode(message: StagePass) -> list[memoryview]:
    """The message as buffers: a header of JSON, then the tensors."""
    tensors: list[Tensor] = []
    plain = {
        "number": message.number, "args": _plain(message.args, tensors), "kwargs": _plain(message.kwargs, tensors),
        "cache": None if message.cache is None else vars(message.cache), "ended": message.ended,
        "hidden": _plain(message.hidden, tensors), "outputs": message.outputs, "seconds": message.seconds,
        "error": message.error,
    }  # fmt: skip
    on_cpu = [tensor.detach().to("cpu").contiguous() for tensor in tensors]
    plain["tensors"] = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in on_cpu]
    header = json.dumps(plain, separators=(",", ":")).encode()
    raw = [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in on_cpu if tensor.numel()]
    return [memoryview(len(header).to_bytes(8, "little") + header), *raw]


def sizes_of(header: bytes) -> list[int]:
    """Bytes of each tensor that follows a header."""
    return [_bytes(dtype, shape) for dtype, shape in json.loads(header)["tensors"]]


def decode(header: bytes, buffers: Sequence[Tensor]) -> StagePass:
    """The message of a header and the buffers of its tensors, (n,) uint8 each; they are used as they are."""
    plain = json.loads(header)
    kinds = [(getattr(torch, dtype), shape) for dtype, shape in plain["tensors"]]
    tensors = [buffer.view(dtype).reshape(shape) for buffer, (dtype, shape) in zip(buffers, kinds, strict=True)]
    cache = plain["cache"]
    if cache is not None:
        keep = cache["keep"]
        kept = None if keep is None else tuple(keep)
        cache = CacheUse(cache["number"], tuple(cache["lengths"]), cache["capacity"], kept)
    error = plain["error"]
    return StagePass(
        plain["number"], tuple(_restored(plain["args"], tensors)), _restored(plain["kwargs"], tensors), cache,
        tuple(plain["ended"]), _restored(plain["hidden"], tensors), plain["outputs"], tuple(plain["seconds"]),
        None if error is None else (bool(error[0]), str(error[1])),
    )  # fmt: skip


def _bytes(dtype: str, shape: Iterable[int]) -> int:
    size = getattr(torch, dtype).itemsize
    for length in shape:
        size *= length
    return size


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """Values of JSON; a tensor is {"tensor": its place}."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (list, tuple)):
        return [_plain(one, tensors) for one in value]
    if isinstance(value, dict):
        return {"dict": {str(name): _plain(one, tensors) for name, one in value.items()}}
    return value


def _restored(value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return [_restored(one, tensors) for one in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        return {name: _restored(one, tensors) for name, one in value["dict"].items()}
    return value


def failed(message: StagePass, *, out_of_memory: bool, text: str, seconds: float) -> StagePass:
    """The message that says so to the caller."""
    return replace(
        message, args=(), kwargs={}, hidden=None, error=(out_of_memory, text), seconds=(*message.seconds, seconds)
    )  # fmt: skip
