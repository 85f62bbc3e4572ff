"""Weights that a new run starts from: check that they fit the model, and load them into it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from raytrain.config.messages import abbreviated
from raytrain.errors import InputError
from raytrain.models.weights.headers import StoredWeights, find_weights
from raytrain.models.weights.stored import StoredTensors

KEY = "model.init_from"
NAMED_AT_MOST = 5

Translate = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Renames tensors from the names in their file to the names in a module."""

Shapes = Mapping[str, tuple[int, ...]]


class StartingWeights:
    """Weights for one model; `fill` loads them once.

    Args:
        stored: where they are.
    """

    def __init__(self, stored: StoredWeights) -> None:
        self.stored = stored
        self.filled = False

    @classmethod
    def at(cls, path: str) -> StartingWeights:
        """The weights at `path`. Raises InputError."""
        return cls(find_weights(path, key=KEY))

    def check(self, module: nn.Module, translate: Translate | None = None) -> None:
        """Check that names and shapes are those of the module, which may be on the meta device.

        Raises:
            InputError: with the counts and the first five of what does not fit.
        """
        shapes = self.stored.shapes
        if translate is not None and misfits(module, shapes):
            shapes = _shapes_of(_named(module, _without_extra(self.read()), translate))
        found = misfits(module, shapes)
        if found:
            raise misfit(found, self.stored.origin)

    def fill(self, module: nn.Module, translate: Translate | None = None) -> None:
        """Load the weights into the module, cast to its dtypes; later calls do nothing.

        Raises:
            InputError: as `check`.
        """
        if self.filled:
            return
        read = self.read()
        state = _without_extra(read)
        if translate is not None and misfits(module, _shapes_of(state)):
            state = _named(module, state, translate)
        found = misfits(module, _shapes_of(state))
        if found:
            raise misfit(found, self.stored.origin)
        stored_name = {name: next(one for one in names if one in state) for name, names in _tied_names(module).items()}
        extra = self._extra(module, {name: value for name, value in read.items() if is_extra(name, value)})
        named = OrderedDict({name: state[stored] for name, stored in stored_name.items()} | extra)
        named._metadata = getattr(read, "_metadata", {})  # pyright: ignore[reportAttributeAccessIssue]
        module.load_state_dict(named)
        self.filled = True

    def _extra(self, module: nn.Module, read: Mapping[str, Any]) -> dict[str, Any]:
        """What `set_extra_state` gets: what it holds now if the file has none at all, as those of other libraries."""
        own = {name: value for name, value in module.state_dict().items() if is_extra(name, value)}
        kinds = {"missing": own.keys() - read.keys(), "unexpected": read.keys() - own.keys()}
        found = {kind: sorted(names) for kind, names in kinds.items() if names}
        if read and found:
            raise misfit(found, self.stored.origin)
        return own | dict(read)

    def read(self) -> dict[str, Any]:
        """All tensors, on the CPU, by the names in their files, and the extra state of modules."""
        return StoredTensors(self.stored).read_all()


def is_extra(name: str, value: Any) -> bool:
    """Whether an entry of a module's state is no weight: what `get_extra_state` returned, be it a tensor of any shape,
    or what a hook of its state_dict added."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX or not isinstance(value, Tensor)


def _without_extra(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if not is_extra(name, value)}


def _named(module: nn.Module, state: dict[str, Tensor], translate: Translate) -> dict[str, Tensor]:
    """A state under the names of the module, which may wrap the model that the state belongs to."""
    translated = translate(state)
    own, first = module.state_dict(), next(iter(translated), "")
    prefix = next((name.removesuffix(first) for name in own if name.endswith(f".{first}")), "")
    wrapped = {prefix + name: tensor for name, tensor in translated.items()}
    return translated if misfits(module, _shapes_of(wrapped)) else wrapped


def misfits(module: nn.Module, given: Shapes) -> dict[str, list[str]]:
    """Why weights of these names and shapes do not fit the module: kind ("missing", ...) -> a text for each tensor.

    The file may hold a tied weight under any of its names.
    """
    own = _without_extra(module.state_dict())
    missing = [name for name, names in _tied_names(module).items() if not any(one in given for one in names)]
    unexpected = [name for name in given if name not in own and name.rpartition(".")[2] != _EXTRA_STATE_KEY_SUFFIX]
    misshapen = [
        f"{name} {list(given[name])} for {list(own[name].shape)}"
        for name in own
        if name in given and given[name] != tuple(own[name].shape)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    return {kind: names for kind, names in kinds.items() if names}


def _tied_names(module: nn.Module) -> dict[str, list[str]]:
    """Each name in the module's state -> all names of the same tensor, itself first."""
    own = {name: id(tensor) for name, tensor in _without_extra(module.state_dict(keep_vars=True)).items()}
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in own.items():
        by_tensor.setdefault(tensor, []).append(name)
    return {name: [name, *(other for other in by_tensor[tensor] if other != name)] for name, tensor in own.items()}


def misfit(found: Mapping[str, list[str]], origin: str, *, key: str = KEY, remedy: str = "") -> InputError:
    """The error for weights that do not fit: counts, and the first five tensors of each kind."""
    kinds = [f"{len(names)} {kind} ({abbreviated(names, NAMED_AT_MOST)})" for kind, names in found.items()]
    return InputError(
        key,
        got=f"{origin}: {'; '.join(kinds)}",
        expected="the names and shapes of this model",
        remedy=remedy or "the weights belong to another model or to other sizes",
    )


def _shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
