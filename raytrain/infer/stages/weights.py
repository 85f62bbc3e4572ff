"""The parts of a model in the order of a forward pass, and filling one stage with its tensors: each is read from its
safetensors file into the memory that it stays in, and no others are read."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.checkpoint.safetensors import DTYPE_NAMES
from raytrain.errors import InputError
from raytrain.infer.stages.plan import KEY, ModelPart, StagePlan
from raytrain.models.blocks import LISTS, blocks_of, repeated
from raytrain.models.weights.headers import StoredWeights, read_header
from raytrain.models.weights.initial import misfits
from raytrain.runs.storage import join, locate
from raytrain.trainable import Trainable

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
PIECE_BYTES = 64 << 20


@contextlib.contextmanager
def without_parameters() -> Iterator[None]:
    """Inside, every new parameter is on the meta device; buffers, which no file may hold, are built as usual."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


def parts_of(trainable: Trainable) -> list[ModelPart]:
    """The parts of a model: what comes before its repeated blocks, each block, and each module after them.

    A builder names the blocks (`Trainable.blocks`), else they are the modules that repeat (`raytrain.models.blocks`).
    The order is that in which the modules were defined.

    Raises:
        InputError: the model has fewer than two parts.
    """
    module = trainable.module
    blocks = blocks_of(trainable, key=KEY) if trainable.blocks is not None else repeated(module)
    of_block = {id(block) for _, block in blocks}
    found = list(_walk("", module, of_block))
    first = next((at for at, (_, part) in enumerate(found) if id(part) in of_block), 0)
    groups = [found[:first]] if first else []
    groups += [[one] for one in found[first:]]
    if len(groups) < 2:
        raise InputError(
            KEY, got=f"a {type(module).__name__} of one part",
            expected="a model of several modules in order: a builder whose Trainable names its `blocks`, a Sequential,"
            " or a list of modules",
        )  # fmt: skip
    return _sized(module, groups, of_block)


def _walk(path: str, module: nn.Module, blocks: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of the outermost modules with state that are called as a whole."""
    for leaf, child in module.named_children():
        name = f"{path}.{leaf}" if path else leaf
        holds_blocks = any(id(inner) in blocks for inner in child.modules())
        if id(child) in blocks:
            yield name, child
        elif holds_blocks or isinstance(child, LISTS):
            yield from _walk(name, child, blocks)
        elif child.state_dict():
            yield name, child


def _sized(module: nn.Module, groups: list[list[tuple[str, nn.Module]]], blocks: set[int]) -> list[ModelPart]:
    inside = {id(tensor) for group in groups for _, part in group for tensor in part.parameters()}
    loose = [tensor for tensor in module.parameters() if id(tensor) not in inside]
    parts = []
    for at, group in enumerate(groups):
        held = {id(tensor): tensor for _, part in group for tensor in part.parameters()}
        held |= {id(tensor): tensor for tensor in loose if at == 0}
        names = tuple(name for name, _ in group)
        is_block = id(group[0][1]) in blocks
        parts.append(ModelPart(names[0], _bytes(held.values()), is_block, names if len(names) > 1 else ()))
    return parts


def _bytes(tensors: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # pyright: ignore


def tensors_of_part(module: nn.Module, parts: list[ModelPart] | tuple[ModelPart, ...], place: int) -> list[str]:
    """Names of the parameters and saved buffers of a part, as in the module's state."""
    every = list(module.state_dict(keep_vars=True))
    own = [name for name in every if name.startswith(tuple(f"{one}." for one in parts[place].names))]
    if place:
        return own
    prefixes = tuple(f"{one}." for part in parts for one in part.names)
    return own + [name for name in every if not name.startswith(prefixes)]


def set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or buffer into the place of the one of this name."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def poisoned(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape, without memory for it, whose values are not finite where the dtype allows that.

    It stands for what a stage does not hold: a value that reaches an output by another way than the cut is noticed."""
    fill = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full((), fill, dtype=tensor.dtype, device=device).expand(tensor.shape)


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
