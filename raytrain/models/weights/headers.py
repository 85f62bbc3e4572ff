"""Find weights to start from, and read the names and shapes of their tensors from safetensors headers. Torch-free."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raytrain.errors import InputError, first_line
from raytrain.runs.storage import Store, join, open_store, split

INDEX = "model.safetensors.index.json"
EXTRA = "extra_state"
VERSIONS = "versions"
"""Notes of a file about a module's state, as JSON: `StoredWeights.extra` and `.versions`."""
SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
EXPECTED = "a run folder, a checkpoint in one, a folder of transformers, or a safetensors file"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STEP = re.compile(r"step_\d{8,}")


@dataclass(frozen=True)
class StoredWeights:
    # store, files: the files, by their names inside the store
    store: Store
    files: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]  # tensor -> its shape, aliases included
    origin: str  # what the weights are, for messages
    # tensor -> the file that holds it (the last of them for a split tensor), aliases not included
    file_of: Mapping[str, str]
    # another name of a tensor (tied weights) -> the name that it is stored under
    aliases: Mapping[str, str] = field(default_factory=dict)
    split: tuple[str, ...] = ()  # tensors of which each file holds some rows, in the order of the files
    # stored tensor -> the name of its dtype in the format, such as BF16
    dtypes: Mapping[str, str] = field(default_factory=dict)
    # name of a module -> the version of its state, other than the first
    versions: Mapping[str, int] = field(default_factory=dict)
    # key of the state whose value is no tensor (`get_extra_state`) -> its skeleton, as `raytrain.checkpoint.snapshot`
    # makes them; the tensors inside it are in no other attribute
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Elements of all tensors; tied ones count once."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in self.aliases)


def find_weights(path: str, *, key: str) -> StoredWeights:
    """The weights at `path`: a run folder (its exported weights, else its latest complete checkpoint), a checkpoint
    folder, a folder that transformers' `save_pretrained` wrote (one file or several with an index), or one safetensors
    file. Raises InputError, naming `key`: it is none of these, or a file is missing or unreadable."""
    try:
        folder, name = split(path)
        if name.endswith(SUFFIX):
            store = open_store(folder)
            if store.exists(name):
                return _from_files(store, [name], origin=path, key=key)
            raise InputError(key, got=f"no file at {path}", expected=EXPECTED)
        store = open_store(path)
        if name == "latest" and not store.is_local and not store.entries("") and store.exists(""):
            # in an object store a file that holds the name of a folder
            store = open_store(join(folder, store.read_bytes("").decode().strip()))
        return _from_folder(store, path, key=key)
    except (OSError, ValueError) as error:
        raise InputError(key, got=f"{path}, which cannot be read: {first_line(error)}", expected=EXPECTED) from error


def _from_folder(store: Store, path: str, *, key: str) -> StoredWeights:
    names = [entry.name for entry in store.entries("")]
    if "weights" in names and store.exists(f"weights/model{SUFFIX}"):
        return _from_files(store, [f"weights/model{SUFFIX}"], origin=f"the exported weights of {path}", key=key)
    if "checkpoints" in names:
        steps = sorted(entry.name for entry in store.entries("checkpoints") if _STEP.fullmatch(entry.name))
        complete = [step for step in steps if store.exists(f"checkpoints/{step}/COMPLETE")]
        if complete:
            return _from_checkpoint(open_store(join(store.uri, f"checkpoints/{complete[-1]}")), key=key)
        seen = f"the run {path} without exported weights or a complete checkpoint"
        raise InputError(key, got=seen, expected=EXPECTED)
    if "COMPLETE" in names and "manifest.json" in names:
        return _from_checkpoint(store, key=key)
    if INDEX in names:
        file_of = json.loads(store.read_bytes(INDEX))["weight_map"]
        files = sorted(set(file_of.values()))
        for file in files:
            if file not in names:
                raise InputError(key, got=f"no {file} in {path}", expected=f"every file that {INDEX} names")
        found = _from_files(store, files, origin=path, key=key)
        for name, file in file_of.items():
            if name not in found.shapes:
                raise InputError(key, got=f"no tensor {name} in {path}", expected=f"it in {file}, as {INDEX} says")
        return found
    files = [f"model{SUFFIX}"] if f"model{SUFFIX}" in names else [name for name in names if name.endswith(SUFFIX)]
    if files:
        return _from_files(store, files, origin=path, key=key)
    pickles = [name for name in names if name.endswith(_PICKLE_SUFFIXES)]
    raise InputError(
        key,
        got=f"no weights in {path}" if names else f"nothing at {path}",
        expected=EXPECTED,
        remedy=f"{pickles[0]} may run code when it is read: save it as safetensors first" if pickles else "",
    )


