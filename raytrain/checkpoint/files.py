"""Writes a snapshot as the files of a checkpoint, in the order that `raytrain.checkpoint.writer` describes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from raytrain.checkpoint.reader import COMPLETE, MANIFEST, STATE
from raytrain.checkpoint.safetensors import SHARD_BYTES, HashingStream, WrittenFile, shards, write_tensors
from raytrain.checkpoint.snapshot import Snapshot
from raytrain.runs.storage import Store


def write_checkpoint(
    store: Store,
    snapshot: Snapshot,
    about: Mapping[str, Any],
    *,
    fence: Callable[[], None] = lambda: None,
    shard_bytes: int = SHARD_BYTES,
    others: Callable[[], dict[str, Any]] | None = None,
) -> int:
    """Writes a snapshot into the empty directory `store`; returns the bytes written.

    Args:
        about: the manifest's fields that describe the run.
        fence: called before every file; raises to stop, and then there is no COMPLETE.
        others: waits for the files of other processes; returns {"files": ..., "parts": their files of our parts, and
            more fields for the manifest}.
    """
    files, parts = write_parts(store, snapshot.tensors, fence=fence, shard_bytes=shard_bytes)
    files[STATE] = _write_json(store, STATE, {"state": snapshot.state, "parts": snapshot.skeletons}, fence)
    more = others() if others is not None else {}
    files |= more.pop("files", {})
    for part, names in more.pop("parts", {}).items():
        parts[part] += names
    if snapshot.split:
        more["split"] = snapshot.split
    described = {name: asdict(written) for name, written in files.items()}
    manifest = {**about, "parts": parts, "tied": snapshot.tied, **more, "files": described}
    sealed = _write_json(store, MANIFEST, manifest, fence)
    store.sync_dir("")
    fence()
    store.write_bytes(COMPLETE, f"{sealed.sha256}\n".encode())
    store.sync_dir("")
    return sum(written.bytes for written in files.values()) + sealed.bytes


def write_parts(
    store: Store, tensors: Mapping[str, Mapping[str, Tensor]], *, fence: Callable[[], None], shard_bytes: int,
    suffix: str = "",
) -> tuple[dict[str, WrittenFile], dict[str, list[str]]]:  # fmt: skip
    """Writes part -> name -> tensor; the files, and their names by part. `suffix` follows the part in the names."""
    files: dict[str, WrittenFile] = {}
    parts: dict[str, list[str]] = {}
    for part, named in tensors.items():
        pieces = list(shards(named, shard_bytes=shard_bytes))
        parts[part] = []
        for index, piece in enumerate(pieces, start=1):
            number = f"-{index:05d}-of-{len(pieces):05d}" if len(pieces) > 1 else ""
            name = f"{part}{suffix}{number}.safetensors"
            fence()
            with store.open_write(name) as file:
                files[name] = write_tensors(file, piece)
            parts[part].append(name)
    return files, parts


def _write_json(store: Store, name: str, value: Any, fence: Callable[[], None]) -> WrittenFile:
    fence()
    with store.open_write(name) as file:
        stream = HashingStream(file)
        stream.write(json.dumps(value, allow_nan=False).encode())
    return stream.written()
