"""The vote: one sum over all members that carries a whole step's agreement, and what everybody derives from it.

One float64 slot for each (layer, logical expert), zero but on its home: the norm is then the same to the last bit for
any placement, as the slots are added up in their own order and not in that of the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experts.member.shard import Commit, ExpertShard
from experts.shapes import Key, LayerShape
from experts.transport.protocol import HeaderMismatch, Transport
from raytrain.train.memory.oom import Shortage

HEAD = ("step", "trunk", "nonfinite", "inverse_scale", "lr", "notice")
SPENT = ("busy_s", "moving_s", "sent_bytes")


@dataclass(frozen=True)
class VoteLayout:
    """Where what stands in the vector: the head, the routed rows and drops of each layer, a square for each expert,
    and of each holder of experts since the last vote: seconds computed, seconds moving experts, bytes of them sent, and
    whether it had no memory for them.

    `notice` is the length in bytes of what rank 0 has to tell everybody after the commit.
    """

    experts: tuple[int, ...]
    holders: int

    @classmethod
    def of(cls, shapes: Sequence[LayerShape], *, holders: int) -> VoteLayout:
        """For the layers of a model."""
        return cls(tuple(shape.num_experts for shape in shapes), holders)

    @property
    def counts(self) -> slice:
        """Of each layer its E counts and its drops."""
        return slice(len(HEAD), len(HEAD) + sum(self.experts) + len(self.experts))

    @property
    def squares(self) -> slice:
        """One slot for each expert of each layer."""
        return slice(self.counts.stop, self.counts.stop + sum(self.experts))

    @property
    def spent(self) -> slice:
        """(busy seconds, moving seconds, bytes sent) of each holder."""
        return slice(self.squares.stop, self.squares.stop + len(SPENT) * self.holders)

    @property
    def shortages(self) -> slice:
        """Of each holder, see `shortages_of`."""
        return slice(self.spent.stop, self.spent.stop + self.holders)

    def empty(self, step: int) -> Tensor:
        """This member's part, still without anything but the step."""
        vector = torch.zeros(self.shortages.stop, dtype=torch.float64)
        vector[0] = step
        return vector

    def put_squares(self, vector: Tensor, squares: dict[Key, float]) -> None:
        """Fill in the experts at home here."""
        for (layer, expert), value in squares.items():
            vector[self.squares.start + sum(self.experts[:layer]) + expert] = value

    def put_spent(self, vector: Tensor, holder: int, *, busy_s: float, moving_s: float, sent_bytes: int) -> None:
        """Fill in this holder's."""
        begin = self.spent.start + len(SPENT) * holder
        vector[begin : begin + len(SPENT)] = torch.tensor([busy_s, moving_s, sent_bytes], dtype=torch.float64)


@dataclass(frozen=True)
class Tally:
    """What the sum says: global norm before clipping, whether everybody skips, the counts, scale and learning rate;
    bytes of rank 0's notice; what each holder spent, see `VoteLayout.spent`."""

    norm: Tensor
    skip: Tensor
    counts: Tensor
    inverse_scale: float
    lr: float
    notice: int
    busy_s: list[float]
    moving_s: list[float]
    sent_bytes: list[float]
    shortages: list[float]
    """One number for each holder where any of them had no memory, else nothing: the step is dropped by everybody."""

    def commit(self, max_grad_norm: float | None) -> Commit:
        """For an optimizer on a host: the same numbers as in the workers' own step."""
        coefficient = 1.0
        if max_grad_norm:
            coefficient = float((max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0))
        return Commit(skip=bool(self.skip), coefficient=coefficient, inverse_scale=self.inverse_scale, lr=self.lr)


def tally(layout: VoteLayout, vector: Tensor, *, step: int, members: int) -> Tally:
    """Read the summed vector.

    Raises:
        HeaderMismatch: the members did not vote on the same step.
    """
    if float(vector[0]) != float(step) * members and torch.isfinite(vector[0]):
        raise HeaderMismatch(f"{members} members voted on step {step}, and their steps add up to {float(vector[0]):g}")
    scale = float(vector[3])
    norm = (vector[1] + vector[layout.squares].sum() * scale * scale).sqrt()
    skip = ~torch.isfinite(norm) | (vector[2] > 0)
    busy_s, moving_s, sent_bytes = vector[layout.spent].view(-1, len(SPENT)).T.tolist()
    shortages = vector[layout.shortages]
    return Tally(
        norm,
        skip,
        vector[layout.counts],
        inverse_scale=scale,
        lr=float(vector[4]),
        notice=int(vector[5]),
        busy_s=busy_s,
        moving_s=moving_s,
        sent_bytes=sent_bytes,
        shortages=shortages.tolist() if shortages.any() else [],
    )


def shortages_of(shard: ExpertShard | None, holders: int) -> Tensor:
    """This member's part of one number for each holder of experts: 0 where it had memory enough, else one more than the
    bytes that its tensors held, or 1 where nobody counts them."""
    own = torch.zeros(holders, dtype=torch.float64)
    if shard is not None and shard.short is not None:
        own[shard.host] = 1 + (shard.short.allocated_bytes or 0)
    return own


def sum_shortages(group: Transport, shard: ExpertShard | None) -> list[float]:
    """Everybody's part of it. Collective over all members."""
    vector = shortages_of(shard, len(group.holders))
    group.all_reduce(vector)
    return vector.tolist()


def named(told: list[float], *, colocated: bool) -> list[Shortage]:
    """Whom the numbers of `shortages_of` are about."""
    who = "the experts of rank" if colocated else "expert host"
    return [
        Shortage(f"{who} {holder}", "OutOfMemoryError", allocated_bytes=int(value) - 1 or None)
        for holder, value in enumerate(told)
        if value
    ]
