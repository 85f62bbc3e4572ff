"""The tensors of stored weights: read one at a time or all together, and exported for plain PyTorch."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from cluster.telemetry.work import WORK
from raytrain.checkpoint.reader import part_tensors
from raytrain.checkpoint.safetensors import write_tensors
from raytrain.checkpoint.sharded import read_split
from raytrain.checkpoint.snapshot import flatten, split_tied, unflatten
from raytrain.errors import InputError
from raytrain.models.weights.headers import EXTRA, VERSIONS, StoredWeights, find_weights
from raytrain.runs.storage import open_store, split

__all__ = ["StoredTensors", "export_weights"]


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
        return self._open(self.stored.file_of[name]).get_tensor(name)

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

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self._paths[file]
            try:
                self._opened[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(path, got=str(error), expected="a safetensors file") from error
        return self._opened[file]


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
