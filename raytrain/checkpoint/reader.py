"""Lists, verifies and loads checkpoints, and joins the complete weights of one, whichever processes wrote them.

`--resume`, rollback, `export` and weights to start from use it; it reads nothing whose checksum is wrong.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from raytrain.checkpoint.safetensors import CHUNK_BYTES, ShardPosition, read_split, read_tensors, sha256_of
from raytrain.checkpoint.snapshot import unflatten
from raytrain.errors import CheckpointError, mismatch
from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import Store, join, open_store

__all__ = ["best_checkpoint", "list_checkpoints", "load", "newest_valid", "read_weights"]


FORMAT = 1
COMPLETE = "COMPLETE"
MANIFEST = "manifest.json"
STATE = "state.json"

_STEP_DIR = re.compile(r"step_(\d{8,})")
_PICKLE_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".distcp", ".metadata")
_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint directory; `complete` says that COMPLETE exists, not that the content is valid."""

    step: int
    path: str
    complete: bool


@dataclass
class LoadedCheckpoint:
    """A verified checkpoint. `parts` holds the nested states as saved, with tensors on the CPU."""

    step: int
    parts: dict[str, Any]
    state: dict[str, Any]
    manifest: dict[str, Any]
    path: str


class NewestValid(NamedTuple):
    """`checkpoint` is None if no valid one exists; `refused` says why newer ones were skipped."""

    checkpoint: LoadedCheckpoint | None
    refused: list[str]


def list_checkpoints(run: RunFolder) -> list[CheckpointInfo]:
    """Every checkpoint directory of the run, oldest step first.

    Example:
        >>> from raytrain.checkpoint.reader import list_checkpoints
        >>> from raytrain.runs.folder import RunFolder
        >>> [(info.step, info.complete) for info in list_checkpoints(RunFolder.open("runs/latest"))]
        [(2, True)]
    """
    found = []
    store = open_store(run.checkpoints_dir)
    for entry in store.entries(""):
        match = _STEP_DIR.fullmatch(entry.name)
        if match and entry.is_dir:
            step = int(match[1])
            complete = store.exists(f"{entry.name}/{COMPLETE}")
            found.append(CheckpointInfo(step=step, path=run.checkpoint_dir(step), complete=complete))
    return sorted(found, key=lambda info: info.step)


def read_manifest(path: str) -> dict[str, Any]:
    return json.loads(open_store(path).read_bytes(MANIFEST))


def eval_loss_of(info: CheckpointInfo) -> float | None:
    """The eval loss in the manifest of a checkpoint; None if it has none or cannot be read."""
    try:
        value = read_manifest(info.path).get("eval_loss")
    except (OSError, ValueError, AttributeError):
        return None
    return float(value) if isinstance(value, (int, float)) else None


def best_checkpoint(infos: list[CheckpointInfo]) -> CheckpointInfo | None:
    """The complete checkpoint with the lowest eval loss, the first of equals; None if none has an eval loss.

    Example:
        >>> from raytrain.checkpoint.reader import best_checkpoint, list_checkpoints
        >>> from raytrain.runs.folder import RunFolder
        >>> best_checkpoint(list_checkpoints(RunFolder.open("runs/latest"))).step
        2
    """
    scored = [(eval_loss_of(info), info) for info in infos if info.complete]
    rated = [(loss, info.step, info) for loss, info in scored if loss is not None]
    return min(rated, key=lambda row: row[:2])[2] if rated else None


def newest_valid(run: RunFolder, *, place: ShardPosition | None = None) -> NewestValid:
    """Loads the latest valid checkpoint (`place` as in `load`); invalid ones are skipped and their reasons returned.

    Errors: OSError if one could not be read, which says nothing about the checkpoint.

    Example:
        >>> from raytrain.checkpoint.reader import newest_valid
        >>> from raytrain.runs.folder import RunFolder
        >>> found = newest_valid(RunFolder.open("runs/latest"))
        >>> found.checkpoint.step, found.refused
        (2, [])
    """
    refused = []
    for info in reversed(list_checkpoints(run)):
        try:
            return NewestValid(load(info.path, place=place), refused)
        except CheckpointError as error:
            refused.append(str(error))
    return NewestValid(None, refused)


