"""Replicas in a step: their gradients are summed at the home before the vote, fresh weights come back after the commit.

Both are one exchange of all members, which happens only where the placement has replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from experts.placement import Placement
from experts.shard import ExpertShard, Key
from experts.transport.protocol import Transport


class Leg(NamedTuple):
    """Something of one expert on its way from one host to another."""

    key: Key
    source: int
    target: int


def gather_replica_gradients(group: Transport, shard: ExpertShard | None, placement: Placement) -> None:
    """Add each replica's gradient to its home's, replica by replica in the order of the placement."""
    legs = [Leg(leg.key, leg.target, leg.source) for leg in _from_homes(placement)]
    for view, piece in _exchanged(group, shard, legs, gradients=True):
        view += piece


def send_fresh_weights(group: Transport, shard: ExpertShard | None, placement: Placement) -> None:
    """The homes' weights to their replicas."""
    for view, piece in _exchanged(group, shard, list(_from_homes(placement)), gradients=False):
        view.copy_(piece)


def _from_homes(placement: Placement) -> Iterator[Leg]:
    """From each home to each of its replicas, in an order that all members know."""
    for layer, placed in enumerate(placement.layers):
        for expert, hosts in enumerate(placed.copies):
            for host in hosts[1:]:
                yield Leg((layer, expert), hosts[0], host)


def _exchanged(
    group: Transport, shard: ExpertShard | None, legs: list[Leg], *, gradients: bool
) -> list[tuple[Tensor, Tensor]]:
    """Travel these legs; (this member's own tensor, what came for it) of each weight of each leg that ends here."""
    if not legs:
        return []
    own = None if shard is None else shard.host
    pieces: list[Tensor] = []
    send, receive = [0] * group.size, [0] * group.size
    for target, rank in enumerate(group.holders):
        for leg in legs:
            if shard is not None and (leg.source, leg.target) == (own, target):
                pieces += [view.reshape(-1) for view in _views(shard, leg.key, gradients=gradients)]
                send[rank] += shard.shapes[leg.key[0]].numel
    for leg in legs:
        if shard is not None and leg.target == own:
            receive[group.holders[leg.source]] += shard.shapes[leg.key[0]].numel
    dtype, device = (torch.float32, "cpu") if shard is None else (shard.dtype, shard.device)
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)
    parts = group.exchange(sent, send, receive).wait().split(receive)
    if shard is None:
        return []
    left = {host: parts[rank] for host, rank in enumerate(group.holders)}
    found = []
    for leg in legs:
        for view in _views(shard, leg.key, gradients=gradients) if leg.target == own else ():
            piece, left[leg.source] = left[leg.source].tensor_split([view.numel()])
            found.append((view, piece.view_as(view)))
    return found


def _views(shard: ExpertShard, key: Key, *, gradients: bool) -> list[Tensor]:
    """The weights of an expert held here, or their gradients."""
    stack, place = shard.layers[key[0]].slot(key[1])
    weights = [getattr(stack, name) for name in shard.shapes[key[0]].weights()]
    return [(weight.grad if gradients else weight.detach())[place] for weight in weights]
