"""Lets pickle send what torch refuses or breaks: parametrized modules, and tensors of the newer dtypes.

Torch gives each parametrized module (weight_norm, spectral_norm, orthogonal, a user's own) a class of its own, made at
run time, whose instances refuse to be pickled.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

#: Dtypes whose tensors torch pickles but does not read again, as their storages have no type -> one of the same size.
_SENT_AS = {
    torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8, torch.float8_e8m0fnu: torch.int8,
}  # fmt: skip


def make_sendable(module: nn.Module) -> None:
    """Let pickle send a module, with its parametrized parts as such."""
    for part in module.modules():
        if parametrize.is_parametrized(part) and "__getstate__" in vars(type(part)):
            copyreg.pickle(type(part), _reduced)  # pyright: ignore[reportArgumentType]  (of six values, as pickle takes)
    if any(tensor.dtype in _SENT_AS for tensor in (*module.parameters(), *module.buffers())):
        copyreg.pickle(Tensor, _reduced_tensor)  # pyright: ignore[reportArgumentType]


def _reduced(part: Any) -> tuple[Any, ...]:
    """Begins with a bare object of the original class: what refers back to it, such as a hook, finds it."""
    original: Any = type(part).__bases__[0]
    state = original.__getstate__(part), list(part.parametrizations)
    return object.__new__, (original,), state, None, None, _set


def _set(part: Any, state: tuple[Any, list[str]]) -> None:
    held, names = state
    part.__setstate__(held)
    parametrize._inject_new_class(part)
    for name in names:
        parametrize._inject_property(part, name)


def _reduced_tensor(tensor: Tensor) -> Any:
    sent_as = _SENT_AS.get(tensor.dtype)
    return tensor.__reduce_ex__(5) if sent_as is None else (Tensor.view, (tensor.view(sent_as), tensor.dtype))
