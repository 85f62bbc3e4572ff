"""Weights that a new run starts from: check that they fit the model, and load them into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

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
            shapes = _shapes_of(translate(self.read()))
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
        state = self.read()
        if translate is not None and misfits(module, _shapes_of(state)):
            state = translate(state)
        found = misfits(module, _shapes_of(state))
        if found:
            raise misfit(found, self.stored.origin)
        stored_name = {name: next(one for one in names if one in state) for name, names in _tied_names(module).items()}
        module.load_state_dict({name: state[stored] for name, stored in stored_name.items()})
        self.filled = True

    def read(self) -> dict[str, Tensor]:
        """All tensors, on the CPU, by the names in their files."""
        return StoredTensors(self.stored).read_all()


def misfits(module: nn.Module, given: Shapes) -> dict[str, list[str]]:
    """Why weights of these names and shapes do not fit the module: kind ("missing", ...) -> a text for each tensor.

    The file may hold a tied weight under any of its names.
    """
    own = module.state_dict()
    missing = [name for name, names in _tied_names(module).items() if not any(one in given for one in names)]
    unexpected = [name for name in given if name not in own]
    misshapen = [
        f"{name} {list(given[name])} for {list(own[name].shape)}"
        for name in own
        if name in given and given[name] != tuple(own[name].shape)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    return {kind: names for kind, names in kinds.items() if names}


def _tied_names(module: nn.Module) -> dict[str, list[str]]:
    """Each name in the module's state -> all names of the same tensor, itself first."""
    own = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
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
