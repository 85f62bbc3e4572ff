"""The weights of a complete layer: from rank 0 to the experts' holders at the start, and from the homes to rank 0.

They are sent as CPU tensors over the control channel: this happens once in a run, and rank 0 may have no room on its
device for all experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from experts.member.shard import ExpertShard
from experts.routing.routes import LayerRoutes
from experts.shapes import LayerShape
from experts.transport.protocol import Channel, Transport


def scatter_layer(
    group: Transport, routes: LayerRoutes, first: Sequence[Mapping[str, Tensor]], *, dtype: torch.dtype
) -> None:
    """Send initial weights to every copy of each expert; the workers' side. Collective over all members.

    Args:
        first: weights of each expert, on rank 0.
    """
    pieces, empty = [], torch.empty(0, dtype=dtype)
    if group.rank == 0:
        flat = [_flatten(weights).to(dtype) for weights in first]
        for held in routes.slots:
            own = [flat[expert] for expert, _ in held]
            pieces.append(torch.cat(own) if own else empty)
    to_holders(group, pieces, empty=empty)


def take_layer(group: Transport, shard: ExpertShard, layer: int) -> None:
    """The hosts' side of `scatter_layer`."""
    shape, held = shard.shapes[layer], shard.layers[layer].experts
    sizes = [shape.numel(expert) for expert in held]
    flat = from_first(group, sum(sizes), dtype=shard.dtype)
    for expert, piece in zip(held, flat.split(sizes) if held else (), strict=True):
        shard.set_weights((layer, expert), split_weights(piece, shape.weights(expert)))


def gather_layer(
    group: Transport, shape: LayerShape, layer: int, *, shard: ExpertShard | None, routes: LayerRoutes | None,
    dtype: torch.dtype,
) -> list[dict[str, Tensor]] | None:  # fmt: skip
    """Gather the weights of each expert of a layer on rank 0. Collective over all members.

    Args:
        shard: this member's experts. routes: of the layer, on rank 0.

    Returns:
        the weights of each expert by name; None on other members.
    """
    own = [key for key in (shard.homes() if shard else []) if key[0] == layer]
    pieces = [_flatten(shard.weights_of(key)) for key in own if shard]
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)
    sizes: list[list[int]] = []
    homes: list[list[int]] = []
    receive = [0] * group.size
    if group.rank == 0 and routes is not None:
        homes = [[expert for expert, copy in held if copy == 0] for held in routes.slots]
        sizes = [[shape.numel(expert) for expert in held] for held in homes]
        for rank, each in zip(group.holders, sizes, strict=True):
            receive[rank] = sum(each)
    send = [len(sent)] + [0] * (group.size - 1)
    received = group.exchange(sent, send, receive, channel=Channel.CONTROL).wait()
    if group.rank:
        return None
    experts: dict[int, dict[str, Tensor]] = {}
    for held, each, piece in zip(homes, sizes, received.split([receive[rank] for rank in group.holders]), strict=True):
        for expert, flat in zip(held, piece.split(each) if each else (), strict=True):
            experts[expert] = split_weights(flat, shape.weights(expert))
    return [experts[expert] for expert in range(shape.num_experts)]


def to_holders(group: Transport, pieces: list[Tensor], *, empty: Tensor) -> None:
    """Send one tensor from rank 0 to each holder; the workers' side. Other workers send `empty`."""
    send, sent = [0] * group.size, empty
    if group.rank == 0:
        for rank, piece in zip(group.holders, pieces, strict=True):
            send[rank] = len(piece)
        sent = torch.cat(pieces)
    group.exchange(sent, send, [0] * group.size, channel=Channel.CONTROL).wait()


def from_first(group: Transport, count: int, *, dtype: torch.dtype) -> Tensor:
    """The hosts' side of `to_holders`: receive `count` elements."""
    receive = [count] + [0] * (group.size - 1)
    empty = torch.empty(0, dtype=dtype)
    return group.exchange(empty, [0] * group.size, receive, channel=Channel.CONTROL).wait()


def split_weights(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Split the flattened weights of one expert by name; views."""
    pieces = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _flatten(weights: Mapping[str, Tensor]) -> Tensor:
    """The weights of one expert as one CPU vector."""
    return torch.cat([weight.reshape(-1).cpu() for weight in weights.values()])
