"""Stored weights: read one tensor at a time, exported for plain PyTorch, and loaded into a new run's model.

`StoredTensors` and `export_weights` are public. A run starts from such weights through `model.init_from`; what does not
fit is named.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from cluster.telemetry.processes import WORK
from raytrain.checkpoint.reader import part_tensors
from raytrain.checkpoint.safetensors import read_split, write_tensors
from raytrain.checkpoint.snapshot import flatten, split_tied, unflatten
from raytrain.config.messages import abbreviated
from raytrain.errors import InputError
from raytrain.models.weights.headers import EXTRA, VERSIONS, StoredWeights, find_weights
from raytrain.runs.storage import open_store, split

__all__ = ["StoredTensors", "export_weights"]


# ---------------------------------------------------------------- stored
# The tensors of stored weights: read one at a time or all together, and exported for plain PyTorch.


class StoredTensors(Mapping[str, Tensor]):
    """Name -> tensor on the CPU, read from its file on access. Tied weights have all their names.

    Args:
        stored: what `find_weights` returned, or a path for it.

    Raises:
        InputError: as `find_weights`; on access, a file that cannot be read.

    Example:
        >>> from raytrain.models.weights.stored import StoredTensors
        >>> tensors = StoredTensors("runs/latest/weights")
        >>> sorted(tensors)[:2], tensors["layers.0.weight"].shape
        (['layers.0.bias', 'layers.0.weight'], torch.Size([8, 3]))
        >>> tensors.read_all().keys() == tensors.keys()  # all at once
        True
    """

    def __init__(self, stored: StoredWeights | str | os.PathLike[str]) -> None:
        if not isinstance(stored, StoredWeights):
            stored = find_weights(os.fspath(stored), key=os.fspath(stored))
        self.stored = stored
        self._opened: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        name = self.stored.aliases.get(name, name)
        if name in self.stored.split:
            return read_split(list(self._paths.values()), [name], None)[name]
        WORK.add()
        file = self.stored.file_of[name]
        if file not in self._opened:
            path = self._paths[file]
            try:
                self._opened[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(path, got=str(error), expected="a safetensors file") from error
        return self._opened[file].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored.shapes)

    def __len__(self) -> int:
        return len(self.stored.shapes)

    def read_all(self) -> dict[str, Any]:
        """The state of the module: every tensor, copied out of the files (names of one tied weight share one), and what
        its `get_extra_state` returned."""
        paths, about = list(self._paths.values()), self.stored
        tensors = part_tensors(paths, tied=dict(about.aliases), split=list(about.split), place=None)
        extra = {key: unflatten(tensors, tree) for key, tree in about.extra.items()}
        found = OrderedDict({name: tensors[name] for name in about.shapes} | extra)
        found._metadata = {name: {"version": version} for name, version in about.versions.items()}  # pyright: ignore
        return found

    @cached_property
    def _paths(self) -> dict[str, str]:
        store, scratch = self.stored.store, ""
        if not store.is_local:
            scratch = tempfile.mkdtemp(prefix="raytrain-")
            weakref.finalize(self, shutil.rmtree, scratch, ignore_errors=True)
        return {file: store.local_copy(file, scratch) for file in self.stored.files}


def as_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A module's state_dict as tensors by name, and as metadata of their file what is no tensor: extra state, and the
    versions of modules, by which they convert an older state. Raises CheckpointError: it holds what cannot be saved."""
    tensors, skeleton = flatten(dict(state))
    extra = {key: tree for key, tree in skeleton["dict"].items() if tree != {"tensor": key}}
    notes = {EXTRA: extra, VERSIONS: versions_of(state)}
    first = {
        key: tensors[key] for key in state if key not in extra
    }  # a weight that an extra state holds too is a weight
    return first | tensors, {name: json.dumps(note) for name, note in notes.items() if note}


