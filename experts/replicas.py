"""Replicas in a step: their gradients are summed at the home before the vote, fresh weights come back after the commit.

Both are one exchange of all members, which happens only where the placement has replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from experts.placement import Placement
from experts.shard import ExpertShard, Key
from experts.transport.protocol import Transport


class Copy(NamedTuple):
    """A replica: of which expert, where, and where its home is."""

    key: Key
    home: int
    host: int


def replicas_of(placement: Placement) -> Iterator[Copy]:
    """Every replica, in an order that all members know."""
    for layer, placed in enumerate(placement.layers):
        for expert, hosts in enumerate(placed.copies):
            for host in hosts[1:]:
                yield Copy((layer, expert), hosts[0], host)


def gather_replica_gradients(group: Transport, shard: ExpertShard | None, placement: Placement) -> None:
    """Add each replica's gradient to its home's, replica by replica in the order of the placement."""
    copies = list(replicas_of(placement))
    if not copies:
        return
    host = None if shard is None else shard.host
    sent, received = _exchange(group, shard, [(c, c.host, c.home) for c in copies], gradients=True)
    if shard is None:
        return
    offsets = dict.fromkeys(range(placement.num_hosts), 0)
    for copy in copies:
        if copy.home != host:
            continue
        stack, place = shard.layers[copy.key[0]].slot(copy.key[1])
        for name in shard.shapes[copy.key[0]].weights():
            grad = getattr(stack, name).grad[place]
            begin = offsets[copy.host]
            offsets[copy.host] += grad.numel()
            grad += received[copy.host][begin : begin + grad.numel()].view_as(grad)
    del sent


def send_fresh_weights(group: Transport, shard: ExpertShard | None, placement: Placement) -> None:
    """The homes' weights to their replicas."""
    copies = list(replicas_of(placement))
    if not copies:
        return
    host = None if shard is None else shard.host
    _, received = _exchange(group, shard, [(c, c.home, c.host) for c in copies], gradients=False)
    if shard is None:
        return
    offsets = dict.fromkeys(range(placement.num_hosts), 0)
    for copy in copies:
        if copy.host != host:
            continue
        for view in shard.weights_of(copy.key).values():
            begin = offsets[copy.home]
            offsets[copy.home] += view.numel()
            view.copy_(received[copy.home][begin : begin + view.numel()].view_as(view))


def _exchange(
    group: Transport, shard: ExpertShard | None, legs: list[tuple[Copy, int, int]], *, gradients: bool
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Send what these legs (copy, from host, to host) name; returns what was sent, and what came from each host."""
    own = None if shard is None else shard.host
    pieces: list[torch.Tensor] = []
    send, receive = [0] * group.size, [0] * group.size
    for target, rank in enumerate(group.holders):
        for copy, source, to in legs:
            if own is None or to != target or source != own:
                continue
            assert shard is not None
            stack, place = shard.layers[copy.key[0]].slot(copy.key[1])
            for name in shard.shapes[copy.key[0]].weights():
                weight = getattr(stack, name)
                piece = (weight.grad if gradients else weight.detach())[place].reshape(-1)
                pieces.append(piece)
                send[rank] += piece.numel()
    for copy, source, to in legs:
        if own is not None and to == own:
            assert shard is not None
            receive[group.holders[source]] += shard.shapes[copy.key[0]].numel
    dtype = torch.float32 if shard is None else shard.dtype
    device = "cpu" if shard is None else shard.device
    sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype, device=device)
    received = group.exchange(sent, send, receive).wait()
    parts = received.split(receive)
    return sent, {host: parts[rank] for host, rank in enumerate(group.holders)}
