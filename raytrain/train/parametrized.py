"""Makes parametrized modules (torch's weight_norm, spectral_norm, orthogonal, and a user's own) able to be pickled.

Torch gives each of them a class of its own, made at run time, whose instances refuse it.
"""

from __future__ import annotations

import copyreg
from typing import Any

from torch import nn
from torch.nn.utils import parametrize


def make_sendable(module: nn.Module) -> None:
    """Let pickle send every parametrized part of a module; it arrives parametrized in the same way."""
    for part in module.modules():
        if parametrize.is_parametrized(part) and "__getstate__" in vars(type(part)):
            copyreg.pickle(type(part), _reduced)  # pyright: ignore[reportArgumentType]  (of six values, as pickle takes)


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
