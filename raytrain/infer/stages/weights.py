"""Reads the tensors of one stage, and no others, from safetensors files: each into the memory that it stays in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.checkpoint.safetensors import DTYPE_NAMES
from raytrain.errors import InputError
from raytrain.infer.stages.plan import KEY, StagePlan
from raytrain.infer.stages.sequence import poisoned, set_tensor, tensors_of_part
from raytrain.models.weights.headers import StoredWeights, read_header
from raytrain.models.weights.initial import misfits
from raytrain.runs.storage import join, locate

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
PIECE_BYTES = 64 << 20


@dataclass
class RangedTensors:
    """Tensors of stored weights, each read as one range of its file.

    Attributes:
        bytes_read: of tensors so far, without headers.
    """

    stored: StoredWeights
    bytes_read: int = 0
    _headers: dict[str, tuple[int, dict[str, Any]]] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> Tensor:
        """A tensor on the CPU, in the format of its file."""
        name = self.stored.aliases.get(name, name)
        files = [self.stored.file_of[name]]
        if name in self.stored.split:  # each file has some of its rows
            files = [file for file in self.stored.files if name in self._header(file)[1]]
        entries = [self._header(file)[1][name] for file in files]
        shape = self.stored.shapes[name]
        dtype = DTYPES[entries[0]["dtype"]]
        flat = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8)
        at = 0
        for file, entry in zip(files, entries, strict=True):
            begin, end = entry["data_offsets"]
            self._into(file, self._header(file)[0] + begin, flat[at : at + end - begin])
            at += end - begin
        self.bytes_read += at
        return flat.view(dtype).reshape(shape)

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        """(where the data begins, the entries) of a file."""
        if file not in self._headers:
            store = self.stored.store
            size = int.from_bytes(store.read_head(file, 8), "little")
            self._headers[file] = 8 + size, read_header(store, file, key=KEY)
        return self._headers[file]

    def _into(self, file: str, begin: int, target: Tensor) -> None:
        filesystem, inner = locate(join(self.stored.store.uri, file), key=KEY)
        view = target.numpy().data
        with filesystem.open_input_file(inner) as opened:
            opened.seek(begin)
            while view:
                got = opened.readinto(view[:PIECE_BYTES])
                if not got:
                    raise InputError(KEY, got=f"{file} of {self.stored.origin}, which ends early", expected="all of it")
                view = view[got:]


def check_weights(module: nn.Module, stored: StoredWeights) -> None:
    """Check, from headers alone, that stored weights have the names and shapes of a module's.

    Raises:
        InputError: they have not, so that no stage could read its own part of them.
    """
    found = misfits(module, stored.shapes)
    found.pop("unexpected", None)
    if found:
        kind, names = next(iter(found.items()))
        raise InputError(
            KEY, got=f"{stored.origin} with {len(names)} {kind} tensors, the first {names[0]}",
            expected="tensors with the names and shapes of this model, so that each stage reads its own",
            remedy="load the model whole once and export it: `raytrain export`, or its save_pretrained",
        )  # fmt: skip


def fill_stage(
    module: nn.Module, stored: StoredWeights, plan: StagePlan, stage: int, *, device: torch.device
) -> RangedTensors:
    """Read the tensors of a stage into a module that was built without parameters.

    What other stages hold and no module is called for (parameters of the model itself) is poisoned.
    """
    reader, own = RangedTensors(stored), _names_of(module, plan, range(plan.bounds[stage], plan.bounds[stage + 1]))
    state = module.state_dict(keep_vars=True)
    names_of: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names_of.setdefault(id(tensor), []).append(name)
    made: dict[int, Tensor] = {}
    for name in own:
        tensor = state[name]
        if id(tensor) not in made:
            known = next((one for one in names_of[id(tensor)] if one in stored.shapes), name)
            made[id(tensor)] = reader.read(known).to(tensor.dtype).to(device)
        set_tensor(module, name, made[id(tensor)])
    _tie(module, own, state)
    prefixes = tuple(f"{one}." for part in plan.parts for one in part.names)
    for name in _names_of(module, plan, [0]) if stage else ():
        if not name.startswith(prefixes):
            set_tensor(module, name, poisoned(state[name], device))
    for part in module.modules():
        for leaf, buffer in part._buffers.items():
            if buffer is not None and not buffer.is_meta:
                part._buffers[leaf] = buffer.to(device)
    return reader


def _names_of(module: nn.Module, plan: StagePlan, places: Iterable[int] | Sequence[int]) -> list[str]:
    return [name for place in places for name in tensors_of_part(module, plan.parts, place)]


def _tie(module: nn.Module, own: Sequence[str], state: dict[str, Any]) -> None:
    """Make names of one parameter share it again, as far as this stage holds them."""
    first: dict[int, nn.Parameter] = {}
    for name in own:
        path, _, leaf = name.rpartition(".")
        parameters = module.get_submodule(path)._parameters
        parameter = parameters.get(leaf)
        if parameter is not None:
            parameters[leaf] = first.setdefault(id(state[name]), parameter)