def load(path: str, *, check_hashes: bool = True, place: ShardPosition | None = None) -> LoadedCheckpoint:
    """Verifies and loads a checkpoint (a local path or a URI).

    Args:
        check_hashes: False where another process of this run has just verified the same path.
        place: the worker whose rows of split tensors are loaded; None = all rows.

    Errors: CheckpointError naming the file and what is wrong with it; OSError where it could not be read.

    Example:
        >>> from raytrain.checkpoint.reader import load
        >>> checkpoint = load("runs/latest/checkpoints/step_00000002")
        >>> checkpoint.step, checkpoint.parts["model"]["layers.0.weight"].shape
        (2, torch.Size([8, 3]))
    """
    with _opened(path, hashes=check_hashes) as (manifest, files, stored):
        parts = {part: _part(part, manifest, files, stored, place) for part in stored["parts"]}
        return LoadedCheckpoint(manifest["step"], parts, unflatten({}, stored["state"]), manifest, open_store(path).uri)


@contextlib.contextmanager
def _opened(path: str, *, hashes: bool) -> Iterator[tuple[dict[str, Any], dict[str, str], dict[str, Any]]]:
    """The manifest, the local path of every file, and what state.json holds. Raises CheckpointError for what is wrong
    with them, also inside."""
    with named_files(path), tempfile.TemporaryDirectory(prefix="raytrain-") as scratch:
        manifest, files = checked_files(open_store(path), scratch, hashes=hashes)
        try:
            with open(files[STATE], "rb") as file:
                stored = json.load(file)
            yield manifest, files, stored
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path}: not understood ({type(error).__name__}: {error})") from error


def _part(
    part: str, manifest: dict[str, Any], files: dict[str, str], stored: dict[str, Any], place: ShardPosition | None
) -> Any:
    tensors = part_tensors(
        [files[name] for name in manifest["parts"][part]],
        tied=manifest["tied"].get(part, {}),
        split=manifest.get("split", {}).get(part, []),
        place=place,
    )
    return unflatten(tensors, stored["parts"][part])


@contextlib.contextmanager
def named_files(path: str) -> Iterator[None]:
    """Turns a missing file, or a directory in its place, into CheckpointError; other read errors may be transient."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise CheckpointError(f"{path}: a file of it is missing ({error})") from error


def part_tensors(
    files: list[str], *, tied: dict[str, str], split: list[str], place: ShardPosition | None
) -> dict[str, Tensor]:
    """The tensors of a part. Each worker wrote its rows of the split tensors; `files` are in rank order."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(read_tensors(file, without=split))
    if split:
        tensors.update(read_split(files, split, place))
    tensors.update({alias: tensors[name] for alias, name in tied.items()})
    return tensors


def check(path: str, *, hash_up_to: int = 0) -> None:
    """Check that a checkpoint can be loaded, without loading it: its manifest, the sizes of its files, and what is in
    them if they are local and have at most `hash_up_to` bytes together. Errors: as `load`."""
    store = open_store(path)
    with named_files(path):
        manifest = _checked_listing(store)
        if store.is_local and sum(row["bytes"] for row in manifest["files"].values()) <= hash_up_to:
            checked_files(store, "", hashes=True)  # a local store makes no copies