def _from_checkpoint(store: Store, *, key: str) -> StoredWeights:
    manifest = json.loads(store.read_bytes("manifest.json"))
    if manifest.get("stacked"):
        raise InputError(
            key, got=f"the checkpoint {store.uri}, of which other processes hold a part in files of their own",
            expected=EXPECTED, remedy="`raytrain export RUN --step N` writes the complete weights",
        )  # fmt: skip
    split = tuple(manifest.get("split", {}).get("model", ()))
    found = _from_files(store, manifest["parts"]["model"], origin=f"the checkpoint {store.uri}", key=key, split=split)
    tied = manifest["tied"].get("model", {})
    shapes = {**found.shapes, **{alias: found.shapes[name] for alias, name in tied.items()}}
    stored = json.loads(store.read_bytes("state.json")) if store.exists("state.json") else {"parts": {}}
    model = stored["parts"].get("model", {}).get("dict", {})
    extra = {name: tree for name, tree in model.items() if tree != {"tensor": name}}
    versions = manifest.get("extra", {}).get(VERSIONS, {})
    return _without_inner(replace(found, shapes=shapes, aliases=tied, versions=versions), extra)


def _from_files(store: Store, files: list[str], *, origin: str, key: str, split: tuple[str, ...] = ()) -> StoredWeights:
    shapes: dict[str, tuple[int, ...]] = {}
    file_of: dict[str, str] = {}
    aliases: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    extra: dict[str, Any] = {}
    versions: dict[str, int] = {}
    for file in files:
        header = read_header(store, file, key=key)
        notes = header.pop("__metadata__", {})
        extra |= json.loads(notes.get(EXTRA, "{}"))
        versions |= json.loads(notes.get(VERSIONS, "{}"))
        for name, entry in header.items():
            shape = tuple(entry["shape"])
            if name in shapes and name in split:
                shape = (shapes[name][0] + shape[0], *shape[1:])
            elif name in shapes:
                seen = f"{name} in {file_of[name]} and in {file} of {origin}"
                raise InputError(key, got=seen, expected="each tensor in one file")
            shapes[name], file_of[name], dtypes[name] = shape, file, entry["dtype"]
        # safetensors' save_model notes tied weights like this, and so does `export_weights`
        aliases |= {alias: name for alias, name in notes.items() if alias not in header and name in header}
    shapes |= {alias: shapes[name] for alias, name in aliases.items()}
    return _without_inner(
        StoredWeights(store, tuple(files), shapes, origin, file_of, aliases, split, dtypes, versions), extra
    )


def _without_inner(found: StoredWeights, extra: Mapping[str, Any]) -> StoredWeights:
    """The weights with `extra`, whose tensors are no weights."""
    inner = {name for tree in extra.values() for name in _tensors_in(tree)}
    shapes = {name: shape for name, shape in found.shapes.items() if name not in inner}
    return replace(found, shapes=shapes, extra=extra)


def _tensors_in(skeleton: Any) -> Iterator[str]:
    for kind, content in skeleton.items() if isinstance(skeleton, dict) else ():
        if kind in ("tensor", "bytes", "array"):
            yield content["tensor"] if kind == "array" else content
        elif kind != "float":
            inner = content.values() if kind == "dict" else content
            for one in inner:
                yield from _tensors_in(one[1] if kind == "items" else one)


def read_header(store: Store, file: str, *, key: str) -> dict[str, Any]:
    """The JSON header of a safetensors file: name -> {"dtype", "shape", "data_offsets"}. Raises InputError: it is
    not a safetensors file."""
    path = os.path.join(store.uri, file)
    size = int.from_bytes(store.read_head(file, 8), "little")
    try:
        if not 0 < size <= MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(store.read_head(file, 8 + size)[8:])
        if not all(isinstance(entry["shape"], list) for name, entry in header.items() if name != "__metadata__"):
            raise ValueError("a header without shapes")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(key, got=f"{path}: {first_line(error)}", expected="a safetensors file") from error
    return header
