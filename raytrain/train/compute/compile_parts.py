"""Resolves `loop.compile_parts` to modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from raytrain.config.messages import near_names
from raytrain.config.sections import LoopConfig
from raytrain.errors import InputError
from raytrain.models.blocks import Block, blocks_of, called_modules, repeated
from raytrain.trainable import Trainable

KEY = "loop.compile_parts"


def parts_to_compile(
    trainable: Trainable, loop: LoopConfig, *, on_gpu: bool = False, sharded: bool = False
) -> list[Block]:
    """The parts to compile, outermost first; ("", module) is the full model.

    On a GPU `auto` is `all` where nothing divides the model: blocks alone leave the head and the loss, a quarter of a
    GPT-2's step. Rows that are routed to experts cut graphs in each block. Elsewhere `auto` selects the blocks if the
    model names them, if it repeats blocks with several layers (they share compiled code, so the compile time does not
    grow with their number), or if backward recomputes them. A name selects every module whose dotted name ends with it:
    `router` selects the routers of all blocks.

    Args:
        on_gpu: there, reduce-overhead makes CUDA graphs, which work for the full model only: `auto` is `all`.
        sharded: under fsdp, which works block by block.

    Raises:
        InputError: the model has no module of that name, or no blocks although they are requested, or a part contains
            blocks that are recomputed in backward.
    """
    module, asked = trainable.module, loop.compile_parts
    graphs = on_gpu and loop.compile == "reduce-overhead"
    divided = loop.activation_checkpointing or sharded or trainable.worst_case is not None
    if asked == "auto" and (graphs or (on_gpu and not divided)):
        asked = "all"
    if asked == "auto":
        several = any(next(block.children(), None) is not None for _, block in repeated(module))
        by_blocks = trainable.blocks is not None or several or loop.activation_checkpointing
        asked = "blocks" if by_blocks else "all"
    if asked == "all":
        parts: list[Block] = [("", module)]
    elif asked == "blocks":
        parts = blocks_of(trainable, key=KEY)
    else:
        parts = _named(module, asked)
    if graphs and len(parts) > 1:
        raise InputError(
            KEY, got=f"{len(parts)} parts with loop.compile reduce-overhead on a GPU", expected="all, or loop.compile"
            " default", remedy="torch refuses to pass the output of one CUDA graph to another (pytorch #152887)",
        )  # fmt: skip
    if loop.activation_checkpointing:
        again = {id(block): name for name, block in blocks_of(trainable, key="loop.activation_checkpointing")}
        for name, part in parts:
            inside = [again[id(inner)] for inner in part.modules() if inner is not part and id(inner) in again]
            if inside:
                raise InputError(
                    KEY, got=f"{name or 'the whole model'}, around {inside[0]}",
                    expected="blocks, or parts of them, with loop.activation_checkpointing",
                    remedy="loop.compile_parts: blocks; a compiled part cannot contain blocks that backward recomputes",
                )  # fmt: skip
    return parts


def _named(module: nn.Module, names: Sequence[str]) -> list[Block]:
    every = {name: part for name, part in module.named_modules() if name}
    chosen: list[Block] = []
    for name in names:
        found = [(full, part) for full, part in every.items() if full == name or full.endswith(f".{name}")]
        if not found:
            ends = {full.rpartition(".")[2] for full in every if not full.rpartition(".")[2].isdigit()}
            raise InputError(
                KEY, got=name, expected="auto, all, blocks, or names of the model's modules, or ends of such names",
                remedy=near_names(name, [*ends, *every], otherwise=sorted(ends)),
            )  # fmt: skip
        chosen += [block for full, part in found for block in called_modules(full, part)]
    kept = {id(inner) for _, part in chosen for inner in part.modules() if inner is not part}
    return list({id(part): (name, part) for name, part in chosen if id(part) not in kept}.values())