def checked_files(store: Store, scratch: str, *, hashes: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """The manifest, and file name -> local path of every file in it, all as the manifest describes them."""
    manifest = _checked_listing(store)
    files = {}
    for name, wanted in manifest["files"].items():
        files[name] = store.local_copy(name, scratch)
        if hashes and sha256_of(_pieces(files[name])) != wanted["sha256"]:
            raise CheckpointError(f"{join(store.uri, name)}: damaged, its SHA-256 is not that of the manifest")
    return manifest, files


def _checked_listing(store: Store) -> dict[str, Any]:
    """The manifest, which names every file in the folder with its size."""
    # NFS leaves `.nfs*` names behind for deleted files that somebody still has open.
    entries = {entry.name: entry for entry in store.entries("") if not entry.name.startswith(".nfs")}
    if not entries:
        raise CheckpointError(f"{store.uri}: no checkpoint there")
    for name, entry in entries.items():
        if looks_like_pickle(name, b"" if entry.is_dir else store.read_head(name, 16)):
            raise CheckpointError(
                f"{join(store.uri, name)}: looks like a pickle, which can run code when it is read; refused unread"
            )
    manifest = _checked_manifest(store, set(entries))
    listed = manifest["files"]
    extra = sorted(set(entries) - set(listed) - {MANIFEST, COMPLETE})
    if extra:
        raise CheckpointError(f"{join(store.uri, extra[0])}: not in the manifest")
    for name, wanted in listed.items():
        if name not in entries:
            raise CheckpointError(f"{join(store.uri, name)}: missing")
        if entries[name].size != wanted["bytes"]:
            got = f"{entries[name].size} bytes"
            sizes = mismatch(join(store.uri, name), got=got, expected=str(wanted["bytes"]))
            raise CheckpointError(f"{sizes}; the file is damaged")
    return manifest


def _checked_manifest(store: Store, names: set[str]) -> dict[str, Any]:
    if COMPLETE not in names:
        raise CheckpointError(f"{join(store.uri, COMPLETE)}: missing, the writer was stopped before it finished")
    if MANIFEST not in names:
        raise CheckpointError(f"{join(store.uri, MANIFEST)}: missing")
    data = store.read_bytes(MANIFEST)
    if store.read_bytes(COMPLETE).decode(errors="replace").strip() != sha256_of([data]):
        raise CheckpointError(f"{join(store.uri, MANIFEST)}: damaged, its SHA-256 is not that of COMPLETE")
    try:
        manifest = json.loads(data)
        version, listed = manifest["format"], manifest["files"]
        well_formed = STATE in listed and all(
            isinstance(row["bytes"], int) and isinstance(row["sha256"], str) for row in listed.values()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{join(store.uri, MANIFEST)}: not understood ({error})") from error
    if version != FORMAT or not well_formed:
        raise CheckpointError(f"{join(store.uri, MANIFEST)}: format {version}, this version reads {FORMAT}")
    for name in listed:
        if "/" in name or "\\" in name or name in (".", ".."):
            raise CheckpointError(f"{join(store.uri, MANIFEST)}: {name!r} leads out of the checkpoint; refused")
    return manifest


def looks_like_pickle(name: str, head: bytes) -> bool:
    """By its name or its first 16 bytes: a pickle, or the zip archive that torch.save makes."""
    if name.lower().endswith(_PICKLE_SUFFIXES) or head.startswith(_ZIP_MAGIC):
        return True
    # The length of a safetensors header may begin with the same bytes, but its JSON starts at byte 8.
    return head.startswith(_PICKLE_PROTOCOLS) and head[8:9] != b"{"


def _pieces(path: str) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece


# ---------------------------------------------------------------- weights


MODEL = "model"
STACKED = "stacked"


@dataclass(frozen=True)
class CheckpointWeights:
    """A model's complete state_dict in a verified checkpoint, on the CPU: `tensors` by their names in the module, tied
    ones the same tensor, with what `get_extra_state` returned; and the JSON `state` of the training."""

    tensors: dict[str, Any]
    state: dict[str, Any]
    manifest: dict[str, Any]


def read_weights(path: str) -> CheckpointWeights:
    """Verify a checkpoint (a local path or a URI) and read its weights.

    Raises:
        CheckpointError: a file is missing, damaged or of another format; the message names it.
        OSError: a file could not be read.

    Example:
        >>> from raytrain.checkpoint.reader import read_weights
        >>> found = read_weights("runs/latest/checkpoints/step_00000002")
        >>> found.tensors["layers.0.weight"].shape, found.manifest["step"]
        (torch.Size([8, 3]), 2)
    """
    with _opened(path, hashes=True) as (manifest, files, stored):
        whole = _part(MODEL, manifest, files, stored, None)
        others = set(files).difference({STATE}, *manifest["parts"].values())
        whole |= _read_stacked([files[name] for name in sorted(others)], manifest.get(STACKED, {}))
        return CheckpointWeights(whole, unflatten({}, stored["state"]), manifest)


def _read_stacked(files: Iterable[str], stacked: Mapping[str, list[str]]) -> dict[str, Tensor]:
    """Complete tensors from their rows in local files; `stacked` as in the manifest."""
    wanted = {row for rows in stacked.values() for row in rows}
    found: dict[str, Tensor] = {}
    for path in files if wanted else ():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                found |= {name: file.get_tensor(name) for name in wanted.intersection(file.keys())}
        except SafetensorError as error:
            raise CheckpointError(f"{path}: no readable safetensors file ({error})") from error
    missing = sorted(wanted - set(found))
    if missing:
        raise CheckpointError(f"the tensor {missing[0]} is missing")
    return {name: torch.stack([found[row] for row in rows]) for name, rows in stacked.items()}
