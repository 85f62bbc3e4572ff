"""The end of a step, the same on every member: gradients to the homes, one vote, one commit, new weights out.

Worker and host both call it; what the vote finds (loss scale, shortage, non-finite) is decided alike on all members.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.config import Key, LayerShape
from experts.lifecycle.changes import change_experts, needed_states
from experts.lifecycle.controller import extra_counts
from experts.lifecycle.table import Change, ExpertTable, TableMismatch
from experts.member.moves import Migration, Transfer, exchange_along, gradient_transfers, send_fresh_weights
from experts.member.shard import CommitDecision, ExpertShard
from experts.placement.values import Placement
from experts.transport import HeaderMismatch, JointGroup
from raytrain.train.memory.device import Shortage

# ---------------------------------------------------------------- vote
# One sum over all members that carries all that a step must agree on, and what each member derives from it.

HEAD = ("step", "trunk", "nonfinite", "inverse_scale", "lr", "notice")
SPENT = ("busy_s", "moving_s", "sent_bytes")


@dataclass(frozen=True)
class VoteLayout:
    """Positions in the vote's vector.

    In order: the scalars of HEAD; the routed rows and the drops of each layer; the squared gradient norm of each
    expert; for each holder of experts the numbers of SPENT since the last vote; for each holder whether it ran out of
    memory. `notice` is the length in bytes of the message that rank 0 sends to everybody after the commit.
    """

    experts: tuple[int, ...]
    holders: int
    extra: int = 0

    @classmethod
    def of(cls, shapes: Sequence[LayerShape], *, holders: int, lifecycle: bool = False) -> VoteLayout:
        extra = extra_counts(len(shapes)) if lifecycle else 0
        return cls(tuple(shape.num_experts for shape in shapes), holders, extra)

    @property
    def counts(self) -> slice:
        """For each layer its E counts and its drops; then `extra` more."""
        return slice(len(HEAD), len(HEAD) + sum(self.experts) + len(self.experts) + self.extra)

    @property
    def squares(self) -> slice:
        return slice(self.counts.stop, self.counts.stop + sum(self.experts))

    @property
    def spent(self) -> slice:
        """(seconds computed, seconds moving experts, bytes of experts sent) of each holder."""
        return slice(self.squares.stop, self.squares.stop + len(SPENT) * self.holders)

    @property
    def shortages(self) -> slice:
        return slice(self.spent.stop, self.spent.stop + self.holders)

    def empty(self, step: int) -> Tensor:
        """This member's part, with only the step filled in."""
        vector = torch.zeros(self.shortages.stop, dtype=torch.float64)
        self.put(vector, step=step)
        return vector

    def put(self, vector: Tensor, **head: float) -> None:
        """Fill in scalars of HEAD by name."""
        for name, value in head.items():
            vector[HEAD.index(name)] = value

    def put_squares(self, vector: Tensor, squares: dict[Key, float]) -> None:
        """Fill in the experts at home here."""
        for (layer, expert), value in squares.items():
            vector[self.squares.start + sum(self.experts[:layer]) + expert] = value

    def nonfinite(self, vector: Tensor) -> list[Key]:
        """The experts whose squared norm is not finite."""
        keys = [(layer, expert) for layer, number in enumerate(self.experts) for expert in range(number)]
        finite = torch.isfinite(vector[self.squares]).tolist()
        return [key for key, good in zip(keys, finite, strict=True) if not good]

    def put_spent(self, vector: Tensor, holder: int, *, busy_s: float, moving_s: float, sent_bytes: int) -> None:
        """Fill in the numbers of this holder."""
        begin = self.spent.start + len(SPENT) * holder
        vector[begin : begin + len(SPENT)] = torch.tensor([busy_s, moving_s, sent_bytes], dtype=torch.float64)


