"""Experts that move home between two steps, while training goes on.

After a commit rank 0 tells everybody the next placement, and each host whose experts leave sends their weights and
optimizer state on their way. Nothing of that changes before the next commit, so it travels while the members compute
the next step. Before that step's vote every host checks the digest of what came; if all of it is right, everybody
switches, the gradients of the step are summed at the new homes, and those commit it. Replicas need no move: they get
their weights after the commit, like after every other (the idea is Symi's, arXiv 2504.19925).

A death meanwhile ends the generation, and the old placement is the one in force.
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

from experts.member.replicas import Leg
from experts.member.shard import ExpertShard
from experts.placement.values import Placement
from experts.shapes import Key
from experts.transport.protocol import PendingExchange, Transport

DIGEST_WORDS = 2


class Arrived(NamedTuple):
    """The end of a move: the placement to switch to with the state of who comes home here, or why there is none."""

    placement: Placement
    states: Mapping[Key, Mapping[str, Tensor]]
    refused: str


class Migration:
    """One member's part in the moves of a generation; every call is one of all members."""

    def __init__(self, group: Transport) -> None:
        self._group = group
        self._next: Placement | None = None
        self._pending: PendingExchange | None = None
        self._told: dict[int, list[int]] = {}
        self._seconds, self._bytes = 0.0, 0

    @property
    def next(self) -> Placement | None:
        """Where everybody goes at the next vote."""
        return self._next

    def begin(self, size: int, placement: Placement, shard: ExpertShard | None, *, notice: bytes | None) -> None:
        """Hear of the next placement, and send what leaves its home.

        Args:
            size: of rank 0's notice. notice: itself, on rank 0.
            placement: in force.
        """
        began = time.perf_counter()
        self._next = Placement.from_json(json.loads(self._heard(size, notice)))
        legs = [
            Leg((layer, expert), before[0], after[0])
            for layer, (old, new) in enumerate(zip(placement.layers, self._next.layers, strict=True))
            for expert, (before, after) in enumerate(zip(old.copies, new.copies, strict=True))
            if before[0] != after[0]
        ]
        if legs:
            self._send(shard, legs)
        self._seconds += time.perf_counter() - began

    def finish(self, shard: ExpertShard | None) -> Arrived:
        """What has come, checked, and everybody's agreement on it."""
        assert self._next is not None
        began = time.perf_counter()
        arrived: dict[Key, dict[str, Tensor]] = {}
        refused = ""
        if self._pending is not None:
            sizes = [size for size, *_ in self._told.values()]
            parts = self._pending.wait().split(sizes) if sizes else ()
            told = [digest for _, *digest in self._told.values()]
            good = [_unpack(bytes(part.numpy()), own, into=arrived) for part, own in zip(parts, told, strict=True)]
            votes = torch.zeros(self._group.size, dtype=torch.float64)
            votes[self._group.rank] = good.count(False)
            self._group.all_reduce(votes)
            bad = [str(rank) for rank, number in enumerate(votes.tolist()) if number]
            refused = f"what came to rank {', '.join(bad)} has another digest than what was sent" if bad else ""
        placement = self._next
        self._next, self._pending, self._told = None, None, {}
        self._seconds += time.perf_counter() - began
        return Arrived(placement, {} if refused else arrived, refused)

    def drop(self) -> None:
        """The generation ends before the next vote: let what is under way arrive, and forget it."""
        if self._pending is not None:
            self._pending.wait()
        self._next = self._pending = None

    def take_spent(self) -> tuple[float, int]:
        """Of this member since the last call: seconds in which it did not compute, bytes of experts that it sent."""
        taken = self._seconds, self._bytes
        self._seconds, self._bytes = 0.0, 0
        return taken

    def add_spent(self, seconds: float, sent_bytes: int = 0) -> None:
        """Of the switch itself; or what was taken for a vote on a step that was dropped."""
        self._seconds += seconds
        self._bytes += sent_bytes

    def _heard(self, size: int, notice: bytes | None) -> bytes:
        """Rank 0's notice, on every member."""
        group = self._group
        sent = torch.empty(0, dtype=torch.uint8)
        send, receive = [0] * group.size, [0] * group.size
        if group.rank == 0:
            assert notice is not None
            send = [0] + [size] * (group.size - 1)
            sent = torch.frombuffer(bytearray(notice * (group.size - 1)), dtype=torch.uint8) if group.size > 1 else sent
        else:
            receive[0] = size
        heard = group.exchange(sent, send, receive).wait()
        return notice if notice is not None else bytes(heard.numpy())

    def _send(self, shard: ExpertShard | None, legs: list[Leg]) -> None:
        """Sizes and digests, then the states themselves, which travel on while others compute."""
        group, host = self._group, None if shard is None else shard.host
        packed: dict[int, bytes] = {}
        for target in sorted({leg.target for leg in legs if leg.source == host}):
            assert shard is not None
            packed[target] = _pack(shard, [leg.key for leg in legs if (leg.source, leg.target) == (host, target)])
        self._bytes += sum(map(len, packed.values()))
        sources = sorted({leg.source for leg in legs if leg.target == host and host is not None})
        send, receive, sizes = ([0] * group.size for _ in range(3))
        for target, data in packed.items():
            send[group.holders[target]], sizes[group.holders[target]] = 1, len(data)
        for source in sources:
            receive[group.holders[source]] = 1
        own = torch.tensor([[len(data), *_digest(data)] for data in packed.values()], dtype=torch.int64)
        told = group.exchange(own.view(-1, 1 + DIGEST_WORDS), send, receive).wait().tolist()
        self._told = dict(zip(sources, told, strict=True))
        counts = [0] * group.size
        for source, (size, *_) in self._told.items():
            counts[group.holders[source]] = size
        sent = torch.frombuffer(bytearray(b"".join(packed.values())), dtype=torch.uint8) if packed else _nothing()
        self._pending = group.exchange(sent, sizes, counts)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _pack(shard: ExpertShard, keys: list[Key]) -> bytes:
    return tensors_to_bytes(
        {
            f"{layer}.{expert}.{field}": value.detach().to("cpu", copy=True).contiguous()
            for layer, expert in keys
            for field, value in shard.state_of((layer, expert)).items()
        }
    )


def _unpack(data: bytes, digest: list[int], *, into: dict[Key, dict[str, Tensor]]) -> bool:
    """Add the states in `data`; False where it is not what was sent."""
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
