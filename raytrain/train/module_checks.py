"""What the author of a module said about it, checked once before the first step: it is kept, or refused by name.

The driver checks the module that it builds, before Ray starts, and each session the one that it trains. Modules may be
on the meta device. What only a pass can show is checked by `jobs.driver.first_batch`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from raytrain.checkpoint.snapshot import shape_of
from raytrain.config.messages import abbreviated
from raytrain.errors import CheckpointError, InputError
from raytrain.models.blocks import blocks_of
from raytrain.models.weights.stored import is_extra
from raytrain.train.job import copy_of
from raytrain.train.placing import is_trained, limited_weights
from raytrain.trainable import Trainable

SHARDS = "scale.strategy"
DATA_PARALLEL = "scale.strategy data_parallel"


def check_module(trainable: Trainable, *, key: str, strategy: str) -> None:
    """Refuse a module that could not be trained or saved as its author wrote it. Raises InputError.

    Args:
        key: that the module comes from, for messages: "model.builder" or "model.module".
        strategy: resolved `scale.strategy`; "auto" where it is not known yet.
    """
    for name, part in trainable.module.named_modules():
        for leaf, tensor in (*part._parameters.items(), *part._buffers.items()):
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                raise InputError(
                    key, got=f"a {type(part).__name__} whose {leaf} has no size yet ({name or 'the model itself'})",
                    expected="parameters and buffers with sizes",
                    remedy="call it with one batch where it is made, or replace the Lazy class by one with sizes",
                )  # fmt: skip
    scripted = [name for name, part in trainable.module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    if scripted and key == "model.module":  # torch does not copy their parameters as parameters
        raise InputError(
            key, got=f"a module with TorchScript parts ({abbreviated(scripted, 3)}), which cannot be copied to workers",
            expected="parts of torch.nn", remedy="script them in a function that builds the model: model.builder",
        )  # fmt: skip
    for name, parameter in trainable.module.named_parameters():
        wrong = ""
        if parameter.numel() and any(
            stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        ):
            wrong = f"the expanded parameter {name}, whose elements share memory"
        elif parameter.requires_grad and not is_trained(parameter):
            wrong = f"the parameter {name} of {parameter.dtype}, which requires a gradient"
        if wrong:
            raise InputError(
                key, got=wrong, expected="parameters of float16, bfloat16, float32, float64 or their complex "
                "counterparts, with memory of their own", remedy="clone() it, or requires_grad_(False)",
            )  # fmt: skip
    _refuse_unsaveable(trainable, key, strategy)
    if strategy == "fsdp":
        for what, names, expected, remedy in _unshardable(trainable):
            if names:
                raise InputError(
                    SHARDS, got=f"fsdp with {what} ({abbreviated(names, 5)})", expected=expected,
                    remedy=f"{remedy}{DATA_PARALLEL}",
                )  # fmt: skip


def _refuse_unsaveable(trainable: Trainable, key: str, strategy: str) -> None:
    """What a checkpoint or the export could not write, or what would not load again."""
    module = trainable.module
    for name, part in module.named_modules():
        kind = type(part)
        if kind.get_extra_state is not nn.Module.get_extra_state and kind.set_extra_state is nn.Module.set_extra_state:
            raise InputError(
                key, got=f"a {kind.__name__} ({name or 'the model itself'}) with get_extra_state alone",
                expected="set_extra_state beside it, with which a resumed run restores what it returned",
            )  # fmt: skip
    on_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    try:
        state = module.state_dict()
    except RuntimeError:
        if on_meta:  # an extra state that reads values: the session checks it
            return
        raise
    parts = {"": state}
    if not (on_meta or trainable.remote.distributed or trainable.state_parts is None):
        parts |= {f"state_parts {name}.": part.state_dict() for name, part in trainable.state_parts().items()}
    for prefix, held in parts.items():
        try:
            shape_of(held)
        except CheckpointError as error:
            raise InputError(
                key, got=f"a {type(module).__name__} whose state no checkpoint can hold: {prefix}{error}",
                expected="a state of dense tensors and plain values",
                remedy="convert it in get_extra_state or state_dict, or register_buffer(..., persistent=False)",
            ) from error  # fmt: skip
    _refuse_unloadable(module, state, key, strategy)
    misfit: Any = getattr(trainable.export, "misfit", None)  # of a transformers folder
    found = {} if misfit is None else misfit(state)
    if trainable.remote.distributed:  # its experts are elsewhere until the end
        found.pop("less", None)
    for kind, names in found.items():
        if names:
            raise InputError(
                key, got=f"a module with {kind} tensors than the transformers model that it exports "
                f"({abbreviated(names, 3)})", expected="that model, or a module that only wraps it",
                remedy="set trainable.export = None, which exports model.safetensors alone",
            )  # fmt: skip


def _refuse_unloadable(module: nn.Module, state: dict[str, Any], key: str, strategy: str) -> None:
    """Hooks or methods of a module may write its state under names of their own: it must take them back."""
    tensors = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    own = {name for name, value in state.items() if not is_extra(name, value)} - tensors.keys()
    lost = [name for name, tensor in tensors.items() if tensor.requires_grad and name not in state]
    if not own and not lost:
        return
    kind = type(module).__name__
    if own and strategy == "fsdp":
        raise InputError(
            "scale.strategy", got=f"fsdp with a {kind} whose state_dict has names of its own ({min(own)})",
            expected="data_parallel for this model",
        )  # fmt: skip
    wrong = "" if own else f"a {kind} whose state_dict leaves out {abbreviated(lost, 5)}, which are trained"
    metas: dict[int, Any] = {
        id(tensor): tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for tensor in tensors.values()
    }
    try:
        twin = copy_of(module, metas)  # without memory, and the module itself is left alone
        twin.load_state_dict(twin.state_dict())
    except Exception as error:  # a twin may be impossible, or its hooks read values
        if str(error).startswith("Error(s) in loading state_dict"):
            wrong = f"a {kind} that does not load its own state_dict: {' '.join(str(error).split(':', 1)[1].split())}"
    if wrong:
        raise InputError(
            key, got=wrong, expected="a state from which the module can be restored",
            remedy="undo in a load_state_dict pre-hook what a hook of state_dict does",
        )  # fmt: skip


def _unshardable(trainable: Trainable) -> Iterator[tuple[str, list[str], str, str]]:
    """Yield (what, names of those that are it, expected, remedy)."""
    module = trainable.module
    named = list(module.named_parameters())
    limited = limited_weights(module)  # what backward gathers again is not limited
    tied = [
        name for name, part in module.named_modules() for one in part.parameters(recurse=False)
        if one in limited and part not in limited[one]
    ]  # fmt: skip
    tables = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    sparse = [name or type(module).__name__ for name, part in tables if part.sparse and part.weight.requires_grad]
    yield ("layers that share the weight of an embedding with max_norm", tied,
           "a weight that only embeddings with max_norm have", "")  # fmt: skip
    yield ("scalar parameters", [name for name, one in named if one.ndim == 0],
           "parameters with rows", "give them the shape (1,), or ")  # fmt: skip
    yield ("empty parameters", [name for name, one in named if not one.numel()], "parameters with elements", "")
    yield ("complex parameters", [name for name, one in named if one.is_complex()],
           "real parameters", "keep the real and imaginary parts in a last dimension of 2, or ")  # fmt: skip
    yield ("parameters whose memory is not row-major", [name for name, one in named if not one.is_contiguous()],
           "contiguous parameters", "module.to(memory_format=torch.contiguous_format), or ")  # fmt: skip
    yield "embeddings with sparse gradients", sparse, "sparse=False", "change it, or "
    yield ("hooks on accumulated gradients", [name for name, one in named if one._post_accumulate_grad_hooks],
           "tensor hooks (register_hook), which see the gradient of each micro-batch", "")  # fmt: skip
    blocks = blocks_of(trainable, key=SHARDS)
    owners: dict[int, set[str]] = defaultdict(set)  # id of a parameter -> its blocks, "" for what is outside them
    for name, block in blocks:
        for parameter in block.parameters():
            owners[id(parameter)].add(name)
    inside = {id(part) for _, block in blocks for part in block.modules()}
    for part in module.modules():
        if id(part) not in inside:
            for parameter in part.parameters(recurse=False):
                owners[id(parameter)].add("")
    shared = [name for name, one in named if len(owners[id(one)]) > 1]
    yield ("weights that a block shares with something outside it", shared,
           "weights that are tied within one block, or outside the blocks", "")  # fmt: skip