def versions_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Name of a module -> the version of its state, other than the first."""
    found = {name: about.get("version", 1) for name, about in getattr(state, "_metadata", {}).items()}
    return {name: version for name, version in found.items() if version != 1}


def export_weights(module_state: Mapping[str, Any], path: str, *, metadata: Mapping[str, str] | None = None) -> None:
    """Write weights for plain PyTorch, as `safetensors.torch.load_model(model, path)` reads them.

    Tied weights are written once. On a local path the file appears complete or not at all. What `get_extra_state`
    returned is kept too, and `load_model`, which knows tensors only, refuses such a file: read it with
    `module.load_state_dict(StoredTensors(path).read_all())`.

    Args:
        module_state: a module's state_dict, on any device.
        path: local path or URI of the file.
        metadata: text that is stored with the tensors.

    Raises:
        RunError: the file cannot be written.
        CheckpointError: a dtype that safetensors does not have, or an extra state that is not made of tensors, numbers,
            strings, and lists, tuples and dicts of them.

    Example:
        >>> import torch
        >>> from raytrain.models.weights.stored import export_weights
        >>> from safetensors.torch import load_model
        >>> net, copy = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        >>> export_weights(net.state_dict(), "net.safetensors")
        >>> load_model(copy, "net.safetensors")
        (set(), [])
        >>> torch.equal(copy.weight, net.weight)
        True
    """
    folder, name = split(path)
    store = open_store(folder)
    tensors, about = as_tensors(module_state)
    distinct, tied = split_tied(tensors)
    on_cpu = {key: tensor.cpu() for key, tensor in distinct.items()}
    # The aliases are noted as safetensors' own save_model does; transformers asks for the format.
    notes = {**(metadata or {}), **tied, **about, "format": "pt"}
    partial = f".{name}.tmp" if store.is_local else name
    with store.open_write(partial) as file:
        write_tensors(file, on_cpu, metadata=notes)
    if store.is_local:
        os.replace(f"{store.uri}/{partial}", f"{store.uri}/{name}")


# ---------------------------------------------------------------- initial
# Weights that a new run starts from: check that they fit the model, and load them into it.


KEY = "model.init_from"
NAMED_AT_MOST = 5

Translate = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Renames tensors from the names in their file to the names in a module."""

Shapes = Mapping[str, tuple[int, ...]]


class StartingWeights:
    """Weights for one model; `fill` loads them once. `stored`: where they are."""

    def __init__(self, stored: StoredWeights | str) -> None:
        self.stored = find_weights(stored, key=KEY) if isinstance(stored, str) else stored

    def check(self, module: nn.Module, translate: Translate | None = None) -> None:
        """Check that names and shapes are those of the module, which may be on the meta device. Raises InputError:
        with the counts and the first five of what does not fit."""
        shapes = self.stored.shapes
        if translate is not None and misfits(module, shapes):
            read = StoredTensors(self.stored).read_all()
            shapes = _shapes_of(_named(module, _without_extra(read), translate))
        found = misfits(module, shapes)
        if found:
            raise misfit(found, self.stored.origin)

    def fill(self, module: nn.Module, translate: Translate | None = None) -> None:
        """Load the weights into the module, cast to its dtypes; later calls do nothing. Raises InputError: as
        `check`."""
        read = StoredTensors(self.stored).read_all()
        state = _without_extra(read)
        if translate is not None and misfits(module, _shapes_of(state)):
            state = _named(module, state, translate)
        found = misfits(module, _shapes_of(state))
        if found:
            raise misfit(found, self.stored.origin)
        stored_name = {name: next(one for one in names if one in state) for name, names in _tied_names(module).items()}
        # what `set_extra_state` gets: what it holds now if the file has none at all, as those of other libraries
        extra, given = (
            {name: value for name, value in one.items() if is_extra(name, value)} for one in (module.state_dict(), read)
        )
        kinds = {"missing": extra.keys() - given.keys(), "unexpected": given.keys() - extra.keys()}
        found = {kind: sorted(names) for kind, names in kinds.items() if names}
        if given and found:
            raise misfit(found, self.stored.origin)
        extra |= given
        named = OrderedDict({name: state[stored] for name, stored in stored_name.items()} | extra)
        named._metadata = getattr(read, "_metadata", {})  # pyright: ignore[reportAttributeAccessIssue]
        module.load_state_dict(named)
        self.filled = True


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
