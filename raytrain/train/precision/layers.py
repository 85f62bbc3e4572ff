"""Layers that compute in a different format than the model: in fp32 under autocast, or alone in half precision.

The state of the model does not change: only the autocast context of a layer's `forward` does. Its outputs keep their
format, like those of a layer norm under torch's autocast; the next operation casts them if it needs half precision.
Casting them back at once would round away what fp32 gained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.config.messages import near_names
from raytrain.data.transfer import rebuild
from raytrain.errors import InputError
from raytrain.models.blocks import called_modules

KEY = "precision.fp32_layers"
HALF = (torch.bfloat16, torch.float16)


class LayerPrecision:
    """Sets the format in which individual layers of a module compute.

    Args:
        module: layers are named as in its `named_modules`.
        device: its type selects the autocast context.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._kind = module, device.type
        self._kept: dict[nn.Module, Any] = {}

    def keep(self, names: Sequence[str]) -> None:
        """Make exactly these layers compute in fp32 when autocast is on.

        Raises:
            InputError: the model has no layer of that name.
        """
        for part, before in self._kept.items():
            _put_back(part, before)
        self._kept = {}
        for part in parts_named(self._module, names):
            self._kept[part] = _swap(part, _InFp32(part.forward, self._kind))

    @contextlib.contextmanager
    def alone_in(self, name: str, dtype: torch.dtype) -> Iterator[None]:
        """Context in which only this layer computes under autocast in `dtype`; autocast must otherwise be off."""
        before = {
            part: _swap(part, _InHalf(part.forward, self._kind, dtype)) for part in parts_named(self._module, [name])
        }
        try:
            yield
        finally:
            for part, forward in before.items():
                _put_back(part, forward)


def parts_named(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The submodules with these names; a list of modules, which is never called itself, stands for its elements.

    Raises:
        InputError: the model has no module of that name; the message suggests the nearest names.
    """
    known = {name: part for name, part in module.named_modules(remove_duplicate=False) if name}
    found: dict[nn.Module, None] = {}
    for name in names:
        if name not in known:
            remedy = near_names(name, list(known), otherwise=list(known))
            raise InputError(KEY, got=name, expected="names of the model's modules", remedy=remedy)
        found |= dict.fromkeys(part for _, part in called_modules(name, known[name]))
    return list(found)


def layers_of(module: nn.Module, *, blocks: str | None, most: int) -> list[str]:
    """Names of the layers that own parameters, in model order, without layers nested in another of them.

    Args:
        blocks: name of the list of repeated blocks.
        most: with more layers than this, each block counts as one layer.
    """
    named = [(name, next(part.parameters(recurse=False), None)) for name, part in module.named_modules() if name]
    own = [name for name, parameter in named if parameter is not None]
    if len(own) > most and blocks is not None:
        within = [f"{blocks}.{name}" for name, _ in module.get_submodule(blocks).named_children()]
        own = [name for name in own if not name.startswith(f"{blocks}.")] + within
    return [name for name in own if not any(name.startswith(f"{other}.") for other in own)]


def _swap(part: nn.Module, forward: Any) -> Any:
    """Replace `forward` and return the previous instance attribute (None: the class's own method)."""
    before = part.__dict__.get("forward")
    part.forward = forward
    return before


def _put_back(part: nn.Module, before: Any) -> None:
    if before is None:
        del part.forward
    else:
        part.forward = before


class _InFp32:
    """A layer's forward without autocast and with half-precision inputs cast to fp32; unchanged if autocast is off."""

    def __init__(self, forward: Any, kind: str) -> None:
        self._forward, self._kind = forward, kind

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_autocast_enabled(self._kind):
            return self._forward(*inputs, **named)
        with torch.autocast(self._kind, enabled=False):
            return self._forward(*_in_fp32(inputs), **_in_fp32(named))


class _InHalf:
    """A layer's forward under autocast, with outputs cast to fp32 for the rest of the model."""

    def __init__(self, forward: Any, kind: str, dtype: torch.dtype) -> None:
        self._forward, self._kind, self._dtype = forward, kind, dtype

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        with torch.autocast(self._kind, dtype=self._dtype):
            outputs = self._forward(*inputs, **named)
        return _in_fp32(outputs)


def _in_fp32(value: Any) -> Any:
    """Cast the half-precision tensors of a nested value to fp32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    return rebuild(value, _in_fp32)