@dataclass(frozen=True)
class VoteResult:
    """The summed vote; see also `VoteLayout`.

    Attributes:
        norm: global gradient norm before clipping. skip: whether everybody skips the step.
        shortages: one number for each holder if any ran out of memory, else empty: everybody drops the step.
        nonfinite: the experts whose gradients are not finite.
    """

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
    nonfinite: list[Key]

    def commit(self, max_grad_norm: float | None) -> CommitDecision:
        """The numbers for an optimizer on a host, equal to those of the workers' own step."""
        coefficient = 1.0
        if max_grad_norm:
            coefficient = float((max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0))
        return CommitDecision(bool(self.skip), coefficient, inverse_scale=self.inverse_scale, lr=self.lr)


def read_vote(layout: VoteLayout, vector: Tensor, *, step: int, members: int) -> VoteResult:
    """Read the summed vector.

    Raises:
        HeaderMismatch: the members did not vote on the same step.
    """
    head = dict(zip(HEAD, vector[: len(HEAD)].unbind(), strict=True))
    if float(head["step"]) != float(step) * members and torch.isfinite(head["step"]):
        raise HeaderMismatch(f"{members} members voted on step {step}, and their steps sum to {float(head['step']):g}")
    scale = float(head["inverse_scale"])
    norm = (head["trunk"] + vector[layout.squares].sum() * scale * scale).sqrt()
    skip = ~torch.isfinite(norm) | (head["nonfinite"] > 0)
    busy_s, moving_s, sent_bytes = vector[layout.spent].view(-1, len(SPENT)).T.tolist()
    shortages = vector[layout.shortages]
    nonfinite = [] if torch.isfinite(norm) else layout.nonfinite(vector)
    return VoteResult(
        norm, skip, vector[layout.counts], inverse_scale=scale, lr=float(head["lr"]), notice=int(head["notice"]),
        busy_s=busy_s, moving_s=moving_s, sent_bytes=sent_bytes,
        shortages=shortages.tolist() if shortages.any() else [], nonfinite=nonfinite,
    )  # fmt: skip


def shortages_of(shard: ExpertShard | None, holders: int) -> Tensor:
    """This member's part of one number for each holder of experts.

    0 where it had enough memory; else one more than the bytes that its tensors held, or 1 where they are not counted.
    """
    own = torch.zeros(holders, dtype=torch.float64)
    if shard is not None and shard.short is not None:
        own[shard.host] = 1 + (shard.short.allocated_bytes or 0)
    return own


def sum_shortages(group: JointGroup, shard: ExpertShard | None) -> list[float]:
    """Sum `shortages_of` over all members. Collective."""
    vector = shortages_of(shard, len(group.holders))
    group.all_reduce(vector)
    return vector.tolist()


def name_holder(holder: int, *, colocated: bool) -> str:
    return f"{'the experts of rank' if colocated else 'expert host'} {holder}"


def name_shortages(numbers: list[float], *, colocated: bool) -> list[Shortage]:
    """Name the holders that ran out of memory; `numbers` as `sum_shortages`."""
    return [
        Shortage(name_holder(holder, colocated=colocated), "OutOfMemoryError", allocated_bytes=int(value) - 1 or None)
        for holder, value in enumerate(numbers)
        if value
    ]


# ---------------------------------------------------------------- commit


