"""Snapshots: copies of the training state in memory, as named tensors and JSON.

Any nesting of dicts, lists and tuples with tensors and scalars (a module's or optimizer's state_dict) is split into
tensors with readable names and a JSON skeleton, and restored from them without loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raytrain.accelerator import gpu_module, on_gpu
from raytrain.checkpoint.safetensors import DTYPE_NAMES
from raytrain.errors import CheckpointError

PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_PLAIN: Any = Tensor
_RESERVED = frozenset({"manifest", "state"})


class Flat(NamedTuple):
    """`tensors` by name (views, not copies) and the JSON `skeleton` that refers to them."""

    tensors: dict[str, Tensor]
    skeleton: Any


@dataclass
class Snapshot:
    """The state after `step` steps, independent of the running training.

    Attributes:
        tied: part -> other name of a tensor -> the name it is saved under.
        split: part -> names of the tensors of which this process holds only some rows.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]  # part -> name -> tensor, each distinct one once
    state: Any  # the caller's JSON state, in skeleton form
    skeletons: dict[str, Any] = field(default_factory=dict)  # part -> the nesting of its tensors
    tied: dict[str, dict[str, str]] = field(default_factory=dict)
    split: dict[str, list[str]] = field(default_factory=dict)


def flatten(state: Any) -> Flat:
    """Splits a nested state; see `unflatten`. Errors: CheckpointError naming a value it cannot hold."""
    flat = shape_of(state)
    for name, tensor in flat.tensors.items():
        if tensor.device.type == "meta":
            raise CheckpointError(f"{name}: only tensors with data can be saved, not one on the meta device")
    return flat


def shape_of(state: Any) -> Flat:
    """`flatten`, of a state whose tensors may have no data yet: finds what cannot be saved before there is any."""
    tensors: dict[str, Tensor] = {}
    return Flat(tensors, _skeleton(state, (), tensors))


def unflatten(tensors: Mapping[str, Tensor], skeleton: Any) -> Any:
    """Restores the nested state: keys keep their type and order, tuples stay tuples, floats are bit-identical. Errors:
    CheckpointError for a tensor that is missing or a skeleton of another kind."""
    if skeleton is None or isinstance(skeleton, (bool, int, float, str)):
        return skeleton
    if not isinstance(skeleton, dict) or len(skeleton) != 1:
        raise CheckpointError(f"state of an unknown form: {str(skeleton)[:80]}")
    ((kind, content),) = skeleton.items()
    if kind == "dict":
        return {key: unflatten(tensors, item) for key, item in content.items()}
    if kind == "items":
        return {unflatten({}, key): unflatten(tensors, item) for key, item in content}
    if kind in ("list", "tuple"):
        values = [unflatten(tensors, item) for item in content]
        return values if kind == "list" else tuple(values)
    if kind == "float":
        return float(content)
    if kind == "tensor":
        return _tensor_named(tensors, content)
    if kind == "array":
        raw = _tensor_named(tensors, content["tensor"]).numpy()
        return raw.view(np.dtype(content["dtype"])).reshape(content["shape"]).copy()
    if kind == "bytes":
        return _tensor_named(tensors, content).numpy().tobytes()
    raise CheckpointError(f"state of an unknown kind: {kind}")


def _tensor_named(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"the tensor {name} is missing")
    return tensors[name]


def _skeleton(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):  # numpy's float64 is one
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        return {"tensor": _add(value, path, tensors)}
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {"dict": {key: _skeleton(item, (*path, key), tensors) for key, item in value.items()}}
        return {
            "items": [[_key(key, path), _skeleton(item, (*path, str(key)), tensors)] for key, item in value.items()]
        }
    if type(value) in (list, tuple, torch.Size):
        kind = "list" if type(value) is list else "tuple"
        return {kind: [_skeleton(item, (*path, str(index)), tensors) for index, item in enumerate(value)]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        raw = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8).copy())
        name = _add(raw, path, tensors)
        return {"array": {"tensor": name, "dtype": value.dtype.str, "shape": list(value.shape)}}
    if isinstance(value, np.generic):
        return _skeleton(value.item(), path, tensors)
    if type(value) in (bytes, bytearray):
        return {"bytes": _add(torch.from_numpy(np.frombuffer(value, np.uint8).copy()), path, tensors)}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{'.'.join(path) or 'state'}: a {kind} cannot be saved; "
        "a state holds tensors, numbers, strings, and lists, tuples and dicts of them"
    )


def _key(key: Any, path: tuple[str, ...]) -> Any:
    if key is None or type(key) in (bool, int, str, float):
        return _skeleton(key, path, {})
    raise CheckpointError(f"{'.'.join(path)}: a dict key of {type(key).__name__} cannot be saved")


