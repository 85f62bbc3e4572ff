"""The parts of a model in the order of a forward pass, and building a model without memory for its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from raytrain.errors import InputError
from raytrain.infer.stages.plan import KEY, ModelPart
from raytrain.models.blocks import LISTS, blocks_of, repeated
from raytrain.trainable import Trainable


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
