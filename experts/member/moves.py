"""Expert weights that change their place: whole layers from and to rank 0, replicas, experts to new homes.

Collective operations, called by the worker's and the host's end of the exchange in the same order.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from experts.config import Key, LayerShape
from experts.member.shard import ExpertShard
from experts.placement.values import Placement
from experts.router import LayerRoutes
from experts.transport import Channel, Exchange, JointGroup, bytes_tensor
from raytrain.errors import RunError

# ---------------------------------------------------------------- gather
# The weights of a complete layer: from rank 0 to the experts' holders at the start, and from the homes to rank 0.


def scatter_layer(
    group: JointGroup, routes: LayerRoutes, first: Sequence[Mapping[str, Tensor]], *, dtype: torch.dtype
) -> None:
    """Send initial weights, which rank 0 has, to every copy of each expert; the workers' side. Collective over all
    members."""
    pieces, empty = [], torch.empty(0, dtype=dtype)
    if group.rank == 0:
        flat = [_flatten(weights).to(dtype) for weights in first]
        for held in routes.slots:
            own = [flat[expert] for expert, _ in held]
            pieces.append(torch.cat(own) if own else empty)
    to_holders(group, pieces, empty=empty)


def take_layer(group: JointGroup, shard: ExpertShard, layer: int) -> None:
    """The hosts' side of `scatter_layer`."""
    shape, held = shard.shapes[layer], shard.layers[layer].experts
    sizes = [shape.numel(expert) for expert in held]
    flat = from_first(group, sum(sizes), dtype=shard.dtype)
    for expert, piece in zip(held, flat.split(sizes) if held else (), strict=True):
        shard.set_weights((layer, expert), split_weights(piece, shape.weights(expert)))


def gather_layer(
    group: JointGroup, shape: LayerShape, layer: int, *, shard: ExpertShard | None, routes: LayerRoutes | None,
    dtype: torch.dtype,
) -> list[dict[str, Tensor]] | None:  # fmt: skip
    """Gather the weights of each expert of a layer by name on rank 0, which has its routes; None on other members.
    Collective over all members."""
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


def to_holders(group: JointGroup, pieces: list[Tensor], *, empty: Tensor) -> None:
    """Send one tensor from rank 0 to each holder; the workers' side. Other workers send `empty`."""
    send, sent = [0] * group.size, empty
    if group.rank == 0:
        for rank, piece in zip(group.holders, pieces, strict=True):
            send[rank] = len(piece)
        sent = torch.cat(pieces)
    group.exchange(sent, send, [0] * group.size, channel=Channel.CONTROL).wait()


def from_first(group: JointGroup, count: int, *, dtype: torch.dtype) -> Tensor:
    """The hosts' side of `to_holders`: receive `count` elements."""
    receive = [count] + [0] * (group.size - 1)
    empty = torch.empty(0, dtype=dtype)
    return group.exchange(empty, [0] * group.size, receive, channel=Channel.CONTROL).wait()