def _add(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    stem = ".".join(path) or "value"
    kind: Any = type(tensor)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kept = "a quantized tensor" if tensor.is_quantized else f"a tensor of layout {tensor.layout}"
        raise CheckpointError(f"{stem}: {'a nested tensor' if tensor.is_nested else kept} cannot be saved, only dense")
    if kind.__torch_dispatch__ is not _PLAIN.__torch_dispatch__ and not hasattr(tensor, "to_local"):
        raise CheckpointError(f"{stem}: a {kind.__name__}, whose values its class keeps elsewhere, cannot be saved")
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{stem}: a tensor of {tensor.dtype} cannot be saved in a safetensors file")
    name, number = stem, 2
    while name in tensors:  # {"a.b": x, "a": {"b": y}}
        name, number = f"{stem}~{number}", number + 1
    tensors[name] = tensor.detach()
    return name


def split_tied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The distinct tensors under their first names, and alias -> that name for those that share the same memory."""
    first: dict[tuple[Any, ...], str] = {}
    distinct: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj())
        if tensor.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place] = name
            distinct[name] = tensor
    return distinct, tied


CHUNK, ALIGNED = 2 * 2**20, 512
"""Bytes of pinned memory: the least that is allocated, and what the places of its tensors are multiples of."""

_UNREAD: list[tuple[torch.device, torch.Event]] = []


def before_update() -> None:
    """Lets the optimizer step that is queued next wait, on the device, until no copy of a `Staging` needs the state."""
    while _UNREAD:
        device, arrived = _UNREAD.pop()
        gpu_module(device).current_stream(device).wait_event(arrived)


class Staging:
    """CPU buffers for snapshots, reused by the next one: at most one snapshot is in flight.

    Tensors of a GPU are copied into pinned memory on a side stream, and have arrived after `wait`. Forward may change
    any tensor of a model (batch norm, `max_norm`, teachers), so the device computes nothing until its copies are done.
    Those of the optimizers, the most of the state, overlap with the next passes; their next step waits for them.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._arrived: list[torch.Event] = []

    @property
    def nbytes(self) -> int:
        memory = {buffer.untyped_storage()._cdata: buffer.untyped_storage() for buffer in self._buffers.values()}
        return sum(storage.nbytes() for storage in memory.values())

    def copy(self, parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Copies part -> name -> tensor; what an earlier call returned is overwritten."""
        wanted = {(part, name): tensor for part, named in parts.items() for name, tensor in named.items()}
        self._allocate(wanted)
        for device in {tensor.device for tensor in wanted.values() if on_gpu(tensor.device)}:
            gpu = gpu_module(device)
            training = gpu.current_stream(device)
            stream = self._streams.setdefault(device, gpu.Stream(device))
            stream.wait_stream(training)  # the copies run after all work that the training has queued so far
            for late in (False, True):
                with gpu.stream(stream):
                    for key, tensor in wanted.items():
                        if tensor.device == device and (key[0] == "optimizer") is late:
                            self._buffers[key].copy_(tensor, non_blocking=True)
                            tensor.record_stream(stream)  # it may be a copy that only a state_dict refers to
                if not late:
                    training.wait_stream(stream)
            self._arrived.append(gpu.Event(blocking=True))
            self._arrived[-1].record(stream)
            _UNREAD.append((device, self._arrived[-1]))
        for key, tensor in wanted.items():
            if not on_gpu(tensor.device):
                self._buffers[key].copy_(tensor)
        return {part: {name: self._buffers[part, name] for name in named} for part, named in parts.items()}

    def wait(self) -> None:
        """Returns when everything is in the buffers; from any thread."""
        while self._arrived:
            self._arrived.pop().synchronize()

    def _allocate(self, wanted: Mapping[tuple[str, str], Tensor]) -> None:
        """Makes the buffers fit. torch rounds pinned memory up to a power of two: the larger tensors first, they share
        chunks of the largest such size that they fill. (Registering memory of any size with CUDA would need another
        allocator beside torch's, which keeps for the next session what this one frees.)"""
        shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in wanted.items()}
        self._buffers = {key: one for key, one in self._buffers.items() if shapes.get(key) == (one.shape, one.dtype)}
        missing = {key: tensor for key, tensor in wanted.items() if key not in self._buffers}
        pinned = {key: tensor for key, tensor in missing.items() if on_gpu(tensor.device)}
        self._buffers |= {key: torch.empty(t.shape, dtype=t.dtype) for key, t in missing.items() if key not in pinned}
        sizes = {key: ALIGNED * max(1, -(-tensor.nbytes // ALIGNED)) for key, tensor in pinned.items()}
        left, chunk = sum(sizes.values()), torch.empty(0, dtype=torch.uint8)
        for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
            if size > len(chunk):
                room = max(CHUNK, 1 << (size - 1).bit_length(), 1 << (left.bit_length() - 1))
                chunk = torch.empty(room, dtype=torch.uint8, pin_memory=True)
            tensor = missing[key]
            self._buffers[key] = chunk[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            chunk, left = chunk[size:], left - size


def take_snapshot(
    parts: Mapping[str, Any], state: Mapping[str, Any], *, step: int, staging: Staging | None = None
) -> Snapshot:
    """Takes the state of every part; with a `staging`, copies that are complete after its `wait`, so that the training
    may change its tensors right after. Errors: CheckpointError naming what cannot be saved.

    Args:
        parts: part -> nested state, or an object with `state_dict()`. A part becomes a file, which its name must suit.
        state: small JSON state (step, cursor, ...), without tensors.
    """
    tensors, skeletons, tied, split = {}, {}, {}, {}
    for part, value in parts.items():
        if not PART_NAME.fullmatch(part) or part in _RESERVED:
            raise CheckpointError(f"{part!r} cannot name a part of a checkpoint")
        flat = flatten(value.state_dict() if hasattr(value, "state_dict") else value)
        held = ((name, getattr(tensor, "to_local", None)) for name, tensor in flat.tensors.items())
        rows: dict[str, Tensor] = {name: to_local() for name, to_local in held if to_local is not None}  # of shards
        tensors[part], aliases = split_tied({**flat.tensors, **rows})
        skeletons[part] = flat.skeleton
        if aliases:
            tied[part] = aliases
        if rows:
            split[part] = [name for name in rows if name not in aliases]
    flat = flatten(dict(state))
    if flat.tensors:
        raise CheckpointError(f"state: tensors ({', '.join(flat.tensors)}) belong into a part")
    if staging is not None:
        tensors = staging.copy(tensors)
    return Snapshot(step=step, tensors=tensors, state=flat.skeleton, skeletons=skeletons, tied=tied, split=split)