class StepCommit:
    """One member's part in the end of each step.

    Attributes:
        placement: in force now.
        shard: this member's experts, None if it has none.
        refused: why the last announced placement was not adopted; empty if it was.
        table: of the experts, where they come and go.
    """

    def __init__(self, group: JointGroup, placement: Placement, layout: VoteLayout) -> None:
        self.group, self.placement, self.layout = group, placement, layout
        self.shard: ExpertShard | None = None
        self.migration = Migration(group)
        self.refused = ""
        self.table: ExpertTable | None = None

    def run(
        self, step: int, *, max_grad_norm: float | None, fill_in: Callable[[Tensor], None] | None = None,
        announcement: bytes | None = None,
    ) -> VoteResult:  # fmt: skip
        """Vote on `step`, a worker with `fill_in`, then commit, skip or drop it. Collective over all members.

        Args:
            announcement: rank 0's message to everybody: {"placement": the next one}, or the arguments of `change`.
        """
        self._sum_gradients()
        vector = self.layout.empty(step)
        if fill_in is not None:
            fill_in(vector)
        self.layout.put(vector, notice=len(announcement or b""))
        moving_s, sent_bytes = self.migration.take_spent()
        if self.shard is not None:
            self.layout.put_squares(vector, self.shard.squares())
            busy_s = self.shard.timer.take()
            self.layout.put_spent(vector, self.shard.host, busy_s=busy_s, moving_s=moving_s, sent_bytes=sent_bytes)
        vector[self.layout.shortages] = shortages_of(self.shard, self.layout.holders)
        self.group.all_reduce(vector)
        result = read_vote(self.layout, vector, step=step, members=self.group.size)
        if self.shard is not None:
            if result.shortages:
                self.shard.discard()
                self.migration.add_spent(moving_s, sent_bytes)  # reported with the next step that is committed
            else:
                self.shard.commit(result.commit(max_grad_norm), layers=self.shard.used)
        send_fresh_weights(self.group, self.shard, self.placement)  # new replicas are empty until now
        if result.notice and not result.shortages:
            message = self.migration.receive_announcement(result.notice, announcement)
            if "placement" in message:
                self.migration.begin(Placement.from_json(message["placement"]), self.placement, self.shard)
            else:
                began = time.perf_counter()
                self.change(step, **message)
                self.migration.add_spent(time.perf_counter() - began)
        return result

    def change(self, step: int, *, changes: Sequence[Mapping[str, Any]], homes: Mapping[str, int], table: int) -> None:
        """Change the experts that live here, at the end of `step`. Collective over all members.

        Args:
            changes: `Change.to_json` of each.
            homes: "layer.slot" of newcomers -> their homes, where those are not the slots'.
            table: the hash of the table afterwards.

        Raises:
            TableMismatch: this member's table differs.
        """
        before, wanted = self.table, [Change.from_json(row) for row in changes]
        assert before is not None, "experts change only where they come and go"
        self.table = before.after(wanted, step=step)
        if self.table.hash() != table:
            raise TableMismatch(f"step {step}: a member's table of experts differs from rank 0's after {wanted}")
        moved = self.placement
        for key, host in homes.items():
            layer, slot = map(int, key.split("."))
            moved = moved.with_copies(layer, slot, (host,))
        if moved is not self.placement:
            if self.shard is not None:
                self.shard.switch(moved, {})
            self.placement = moved
        needed = needed_states(wanted, before)
        transfers = {one: Transfer(one[0], moved.home_of(*one[0]), moved.home_of(*one[1])) for one in needed}
        arrived = self.migration.fetch(self.shard, [one for one in transfers.values() if one.source != one.target])
        if self.shard is None:
            return
        mine = set(self.shard.homes())
        fetched = {one: arrived[one[0]] for one in needed if one[0] in arrived}
        change_experts(
            self.shard.slot, self.shard.optimizers, wanted, before, step=step, held=mine.__contains__, fetched=fetched
        )
        self.shard.table = self.table

    def _sum_gradients(self) -> None:
        """Sum the gradients at the experts' homes: the new homes where experts have moved."""
        now, then, states = self.placement, self.placement, {}
        if self.migration.next is not None:
            following = self.migration.next
            states, self.refused = self.migration.finish()
            then = now if self.refused else following
        transfers = gradient_transfers(now, then)
        received = exchange_along(self.group, self.shard, transfers, gradients=True)
        if then is not now:
            began = time.perf_counter()
            if self.shard is not None:
                self.shard.switch(then, states)
            self.placement = then
            self.migration.add_spent(time.perf_counter() - began)
        for (layer, expert), pieces in received:
            assert self.shard is not None
            for view, piece in zip(self.shard.layers[layer].gradients_of(expert).values(), pieces, strict=True):
                view += piece
