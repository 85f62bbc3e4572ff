"""Replicas in a step: the homes sum their gradients before the vote and send them new weights after the commit.

Each is one exchange of the members that hold experts, and happens only where the placement has replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from experts.member.gather import split_weights
from experts.member.shard import ExpertShard
from experts.placement.values import Placement
from experts.shapes import Key, LayerShape
from experts.transport.protocol import Channel, Transport

ViewsOf = Callable[[ExpertShard, Key], dict[str, Tensor]]
ShapesOf = Callable[[LayerShape, int], dict[str, tuple[int, ...]]]


class Transfer(NamedTuple):
    """Tensors of one expert that one host sends to another."""

    key: Key
    source: int
    target: int


def gradient_transfers(now: Placement, then: Placement) -> list[Transfer]:
    """From each copy that took rows to the expert's home in `then` (equal to `now` if no expert moves); copies in the
    order of the placement."""
    return [
        Transfer((layer, expert), host, placed.copies[expert][0])
        for layer, (held, placed) in enumerate(zip(now.layers, then.layers, strict=True))
        for expert, hosts in enumerate(held.copies)
        for host in hosts
        if host != placed.copies[expert][0]
    ]


def send_fresh_weights(group: Transport, shard: ExpertShard | None, placement: Placement) -> None:
    """Send the homes' weights to their replicas. Collective over the holders; nothing happens on other members."""
    transfers = [
        Transfer((layer, expert), hosts[0], host)
        for layer, placed in enumerate(placement.layers)
        for expert, hosts in enumerate(placed.copies)
        for host in hosts[1:]
    ]
    for key, pieces in exchange_along(group, shard, transfers, views_of=ExpertShard.weights_of):
        assert shard is not None
        for view, piece in zip(shard.weights_of(key).values(), pieces, strict=True):
            view.copy_(piece)


def gradients_of(shard: ExpertShard, key: Key) -> dict[str, Tensor]:
    """Gradients of the trained weights of an expert held here, by name; views."""
    return shard.layers[key[0]].gradients_of(key[1])


def exchange_along(
    group: Transport, shard: ExpertShard | None, transfers: list[Transfer], *, views_of: ViewsOf,
    shapes_of: ShapesOf = LayerShape.weights,
) -> list[tuple[Key, list[Tensor]]]:  # fmt: skip
    """Carry out the transfers in one exchange of the holders; other members have nothing to send or receive.

    Args:
        views_of: `views_of(shard, key)` are the tensors of an expert to send, by name.
        shapes_of: `shapes_of(layer's shape, expert)` are their shapes.

    Returns:
        for each transfer that ends here, in their order, its tensors.
    """
    if not transfers or shard is None:
        return []

    def numel(key: Key) -> int:
        return sum(map(math.prod, shapes_of(shard.shapes[key[0]], key[1]).values()))

    pieces: list[Tensor] = []
    send, receive = [0] * group.size, [0] * group.size
    for target, rank in enumerate(group.holders):
        for transfer in transfers:
            if (transfer.source, transfer.target) == (shard.host, target):
                pieces += [view.reshape(-1) for view in views_of(shard, transfer.key).values()]
                send[rank] += numel(transfer.key)
    for transfer in transfers:
        if transfer.target == shard.host:
            receive[group.holders[transfer.source]] += numel(transfer.key)
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=shard.dtype, device=shard.device)
    parts = group.exchange(sent, send, receive, channel=Channel.TO_HOLDERS).wait().split(receive)
    left = {host: parts[rank] for host, rank in enumerate(group.holders)}
    received = []
    for transfer in transfers:
        if transfer.target != shard.host:
            continue
        layer, expert = transfer.key
        flat, left[transfer.source] = left[transfer.source].tensor_split([numel(transfer.key)])
        weights = split_weights(flat, shapes_of(shard.shapes[layer], expert))
        received.append((transfer.key, list(weights.values())))
    return received
