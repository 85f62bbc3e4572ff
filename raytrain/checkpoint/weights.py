"""The complete weights of a checkpoint, whichever processes wrote them: shards and separately stored parts are joined.

A manifest describes tensors whose rows other processes hold: `stacked` maps the name of a complete tensor to the names
of its rows, in order, which are in files that belong to no part.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from raytrain.checkpoint.reader import STATE, checked_files, named_files, part_tensors
from raytrain.checkpoint.snapshot import unflatten
from raytrain.errors import CheckpointError
from raytrain.runs.storage import open_store

__all__ = ["read_weights"]

MODEL = "model"
STACKED = "stacked"


@dataclass(frozen=True)
class CheckpointWeights:
    """The model's complete state_dict in a verified checkpoint, on the CPU.

    Attributes:
        tensors: by their names in the module; tied ones are the same tensor. What `get_extra_state` returned is in it
            too, whatever it is.
        state: the JSON state of the training, as saved.
    """

    tensors: dict[str, Any]
    state: dict[str, Any]
    manifest: dict[str, Any]


def read_weights(path: str) -> CheckpointWeights:
    """Verify a checkpoint (a local path or a URI) and read its weights.

    Raises:
        CheckpointError: a file is missing, damaged or of another format; the message names it.
        OSError: a file could not be read.

    Example:
        >>> from raytrain.checkpoint.weights import read_weights
        >>> found = read_weights("runs/latest/checkpoints/step_00000002")
        >>> found.tensors["layers.0.weight"].shape, found.manifest["step"]
        (torch.Size([8, 3]), 2)
    """
    with named_files(path), tempfile.TemporaryDirectory(prefix="raytrain-") as scratch:
        manifest, files = checked_files(open_store(path), scratch, hashes=True)
        try:
            own = manifest["parts"][MODEL]
            tied, split = manifest["tied"].get(MODEL, {}), manifest.get("split", {}).get(MODEL, [])
            tensors = part_tensors([files[name] for name in own], tied=tied, split=split, place=None)
            others = set(files).difference({STATE}, *manifest["parts"].values())
            with open(files[STATE], "rb") as file:
                stored = json.load(file)
            whole, state = unflatten(tensors, stored["parts"][MODEL]), unflatten({}, stored["state"])
            whole |= _read_stacked([files[name] for name in sorted(others)], manifest.get(STACKED, {}))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path}: not understood ({type(error).__name__}: {error})") from error
    return CheckpointWeights(whole, state, manifest)


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
