"""Weights that a new run starts from: whether they fit the model, and how they get into it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from torch import Tensor, nn

from raytrain.checkpoint.reader import part_tensors
from raytrain.errors import InputError
from raytrain.models.weights.headers import StoredWeights, find_weights

KEY = "model.init_from"
NAMED_AT_MOST = 5

Translate = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Tensors by the names of their file -> by the names that a module has for them."""

Shapes = Mapping[str, tuple[int, ...]]


class StartingWeights:
    """Weights for one model; `fill` puts them in, once.

    Args:
        stored: where they lie.
    """

    def __init__(self, stored: StoredWeights) -> None:
        self.stored = stored
        self.filled = False

    @classmethod
    def at(cls, path: str) -> StartingWeights:
        """Those at `path`. Raises InputError."""
        return cls(find_weights(path, key=KEY))

    def check(self, module: nn.Module, translate: Translate | None = None) -> None:
        """That names and shapes are the module's, which may be one on the meta device.

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
        """The weights into the module, cast to its dtypes; nothing where that was done before.

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
        names = _partners(module).items()
        given = {name: next(one for one in partners if one in state) for name, partners in names}
        module.load_state_dict({name: state[one] for name, one in given.items()})
        self.filled = True

    def read(self) -> dict[str, Tensor]:
        """All tensors, on the CPU, by the names of their files."""
        stored = self.stored
        with tempfile.TemporaryDirectory(prefix="raytrain-") as scratch:
            files = [stored.store.local_copy(file, scratch) for file in stored.files]
            return part_tensors(files, tied=dict(stored.aliases), split=list(stored.split), place=None)


def misfits(module: nn.Module, given: Shapes) -> dict[str, list[str]]:
    """What keeps weights of these names and shapes from being the module's: kind -> each in words.

    A tied weight may stand in the file under any one of its names.
    """
    own = module.state_dict()
    missing = [name for name, partners in _partners(module).items() if not any(one in given for one in partners)]
    unexpected = [name for name in given if name not in own]
    misshapen = [
        f"{name} {list(given[name])} for {list(own[name].shape)}"
        for name in own
        if name in given and given[name] != tuple(own[name].shape)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    return {kind: names for kind, names in kinds.items() if names}


def _partners(module: nn.Module) -> dict[str, list[str]]:
    """Each name of the module's state with all names of the same tensor, itself first."""
    own = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
    named: dict[int, list[str]] = {}
    for name, tensor in own.items():
        named.setdefault(tensor, []).append(name)
    return {name: [name, *(other for other in named[tensor] if other != name)] for name, tensor in own.items()}


def misfit(found: Mapping[str, list[str]], origin: str, *, key: str = KEY, remedy: str = "") -> InputError:
    """The one message for weights that do not fit: counts, and the first five of each kind."""
    told = []
    for kind, names in found.items():
        more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
        told.append(f"{len(names)} {kind} ({', '.join(names[:NAMED_AT_MOST])}{more})")
    return InputError(
        key,
        seen=f"{origin}: {'; '.join(told)}",
        expected="the names and shapes of this model",
        remedy=remedy or "they are of another model, or its sizes differ",
    )


def _shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


_OFFERED: ContextVar[StartingWeights | None] = ContextVar("starting_weights", default=None)


@contextlib.contextmanager
def offered(weights: StartingWeights | None) -> Iterator[None]:
    """While a builder runs: whoever takes parts out of the model it has built calls `fill_offered` before."""
    token = _OFFERED.set(weights)
    try:
        yield
    finally:
        _OFFERED.reset(token)


def fill_offered(module: nn.Module) -> None:
    """The weights that this run starts from into the whole module; nothing where there are none."""
    weights = _OFFERED.get()
    if weights is not None:
        weights.fill(module)
