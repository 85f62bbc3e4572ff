"""Where weights to start from lie, and what their safetensors headers say of them. Torch-free, nothing but headers is
read."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raytrain.errors import InputError, first_line
from raytrain.runs.storage import Store, open_store

INDEX = "model.safetensors.index.json"
SUFFIX = ".safetensors"
MOST_HEADER_BYTES = 100 * 2**20  # the format's own limit
KINDS = "a run folder, a checkpoint in one, a folder of transformers, or a safetensors file"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_STEP = re.compile(r"step_\d{8,}")


@dataclass(frozen=True)
class StoredWeights:
    """Weights on a disk.

    Attributes:
        store, files: the safetensors files; a name inside the store.
        shapes: tensor -> its shape, aliases included.
        aliases: another name of a tensor (tied weights) -> the name it stands under.
        origin: what they are, for people.
        split: tensors of which each file holds some rows, in the order of the files.
    """

    store: Store
    files: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    origin: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    split: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Numbers in all tensors, tied ones once."""
        return sum(math.prod(shape) for name, shape in self.shapes.items() if name not in self.aliases)


def find_weights(path: str, *, key: str) -> StoredWeights:
    """What `path` holds.

    Args:
        path: a run folder (its exported weights, else its newest whole checkpoint), a checkpoint folder, a folder that
            transformers' `save_pretrained` wrote (one file or several with an index), or one safetensors file.
        key: what errors name.
    Raises:
        InputError: none of these, or a file that is missing or unreadable.
    """
    try:
        if path.endswith(SUFFIX):
            folder, _, name = path.rstrip("/").rpartition("/")
            store = open_store(folder or ".")
            if store.exists(name):
                return _of_files(store, [name], origin=path, key=key)
            raise InputError(key, seen=f"no file at {path}", expected=KINDS)
        return _of_folder(_followed(path), path, key=key)
    except (OSError, ValueError) as error:
        raise InputError(key, seen=f"{path}, which cannot be read: {first_line(error)}", expected=KINDS) from error


def _followed(path: str) -> Store:
    """The folder; `latest` of an object store is a file with the name of another."""
    store = open_store(path)
    if path.rstrip("/").endswith("latest") and not store.is_local and not store.entries("") and store.exists(""):
        return open_store(f"{path.rstrip('/').rpartition('/')[0]}/{store.read_bytes('').decode().strip()}")
    return store


def _of_folder(store: Store, path: str, *, key: str) -> StoredWeights:
    names = [entry.name for entry in store.entries("")]
    if "weights" in names and store.exists(f"weights/model{SUFFIX}"):
        return _of_files(store, [f"weights/model{SUFFIX}"], origin=f"the exported weights of {path}", key=key)
    if "checkpoints" in names:
        steps = sorted(entry.name for entry in store.entries("checkpoints") if _STEP.fullmatch(entry.name))
        whole = [step for step in steps if store.exists(f"checkpoints/{step}/COMPLETE")]
        if whole:
            return _of_checkpoint(open_store(f"{store.uri}/checkpoints/{whole[-1]}"), key=key)
        seen = f"the run {path} without exported weights or a whole checkpoint"
        raise InputError(key, seen=seen, expected=KINDS)
    if "COMPLETE" in names and "manifest.json" in names:
        return _of_checkpoint(store, key=key)
    if INDEX in names:
        listed = json.loads(store.read_bytes(INDEX))["weight_map"]
        missing = sorted(set(listed.values()) - set(names))
        if missing:
            raise InputError(key, seen=f"no {missing[0]} in {path}", expected=f"each file that its {INDEX} names")
        return _of_files(store, sorted(set(listed.values())), origin=path, key=key)
    files = [f"model{SUFFIX}"] if f"model{SUFFIX}" in names else [name for name in names if name.endswith(SUFFIX)]
    if files:
        return _of_files(store, files, origin=path, key=key)
    pickles = [name for name in names if name.endswith(_PICKLES)]
    raise InputError(
        key,
        seen=f"no weights in {path}" if names else f"nothing at {path}",
        expected=KINDS,
        remedy=f"{pickles[0]} may run code when it is read: save it as safetensors first" if pickles else "",
    )


def _of_checkpoint(store: Store, *, key: str) -> StoredWeights:
    manifest = json.loads(store.read_bytes("manifest.json"))
    split = tuple(manifest.get("split", {}).get("model", ()))
    found = _of_files(store, manifest["parts"]["model"], origin=f"the checkpoint {store.uri}", key=key, split=split)
    tied = manifest["tied"].get("model", {})
    shapes = {**found.shapes, **{alias: found.shapes[name] for alias, name in tied.items()}}
    return replace(found, shapes=shapes, aliases=tied)


def _of_files(store: Store, files: list[str], *, origin: str, key: str, split: tuple[str, ...] = ()) -> StoredWeights:
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    for file in files:
        header = read_header(store, file, key=key)
        notes = header.pop("__metadata__", {})
        for name, entry in header.items():
            shape = tuple(entry["shape"])
            if name in shapes and name in split:
                shape = (shapes[name][0] + shape[0], *shape[1:])
            elif name in shapes:
                raise InputError(key, seen=f"{name} in two files of {origin}", expected="each tensor in one file")
            shapes[name] = shape
        # what safetensors' save_model notes of tied weights, and our own export with it
        aliases |= {alias: name for alias, name in notes.items() if alias not in header and name in header}
    shapes |= {alias: shapes[name] for alias, name in aliases.items()}
    return StoredWeights(store, tuple(files), shapes, origin, aliases, split)


def read_header(store: Store, file: str, *, key: str) -> dict[str, Any]:
    """The JSON header of a safetensors file: name -> {"dtype", "shape", "data_offsets"}.

    Raises:
        InputError: it is none.
    """
    where = os.path.join(store.uri, file)
    size = int.from_bytes(store.read_head(file, 8), "little")
    try:
        if not 0 < size <= MOST_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(store.read_head(file, 8 + size)[8:])
        if not all(isinstance(entry["shape"], list) for name, entry in header.items() if name != "__metadata__"):
            raise ValueError("no shapes in it")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(key, seen=f"{where}: {first_line(error)}", expected="a safetensors file") from error
    return header
