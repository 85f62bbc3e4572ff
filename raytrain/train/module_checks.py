"""What the author of a module said about it, checked once before the first step: it is kept, or refused by name.

The driver checks the module that it builds, before Ray starts, and each session the one that it trains. Modules may be
on the meta device. What only a pass can show is checked by `jobs.driver.checks.first_batch`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from raytrain.config.messages import abbreviated
from raytrain.errors import InputError
from raytrain.models.blocks import blocks_of
from raytrain.trainable import Trainable

SHARDS = "scale.strategy"
DATA_PARALLEL = "scale.strategy data_parallel"


def check_module(trainable: Trainable, *, key: str, strategy: str) -> None:
    """Refuse a module that could not be trained or saved as its author wrote it.

    Args:
        key: that the module comes from, for messages: "model.builder" or "model.module".
        strategy: resolved `scale.strategy`; "auto" where it is not known yet.

    Raises:
        InputError: naming the part of the module, and what to change.
    """
    if strategy == "fsdp":
        _check_shards(trainable)


def _check_shards(trainable: Trainable) -> None:
    """What cannot be split by rows, block by block. What only a pass can show is named by
    `raytrain.train.parallel.fsdp.passes`."""
    module = trainable.module
    named = list(module.named_parameters())
    shared = set(_shared_with_blocks(trainable))
    tables = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    sparse = [name or type(module).__name__ for name, part in tables if part.sparse and part.weight.requires_grad]
    for what, names, expected, remedy in (
        ("scalar parameters", [name for name, one in named if one.ndim == 0],
         "parameters with rows", "give them the shape (1,), or "),
        ("weights that a block shares with something outside it", [name for name, one in named if id(one) in shared],
         "weights that are tied within one block, or outside the blocks", ""),
        ("complex parameters", [name for name, one in named if one.is_complex()],
         "real parameters", "keep the real and imaginary parts in a last dimension of 2, or "),
        ("parameters whose memory is not row-major", [name for name, one in named if not one.is_contiguous()],
         "contiguous parameters", "module.to(memory_format=torch.contiguous_format), or "),
        ("embeddings with sparse gradients", sparse, "sparse=False", "change it, or "),
        ("hooks on accumulated gradients", [name for name, one in named if one._post_accumulate_grad_hooks],
         "tensor hooks (register_hook), which see the gradient of each micro-batch", ""),
    ):  # fmt: skip
        if names:
            raise InputError(
                SHARDS, got=f"fsdp with {what} ({abbreviated(names, 5)})", expected=expected,
                remedy=f"{remedy}{DATA_PARALLEL}",
            )  # fmt: skip


def _shared_with_blocks(trainable: Trainable) -> Iterator[int]:
    """Yield the ids of parameters that belong to several blocks, or to a block and something outside it."""
    blocks = blocks_of(trainable, key=SHARDS)
    owners: dict[int, set[str]] = defaultdict(set)
    for name, block in blocks:
        for parameter in block.parameters():
            owners[id(parameter)].add(name)
    inside = {id(part) for _, block in blocks for part in block.modules()}
    for part in trainable.module.modules():
        if id(part) not in inside:
            for parameter in part.parameters(recurse=False):
                owners[id(parameter)].add("")
    yield from (key for key, names in owners.items() if len(names) > 1)
