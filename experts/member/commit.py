"""The end of a step, the same on every member: gradients go to the homes, vote, commit, new weights go to the replicas.

Where experts are moving, this is also where all members switch to the next placement.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from experts.member.migration import Migration
from experts.member.replicas import exchange_along, gradient_transfers, gradients_of, send_fresh_weights
from experts.member.shard import ExpertShard
from experts.member.vote import VoteLayout, VoteResult, read_vote, shortages_of
from experts.placement.values import Placement
from experts.shapes import LayerShape
from experts.transport.protocol import Transport


class StepCommit:
    """One member's part in the end of each step.

    Args:
        placement: in force at the start.
        layout: of the vote.

    Attributes:
        placement: in force now.
        shard: this member's experts, None if it has none.
        refused: why the last announced placement was not adopted; empty if it was.
    """

    def __init__(self, group: Transport, placement: Placement, layout: VoteLayout) -> None:
        self.group, self.placement, self.layout = group, placement, layout
        self.shard: ExpertShard | None = None
        self.migration = Migration(group)
        self.refused = ""

    def run(
        self, step: int, *, max_grad_norm: float | None, fill_in: Callable[[Tensor], None] | None = None,
        announcement: bytes | None = None,
    ) -> VoteResult:  # fmt: skip
        """Vote on `step`, then commit, skip or drop it. Collective over all members.

        Args:
            fill_in: fills in a worker's part of the vote.
            announcement: rank 0's message to everybody, the next placement.
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
            self.migration.begin(result.notice, self.placement, self.shard, announcement=announcement)
        return result

    def _sum_gradients(self) -> None:
        """Sum the gradients at the experts' homes: the new homes where experts have moved."""
        now, then, states = self.placement, self.placement, {}
        if self.migration.next is not None:
            migrated = self.migration.finish(self.shard)
            self.refused = migrated.refused
            if not migrated.refused:
                then, states = migrated.placement, migrated.states
        received = exchange_along(
            self.group, self.shard, gradient_transfers(now, then), views_of=gradients_of, shapes_of=LayerShape.trained
        )
        if then is not now:
            began = time.perf_counter()
            if self.shard is not None:
                self.shard.switch(then, states)
            self.placement = then
            self.migration.add_spent(time.perf_counter() - began)
        for key, pieces in received:
            assert self.shard is not None
            for view, piece in zip(gradients_of(self.shard, key).values(), pieces, strict=True):
                view += piece
