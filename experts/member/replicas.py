"""Replicas in a step: their gradients are summed at the home before the vote, fresh weights come back after the commit.

Both are one exchange of all members, which happens only where the placement has replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from experts.member.shard import ExpertShard
from experts.placement.values import Placement
from experts.shapes import Key
from experts.transport.protocol import Transport

ViewsOf = Callable[[ExpertShard, Key], dict[str, Tensor]]


class Leg(NamedTuple):
    """Something of one expert on its way from one host to another."""

    key: Key
    source: int
    target: int


def gradient_legs(now: Placement, then: Placement) -> list[Leg]:
    """From each copy that took rows to the expert's home after the switch to `then` (the same placement where there is
    none), copies in the order of the placement."""
    found = []
    for layer, (held, placed) in enumerate(zip(now.layers, then.layers, strict=True)):
        for expert, hosts in enumerate(held.copies):
            home = placed.copies[expert][0]
            found += [Leg((layer, expert), host, home) for host in hosts if host != home]
    return found


def send_fresh_weights(group: Transport, shard: ExpertShard | None, placement: Placement) -> None:
    """The homes' weights to their replicas."""
    legs = [
        Leg((layer, expert), hosts[0], host)
        for layer, placed in enumerate(placement.layers)
        for expert, hosts in enumerate(placed.copies)
        for host in hosts[1:]
    ]
    for key, pieces in travelled(group, shard, legs, views_of=ExpertShard.weights_of):
        assert shard is not None
        for view, piece in zip(shard.weights_of(key).values(), pieces, strict=True):
            view.copy_(piece)


def gradients_of(shard: ExpertShard, key: Key) -> dict[str, Tensor]:
    """Of an expert held here; views."""
    return shard.layers[key[0]].gradients_of(key[1])


def travelled(
    group: Transport, shard: ExpertShard | None, legs: list[Leg], *, views_of: ViewsOf
) -> list[tuple[Key, list[Tensor]]]:
    """One exchange of all members along these legs; what came for each leg that ends here, in their order.

    Args:
        views_of: `views_of(shard, key)`, name -> tensor that is sent of an expert.
    """
    if not legs:
        return []
    own = None if shard is None else shard.host
    pieces: list[Tensor] = []
    send, receive = [0] * group.size, [0] * group.size
    for target, rank in enumerate(group.holders):
        for leg in legs:
            if shard is not None and (leg.source, leg.target) == (own, target):
                pieces += [view.reshape(-1) for view in views_of(shard, leg.key).values()]
                send[rank] += shard.shapes[leg.key[0]].numel(leg.key[1])
    for leg in legs:
        if shard is not None and leg.target == own:
            receive[group.holders[leg.source]] += shard.shapes[leg.key[0]].numel(leg.key[1])
    dtype, device = (torch.float32, "cpu") if shard is None else (shard.dtype, shard.device)
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)
    parts = group.exchange(sent, send, receive).wait().split(receive)
    if shard is None:
        return []
    left = {host: parts[rank] for host, rank in enumerate(group.holders)}
    found = []
    for leg in legs:
        if leg.target != own:
            continue
        shapes = shard.shapes[leg.key[0]].weights(leg.key[1]).values()
        mine, left[leg.source] = left[leg.source].tensor_split([sum(map(math.prod, shapes))])
        cut = mine.split([math.prod(shape) for shape in shapes])
        found.append((leg.key, [piece.view(shape) for piece, shape in zip(cut, shapes, strict=True)]))
    return found
