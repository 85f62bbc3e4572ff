"""The end of a step, the same on every member of a generation: gradients come home, vote, commit, weights go out.

Where experts are on the move, this is also where everybody switches to the next placement.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from experts.member.migration import Migration
from experts.member.replicas import gradient_legs, gradients_of, send_fresh_weights, travelled
from experts.member.shard import ExpertShard
from experts.member.vote import Tally, VoteLayout, shortages_of, tally
from experts.placement.values import Placement
from experts.transport.protocol import Transport


class StepCommit:
    """One member's side of it.

    Args:
        placement: in force at the start.
        layout: of the vote.

    Attributes:
        placement: in force now.
        shard: this member's experts, None where it has none.
        refused: why the last announced placement was not taken; empty where it was.
    """

    def __init__(self, group: Transport, placement: Placement, layout: VoteLayout) -> None:
        self.group, self.placement, self.layout = group, placement, layout
        self.shard: ExpertShard | None = None
        self.migration = Migration(group)
        self.refused = ""

    def run(
        self, step: int, *, max_grad_norm: float | None, put_own: Callable[[Tensor], bytes | None] | None = None
    ) -> Tally:
        """Vote on `step` and commit it, or skip it, or drop it, with everybody. Collective over all members.

        Args:
            put_own: fills in a worker's part of the vote, and returns what rank 0 has to tell everybody.
        """
        self._gather()
        vector = self.layout.empty(step)
        notice = put_own(vector) if put_own is not None else None
        moving_s, sent_bytes = self.migration.take_spent()
        if self.shard is not None:
            self.layout.put_squares(vector, self.shard.squares())
            busy_s = self.shard.busy.take()
            self.layout.put_spent(vector, self.shard.host, busy_s=busy_s, moving_s=moving_s, sent_bytes=sent_bytes)
        vector[self.layout.shortages] = shortages_of(self.shard, self.layout.holders)
        self.group.all_reduce(vector)
        agreed = tally(self.layout, vector, step=step, members=self.group.size)
        if self.shard is not None:
            if agreed.shortages:
                self.shard.discard()
                self.migration.add_spent(moving_s, sent_bytes)  # told with the step that is taken instead
            else:
                self.shard.commit(agreed.commit(max_grad_norm))
        send_fresh_weights(self.group, self.shard, self.placement)  # replicas that are new are empty until now
        if agreed.notice and not agreed.shortages:
            self.migration.begin(agreed.notice, self.placement, self.shard, notice=notice)
        return agreed

    def _gather(self) -> None:
        """Gradients to the homes, which may be new ones."""
        now, then, states = self.placement, self.placement, {}
        if self.migration.next is not None:
            arrived = self.migration.finish(self.shard)
            self.refused = arrived.refused
            if not arrived.refused:
                then, states = arrived.placement, arrived.states
        came = travelled(self.group, self.shard, gradient_legs(now, then), views_of=gradients_of)
        if then is not now:
            began = time.perf_counter()
            if self.shard is not None:
                self.shard.switch(then, states)
            self.placement = then
            self.migration.add_spent(time.perf_counter() - began)
        for key, pieces in came:
            assert self.shard is not None
            for view, piece in zip(gradients_of(self.shard, key).values(), pieces, strict=True):
                view += piece