def split_weights(flat: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Split the flattened weights of one expert by name; views."""
    pieces = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _flatten(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weight.reshape(-1).cpu() for weight in weights.values()])


# ---------------------------------------------------------------- replicas
# Replicas in a step: the homes sum their gradients before the vote and send them new weights after the commit.


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


def send_fresh_weights(group: JointGroup, shard: ExpertShard | None, placement: Placement) -> None:
    """Send the homes' weights to their replicas. Collective over the holders; nothing happens on other members."""
    transfers = [
        Transfer((layer, expert), hosts[0], host)
        for layer, placed in enumerate(placement.layers)
        for expert, hosts in enumerate(placed.copies)
        for host in hosts[1:]
    ]
    for key, pieces in exchange_along(group, shard, transfers):
        assert shard is not None
        for view, piece in zip(shard.weights_of(key).values(), pieces, strict=True):
            view.copy_(piece)


def exchange_along(
    group: JointGroup, shard: ExpertShard | None, transfers: list[Transfer], *, gradients: bool = False
) -> list[tuple[Key, list[Tensor]]]:
    """Send weights, or gradients of the trained ones, in one exchange of the holders; other members have none.

    Returns:
        for each transfer that ends here, in their order, its tensors.
    """
    if not transfers or shard is None:
        return []

    def shapes_of(key: Key) -> dict[str, tuple[int, ...]]:
        layer = shard.shapes[key[0]]
        return layer.trained(key[1]) if gradients else layer.weights(key[1])

    def numel(key: Key) -> int:
        return sum(map(math.prod, shapes_of(key).values()))

    pieces: list[Tensor] = []
    send, receive = [0] * group.size, [0] * group.size
    for target, rank in enumerate(group.holders):
        for transfer in transfers:
            if (transfer.source, transfer.target) == (shard.host, target):
                layer, expert = transfer.key
                own = shard.layers[layer].gradients_of(expert) if gradients else shard.weights_of(transfer.key)
                pieces += [view.reshape(-1) for view in own.values()]
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
        flat, left[transfer.source] = left[transfer.source].tensor_split([numel(transfer.key)])
        received.append((transfer.key, list(split_weights(flat, shapes_of(transfer.key)).values())))
    return received


# ---------------------------------------------------------------- migration

DIGEST_WORDS = 2


class Migration:
    """One member's part in the moves of experts to new homes between two steps, while training continues; every call is
    collective over all members.

    Attributes:
        next: the placement that everybody switches to at the next vote.
    """

    def __init__(self, group: JointGroup) -> None:
        self._group = group
        self.next: Placement | None = None
        self._pending: Exchange | None = None
        self._incoming: dict[int, list[int]] = {}
        """Source host -> (size in bytes, *digest) of what it sends here."""
        self._seconds, self._bytes = 0.0, 0

    def begin(self, following: Placement, placement: Placement, shard: ExpertShard | None) -> None:
        """Start to send the experts that leave their home in the next placement; `placement` is in force."""
        began = time.perf_counter()
        self.next = following
        transfers = [Transfer(*move) for move in placement.home_moves(following)]
        if transfers:
            self._send(shard, transfers)
        self._seconds += time.perf_counter() - began

    def finish(self) -> tuple[dict[Key, dict[str, Tensor]], str]:
        """Check what has arrived, and agree on it with all members: (the states that come here, why nobody may use
        them or switch)."""
        began = time.perf_counter()
        states, refused = self._receive()
        self.next = None
        self._seconds += time.perf_counter() - began
        return states, refused

    def fetch(self, shard: ExpertShard | None, transfers: list[Transfer]) -> dict[Key, dict[str, Tensor]]:
        """Send the states of experts, and wait for those that come here, between two moves. Collective.

        Raises:
            RunError: one has arrived with another digest.
        """
        if not transfers:
            return {}
        self._send(shard, transfers)
        states, refused = self._receive()
        if refused:
            raise RunError(f"the state of an expert was not copied: {refused}")
        return states

    def _receive(self) -> tuple[dict[Key, dict[str, Tensor]], str]:
        states: dict[Key, dict[str, Tensor]] = {}
        refused = ""
        if self._pending is not None:
            sizes = [size for size, *_ in self._incoming.values()]
            parts = self._pending.wait().split(sizes) if sizes else ()
            digests = [digest for _, *digest in self._incoming.values()]
            intact = [_unpack(bytes(part.numpy()), own, into=states) for part, own in zip(parts, digests, strict=True)]
            votes = torch.zeros(self._group.size, dtype=torch.float64)
            votes[self._group.rank] = intact.count(False)
            self._group.all_reduce(votes)
            bad = [str(rank) for rank, number in enumerate(votes.tolist()) if number]
            refused = f"rank {', '.join(bad)} received data with another digest than what was sent" if bad else ""
        self._pending, self._incoming = None, {}
        return states, refused

    def drop(self) -> None:
        """The generation ends before the next vote: wait for what is in flight, and forget it."""
        if self._pending is not None:
            self._pending.wait()
        self.next = self._pending = None

    def take_spent(self) -> tuple[float, int]:
        """Return, since the last call, this member's seconds without computing and the bytes of experts it sent."""
        taken = self._seconds, self._bytes
        self._seconds, self._bytes = 0.0, 0
        return taken

    def add_spent(self, seconds: float, sent_bytes: int = 0) -> None:
        """Add the cost of the switch itself; or put back what a dropped step's vote took."""
        self._seconds += seconds
        self._bytes += sent_bytes

    def receive_announcement(self, size: int, announcement: bytes | None) -> dict[str, Any]:
        """Rank 0's announcement of this length, on every member."""
        began, group = time.perf_counter(), self._group
        send, receive = [0] * group.size, [0] * group.size
        if group.rank == 0:
            assert announcement is not None
            send = [0] + [size] * (group.size - 1)
        else:
            receive[0] = size
        sent = bytes_tensor((announcement or b"") * (group.size - 1))
        received = group.exchange(sent, send, receive, channel=Channel.CONTROL).wait()
        message = json.loads(announcement if announcement is not None else bytes(received.numpy()))
        self._seconds += time.perf_counter() - began
        return message

    def _send(self, shard: ExpertShard | None, transfers: list[Transfer]) -> None:
        """Exchange sizes and digests, then start to send the states, which travel while the members compute."""
        group, host = self._group, None if shard is None else shard.host
        packed: dict[int, bytes] = {}
        for target in sorted({transfer.target for transfer in transfers if transfer.source == host}):
            assert shard is not None
            keys = [one.key for one in transfers if (one.source, one.target) == (host, target)]
            packed[target] = _pack(shard, keys)
        self._bytes += sum(map(len, packed.values()))
        sources = sorted({transfer.source for transfer in transfers if transfer.target == host and host is not None})
        send, receive, sizes = ([0] * group.size for _ in range(3))
        for target, data in packed.items():
            send[group.holders[target]], sizes[group.holders[target]] = 1, len(data)
        for source in sources:
            receive[group.holders[source]] = 1
        own = torch.tensor([[len(data), *_digest(data)] for data in packed.values()], dtype=torch.int64)
        rows = own.view(-1, 1 + DIGEST_WORDS)
        incoming = group.exchange(rows, send, receive, channel=Channel.CONTROL).wait().tolist()
        self._incoming = dict(zip(sources, incoming, strict=True))
        counts = [0] * group.size
        for source, (size, *_) in self._incoming.items():
            counts[group.holders[source]] = size
        data = bytes_tensor(b"".join(packed.values()))
        self._pending = group.exchange(data, sizes, counts, channel=Channel.CONTROL)


def _pack(shard: ExpertShard, keys: list[Key]) -> bytes:
    return tensors_to_bytes(
        {
            f"{layer}.{expert}.{field}": value.detach().to("cpu", copy=True).contiguous()
            for layer, expert in keys
            for field, value in shard.state_of((layer, expert)).items()
        }
    )


def _unpack(data: bytes, digest: list[int], *, into: dict[Key, dict[str, Tensor]]) -> bool:
    """Add the states in `data` to `into`; returns False, and adds nothing, if the digest differs."""
    if _digest(data) != digest:
        return False
    for name, value in tensors_from_bytes(data).items():
        layer, expert, field = name.split(".", 2)
        into.setdefault((int(layer), int(expert)), {})[field] = value
    return True


def _digest(data: bytes) -> list[int]:
    """128 bits of BLAKE2b as signed words."""
    raw = hashlib.blake2b(data, digest_size=8 * DIGEST_WORDS).digest()
    return [int.from_bytes(raw[8 * word : 8 * word + 8], "little", signed=True) for word in range(DIGEST_WORDS)]
