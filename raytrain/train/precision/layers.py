"""Layers that compute in another format than the rest: in fp32 under autocast, or alone in half precision.

Nothing of the model's state changes: a layer's `forward` is called in another autocast context. What it returns stays
as it computed it, as torch's own autocast leaves what a layer norm returns: the operation that takes it casts it where
it needs half precision. Cast back at once, what fp32 gained would be rounded away.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.data.transfer import rebuild
from raytrain.errors import InputError

KEY = "precision.fp32_layers"
NEAREST = 3
HALF = (torch.bfloat16, torch.float16)


class LayerPrecision:
    """The layers of one module and the format each computes in.

    Args:
        module: its submodules can be named as in `named_modules`.
        device: autocast is switched by its type.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._kind = module, device.type
        self._kept: dict[nn.Module, Any] = {}

    def keep(self, names: Sequence[str]) -> None:
        """From now on these layers, and no others, compute in fp32 where autocast is on.

        Raises:
            InputError: a name that the model does not have.
        """
        for part, before in self._kept.items():
            _put_back(part, before)
        self._kept = {}
        for part in parts_named(self._module, names):
            self._kept[part] = _swap(part, _InFp32(part.forward, self._kind))

    @contextlib.contextmanager
    def alone_in(self, name: str, dtype: torch.dtype) -> Iterator[None]:
        """Inside, this layer computes under autocast in `dtype`; the rest as without autocast, which must be off."""
        before = {
            part: _swap(part, _InHalf(part.forward, self._kind, dtype)) for part in parts_named(self._module, [name])
        }
        try:
            yield
        finally:
            for part, forward in before.items():
                _put_back(part, forward)


def parts_named(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The submodules of these names; for a list of modules, which is never called itself, those in it.

    Raises:
        InputError: a name that the model does not have, with the nearest ones.
    """
    known = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    found: dict[nn.Module, None] = {}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=NEAREST, cutoff=0.3) or list(known)[:NEAREST]
            raise InputError(KEY, seen=name, expected="names of the model's modules", remedy=f"near: {', '.join(near)}")
        found |= dict.fromkeys(_called(known[name]))
    return list(found)


def layers_of(module: nn.Module, *, blocks: str | None, most: int) -> list[str]:
    """Names of the layers that own parameters, in the order of the model, none inside another.

    Args:
        blocks: name of the list of repeated blocks; each of them counts as one where there would be more than `most`.
    """
    named = [(name, next(part.parameters(recurse=False), None)) for name, part in module.named_modules() if name]
    own = [name for name, parameter in named if parameter is not None]
    if len(own) > most and blocks is not None:
        within = [f"{blocks}.{name}" for name, _ in module.get_submodule(blocks).named_children()]
        own = [name for name in own if not name.startswith(f"{blocks}.")] + within
    return [name for name in own if not any(name.startswith(f"{other}.") for other in own)]


def _called(part: nn.Module) -> list[nn.Module]:
    if type(part).forward is not nn.Module.forward:
        return [part]
    return [inner for child in part.children() for inner in _called(child)]


def _swap(part: nn.Module, forward: Any) -> Any:
    """Put another `forward` in place; what stood there (None: the class's own) comes back."""
    before = part.__dict__.get("forward")
    part.forward = forward
    return before


def _put_back(part: nn.Module, before: Any) -> None:
    if before is None:
        del part.forward
    else:
        part.forward = before


class _InFp32:
    """A layer's forward without autocast, its half-precision inputs cast up; itself where autocast is off."""

    def __init__(self, forward: Any, kind: str) -> None:
        self._forward, self._kind = forward, kind

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_autocast_enabled(self._kind):
            return self._forward(*inputs, **named)
        with torch.autocast(self._kind, enabled=False):
            return self._forward(*_in_fp32(inputs), **_in_fp32(named))


class _InHalf:
    """A layer's forward under autocast, its outputs cast up for a rest that knows no half precision."""

    def __init__(self, forward: Any, kind: str, dtype: torch.dtype) -> None:
        self._forward, self._kind, self._dtype = forward, kind, dtype

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with torch.autocast(self._kind, dtype=self._dtype):
            outputs = self._forward(*inputs, **named)
        return _in_fp32(outputs)


def _in_fp32(value: Any) -> Any:
    """Half-precision tensors of a nested value in fp32, the rest as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    return rebuild(value, _in_fp32)
