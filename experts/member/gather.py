"""The weights of a whole layer: from rank 0 to their holders at the start, and from their homes back to rank 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from experts.member.shard import ExpertShard
from experts.routing.routes import LayerRoutes
from experts.shapes import LayerShape
from experts.transport.protocol import Transport


def scatter_layer(
    group: Transport, routes: LayerRoutes, first: Sequence[Mapping[str, Tensor]], *, dtype: torch.dtype
) -> None:
    """A worker's side: `first`, weights of each expert on rank 0, to every copy of it. Collective over all members."""
    pieces, nothing = [], torch.empty(0, dtype=dtype)
    if group.rank == 0:
        flat = [_pack(weights).to(dtype) for weights in first]
        for held in routes.slots:
            own = [flat[expert] for expert, _ in held]
            pieces.append(torch.cat(own) if own else nothing)
    to_holders(group, pieces, nothing=nothing)


def take_layer(group: Transport, shard: ExpertShard, layer: int) -> None:
    """A host's side of `scatter_layer`."""
    shape, held = shard.shapes[layer], shard.layers[layer].experts
    sizes = [shape.numel(expert) for expert in held]
    flat = from_first(group, sum(sizes), dtype=shard.dtype)
    for expert, piece in zip(held, flat.split(sizes) if held else (), strict=True):
        shard.set_weights((layer, expert), _unpack(piece, shape.weights(expert)))


def gather_layer(
    group: Transport, shape: LayerShape, layer: int, *, shard: ExpertShard | None, routes: LayerRoutes | None,
    dtype: torch.dtype,
) -> list[dict[str, Tensor]] | None:  # fmt: skip
    """The weights of each expert of a layer on rank 0, None elsewhere. Collective over all members.

    Args:
        shard: this member's experts. routes: of the layer, on rank 0.
    """
    own = [key for key in (shard.homes() if shard else []) if key[0] == layer]
    pieces = [_pack(shard.weights_of(key)) for key in own if shard]
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)
    sizes: list[list[int]] = []
    homes: list[list[int]] = []
    receive = [0] * group.size
    if group.rank == 0 and routes is not None:
        homes = [[expert for expert, copy in held if copy == 0] for held in routes.slots]
        sizes = [[shape.numel(expert) for expert in held] for held in homes]
        for rank, each in zip(group.holders, sizes, strict=True):
            receive[rank] = sum(each)
    received = group.exchange(sent, [len(sent)] + [0] * (group.size - 1), receive).wait()
    if group.rank:
        return None
    experts: dict[int, dict[str, Tensor]] = {}
    for held, each, piece in zip(homes, sizes, received.split([receive[rank] for rank in group.holders]), strict=True):
        for expert, flat in zip(held, piece.split(each) if each else (), strict=True):
            experts[expert] = _unpack(flat, shape.weights(expert))
    return [experts[expert] for expert in range(shape.num_experts)]


def to_holders(group: Transport, pieces: list[Tensor], *, nothing: Tensor) -> None:
    """A worker's side: one tensor from rank 0 to each holder; the other workers send nothing."""
    send, sent = [0] * group.size, nothing
    if group.rank == 0:
        for rank, piece in zip(group.holders, pieces, strict=True):
            send[rank] = len(piece)
        sent = torch.cat(pieces)
    group.exchange(sent, send, [0] * group.size).wait()


def from_first(group: Transport, count: int, *, dtype: torch.dtype) -> Tensor:
    """A host's side of `to_holders`: `count` elements."""
    receive = [count] + [0] * (group.size - 1)
    return group.exchange(torch.empty(0, dtype=dtype), [0] * group.size, receive).wait()


def _pack(weights: Mapping[str, Tensor]) -> Tensor:
    """The weights of one expert as one CPU vector."""
    return torch.cat([weight.reshape(-1).cpu() for weight in weights.values()])


def _unpack(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The inverse of `_pack`; views."""
    pieces = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
