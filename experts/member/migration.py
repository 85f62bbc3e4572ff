"""Moves experts to new homes between two steps, while training continues.

After a commit rank 0 announces the next placement to everybody, and each host that an expert leaves starts to send its
weights and optimizer state. They do not change before the next commit, so they travel while the members compute the
next step. Before that step's vote every host checks the digests of what it received. If all are right, everybody
switches, the step's gradients are summed at the new homes, and those commit it. Replicas need no move: they receive
their weights after every commit anyway (the idea is Symi's, arXiv 2504.19925).

If a member dies meanwhile, the generation ends, and the old placement stays in force.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from experts.member.replicas import Transfer
from experts.member.shard import ExpertShard
from experts.placement.values import Placement
from experts.shapes import Key
from experts.transport.protocol import Channel, PendingExchange, Transport, bytes_tensor

DIGEST_WORDS = 2


class MigrationResult(NamedTuple):
    """The placement to switch to, with the state of the experts that come to this member; or why it was refused."""

    placement: Placement
    states: Mapping[Key, Mapping[str, Tensor]]
    refused: str


class Migration:
    """One member's part in the moves of a generation; every call is collective over all members."""

    def __init__(self, group: Transport) -> None:
        self._group = group
        self._next: Placement | None = None
        self._pending: PendingExchange | None = None
        self._incoming: dict[int, list[int]] = {}
        """Source host -> (size in bytes, *digest) of what it sends here."""
        self._seconds, self._bytes = 0.0, 0

    @property
    def next(self) -> Placement | None:
        """The placement that everybody switches to at the next vote."""
        return self._next

    def begin(self, size: int, placement: Placement, shard: ExpertShard | None, *, announcement: bytes | None) -> None:
        """Receive the next placement, and start to send the experts that leave their home.

        Args:
            size: of rank 0's announcement. announcement: itself, on rank 0.
            placement: in force.
        """
        began = time.perf_counter()
        self._next = Placement.from_json(json.loads(self._broadcast(size, announcement)))
        transfers = [Transfer(*move) for move in placement.home_moves(self._next)]
        if transfers:
            self._send(shard, transfers)
        self._seconds += time.perf_counter() - began

    def finish(self, shard: ExpertShard | None) -> MigrationResult:
        """Check what has arrived, and agree on it with all members."""
        assert self._next is not None
        began = time.perf_counter()
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
        placement = self._next
        self._next, self._pending, self._incoming = None, None, {}
        self._seconds += time.perf_counter() - began
        return MigrationResult(placement, {} if refused else states, refused)

    def drop(self) -> None:
        """The generation ends before the next vote: wait for what is in flight, and forget it."""
        if self._pending is not None:
            self._pending.wait()
        self._next = self._pending = None

    def take_spent(self) -> tuple[float, int]:
        """Return, since the last call, this member's seconds without computing and the bytes of experts it sent."""
        taken = self._seconds, self._bytes
        self._seconds, self._bytes = 0.0, 0
        return taken

    def add_spent(self, seconds: float, sent_bytes: int = 0) -> None:
        """Add the cost of the switch itself; or put back what a dropped step's vote took."""
        self._seconds += seconds
        self._bytes += sent_bytes

    def _broadcast(self, size: int, announcement: bytes | None) -> bytes:
        """Rank 0's announcement, on every member."""
        group = self._group
        send, receive = [0] * group.size, [0] * group.size
        if group.rank == 0:
            assert announcement is not None
            send = [0] + [size] * (group.size - 1)
        else:
            receive[0] = size
        sent = bytes_tensor((announcement or b"") * (group.size - 1))
        received = group.exchange(sent, send, receive, channel=Channel.CONTROL).wait()
        return announcement if announcement is not None else bytes(received.numpy())

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
