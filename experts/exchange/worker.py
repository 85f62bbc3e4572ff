"""The worker's side of the expert exchange: every operation of a generation, in the one order of all members.

A pool belongs to one worker and one generation. It sets the experts up on first use, sends rows, takes part in the
vote, and has snapshots taken. Where experts are colocated, the worker's own shard computes between the two exchanges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experts.exchange.absence import Absence
from experts.exchange.host import header_words
from experts.exchange.membership import Membership
from experts.exchange.rebalancer import Balances
from experts.exchange.traffic import Traffic
from experts.member.checkpoint import ExpertFiles, ExpertSnapshot, await_files
from experts.member.commit import StepCommit
from experts.member.gather import gather_layer, scatter_layer, to_holders
from experts.member.shard import ExpertShard
from experts.member.vote import VoteLayout, named, sum_shortages
from experts.placement.values import Placement
from experts.routing.routes import LayerRoutes, Route
from experts.shapes import LayerShape
from experts.transport.protocol import WORDS, Header, Op, Transport
from raytrain.config.sections import OptimConfig
from raytrain.train.memory.oom import Shortage, StepDropped
from raytrain.train.parallel.interleave import Interleaver
from raytrain.trainable import GlobalStep, LocalStep, Notice

Weights = list[list[dict[str, Tensor]]]
"""[layer][expert]: weights by name."""


@dataclass
class PassSource:
    """Where the experts' state comes from at the next set-up: first weights (rank 0 has them), or a checkpoint."""

    first: Weights = field(default_factory=list)
    checkpoint: str | None = None


class ExpertClient:
    """See the module.

    Args:
        group: this worker's end of the joint group.
        shapes: of the layers of the model.
        first: the weights that the model was built with, of each layer and expert; on rank 0 and where colocated.
        balancer: who decides where experts live; on rank 0, None keeps the placement.

    Attributes:
        placement: in force. routes: of each layer, for it.
        busy_s: seconds that each holder of experts computed, since the beginning.
    """

    def __init__(
        self, group: Transport, membership: Membership, *, shapes: Sequence[LayerShape], first: Weights,
        balancer: Balances | None = None,
    ) -> None:  # fmt: skip
        self.group, self.member, self.shapes = group, membership, list(shapes)
        self.layout = VoteLayout.of(self.shapes, holders=len(group.holders))
        self._end = StepCommit(group, membership.placement, self.layout)
        self._take_placement(membership.placement)
        self.optim, self.dtype, self.device = OptimConfig(), torch.float32, torch.device("cpu")
        self.interleaver = Interleaver()
        self.steps = 0
        self.balancer = balancer
        self.busy_s = [0.0] * len(group.holders)
        self.traffic = Traffic(layers=len(self.shapes), hosts=self.placement.num_hosts, own=membership.host)
        self._source = PassSource(first)
        self._ready = False
        self._files: ExpertFiles | None = None
        self._forwards = [0] * len(self.shapes)
        self.recomputed: set[tuple[int, int]] = set()
        """(layer, micro-batch) of this step whose forward ran a second time."""
        self.absence = Absence(group, membership.workers, say=self.say, hear=self._hear)
        self._told: tuple[int, bytes | None] = (0, None)

    @property
    def shard(self) -> ExpertShard | None:
        """This worker's own experts, where they are colocated."""
        return self._end.shard

    def _take_placement(self, placement: Placement) -> None:
        self.placement = placement
        self.routes = [LayerRoutes.of(placement, layer) for layer in range(len(self.shapes))]
        self._words = header_words(placement)

    # -- what the builder's hooks call ------------------------------------------------------------------

    def configure(self, optim: OptimConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        """Optimizer and master dtype; the experts are set up anew before their next use."""
        self.optim, self.dtype, self.device = optim, dtype, device
        self._ready = False

    def restore(self, checkpoint: str, *, step: int) -> None:
        """Take the experts' state from this checkpoint before their next use."""
        self._source.checkpoint, self.steps = checkpoint, step
        self._ready = False

    def agree(self, local: LocalStep) -> GlobalStep:
        """The vote, and the experts' part of the commit. Collective over all members."""
        self._get_ready()
        self.say(Op.VOTE, step=local.step)
        notice = self._notice(local.step)

        def put_own(vector: Tensor) -> bytes | None:
            self._put_own(vector, local)
            vector[5] = len(notice or b"")
            return notice

        agreed = self._end.run(local.step, max_grad_norm=self.optim.max_grad_norm, put_own=put_own)
        self._forget_passes()
        self.busy_s = [total + own for total, own in zip(self.busy_s, agreed.busy_s, strict=True)]
        if self._end.placement is not self.placement:
            self._take_placement(self._end.placement)
            if self.member.rank == 0:
                self.member.switched(self.placement)
        if agreed.shortages:
            raise StepDropped(named(agreed.shortages, colocated=self.shard is not None))
        self.steps = local.step
        if self.balancer is not None:
            self.balancer.committed(local.step, agreed, self.placement, refused=self._end.refused)
        counts, device = local.counts, local.sum_of_squares.device
        counts = None if counts is None else agreed.counts.to(device)
        return GlobalStep(norm=agreed.norm.to(device), skip=agreed.skip.to(device), counts=counts)

    def notices(self) -> list[Notice]:
        """What rank 0's balancer has to say for the record."""
        return [] if self.balancer is None else self.balancer.notices()

    def _notice(self, step: int) -> bytes | None:
        """The next placement, where rank 0 has one to tell; the same for a step that is voted on again."""
        if self._told[0] != step:
            following = None if self.balancer is None else self.balancer.next(step)
            self._told = step, None if following is None else json.dumps(following.to_json()).encode()
        return self._told[1]

    def _put_own(self, vector: Tensor, local: LocalStep) -> None:
        """This worker's part of the vote, read from the device at once."""
        scale = torch.ones_like(local.sum_of_squares) if local.inverse_scale is None else local.inverse_scale
        own = torch.stack([local.sum_of_squares, local.nonfinite.double(), scale.double()])
        counts = own[:0] if local.counts is None else local.counts.double()
        squares, nonfinite, inverse_scale, *routed = torch.cat([own, counts]).tolist()
        vector[2] = nonfinite
        if self.member.rank == 0:  # the trunk's gradients are the same on every worker by now: they count once
            vector[1], vector[3], vector[4] = squares, inverse_scale, local.lr
        if routed:
            vector[self.layout.counts] = torch.tensor(routed, dtype=torch.float64)

    def discard(self) -> None:
        """Forget the gradients and passes of a step that is not taken, on all members."""
        self._forget_passes()
        if self._ready and not self.absence.all_again():
            self.say(Op.DISCARD)
        if self.shard is not None:
            self.shard.discard()

    def end_passes(self, *, short: bool) -> None:
        """This worker has come through its passes, or, `short`, takes no further part in them."""
        self._get_ready()
        self.absence.end_passes(self.shard, short=short)

    def shortages(self) -> list[Shortage]:
        """Which holders of experts had no memory since the last step or discard. Collective over all members."""
        self.say(Op.SHORTAGES)
        return named(sum_shortages(self.group, self.shard), colocated=self.shard is not None)

    def _forget_passes(self) -> None:
        self._forwards = [0] * len(self.shapes)
        self.recomputed.clear()

    # -- rows there and back ------------------------------------------------------------------------------

    def route(self, layer: int, counts: list[int]) -> Route:
        """Where the rows of one micro-batch go."""
        return self.routes[layer].route(counts)

    def begin_forward(self, layer: int, *, op: Op) -> int:
        """A forward through a layer begins; the number of its micro-batch in this step."""
        self._get_ready()
        if op in (Op.FORWARD, Op.RESERVE):
            self._forwards[layer] += 1
        micro_batch = self._forwards[layer] - 1
        if op is Op.RECOMPUTE:
            self.recomputed.add((layer, micro_batch))
        return micro_batch

    def idle_route(self, layer: int) -> Route:
        """No rows at all, in a micro-batch of the other workers."""
        return self.routes[layer].route([0] * self.shapes[layer].num_experts)

    # -- state --------------------------------------------------------------------------------------------

    def begin_save(self, step: int) -> None:
        """Everybody snapshots the experts at home with it and writes them in the background."""
        self._get_ready()
        self.say(Op.SAVE, step=step)
        if self.shard is not None:
            self._own_files().begin(ExpertSnapshot.of(self.shard), step=step)

    def finish_save(self, folder: str) -> dict[str, Any]:
        """Rank 0's writer thread: what the hosts have written into this checkpoint; see `await_files`."""
        return await_files(folder, self.placement.num_hosts, lost=self.member.lost)

    def fetch(self, layer: int) -> list[dict[str, Tensor]] | None:
        """The weights of each expert of a layer, on rank 0; None elsewhere. Collective."""
        self._get_ready()
        self.say(Op.FETCH, layer=layer)
        routes = self.routes[layer]
        return gather_layer(self.group, self.shapes[layer], layer, shard=self.shard, routes=routes, dtype=self.dtype)

    def end(self) -> None:
        """The hosts leave the generation; this pool is of no more use."""
        self.say(Op.END)
        self._end.migration.drop()

    # -- setting up -----------------------------------------------------------------------------------------

    def _get_ready(self) -> None:
        """Before the first use, and after a change of state: the experts are set up on their holders."""
        if self._ready:
            return
        self._ready = True
        self._forget_passes()
        if self.member.host is None:
            self._set_up_hosts()
        else:
            self._set_up_own(self.member.host)
        if self._source.checkpoint is None and self.member.host is None:
            for layer in range(len(self.shapes)):
                self.say(Op.FILL, layer=layer)
                first = self._source.first[layer] if self.member.rank == 0 else []
                scatter_layer(self.group, self.routes[layer], first, dtype=self.dtype)

    def _set_up_hosts(self) -> None:
        told = {
            "shapes": [shape.to_json() for shape in self.shapes],
            "optim": self.optim.model_dump(mode="json"),
            "dtype": str(self.dtype).removeprefix("torch."),
            "run_path": self.member.run_path,
            "checkpoint": self._source.checkpoint,
        }
        payload = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
        self.say(Op.SETUP, width=len(payload))
        to_holders(self.group, [payload] * len(self.group.holders), nothing=payload[:0])

    def _set_up_own(self, host: int) -> None:
        shard = ExpertShard(self.shapes, self.placement, host, optim=self.optim, dtype=self.dtype, device=self.device)
        self._end.shard = shard
        if self._source.checkpoint is not None:
            self._own_files().load(shard, self._source.checkpoint)
            return
        for layer, expert in shard.held():
            shard.set_weights((layer, expert), self._source.first[layer][expert])

    def _own_files(self) -> ExpertFiles:
        if self._files is None:
            assert self.member.host is not None
            self._files = ExpertFiles(self.member.run_path, host=self.member.host)
        return self._files

    # -- headers --------------------------------------------------------------------------------------------

    def say(
        self, op: Op, *, step: int | None = None, layer: int = 0, micro_batch: int = 0, dtype: int = 0, width: int = 0,
        slot_counts: list[list[int]] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Send an operation's header to every holder; returns the counts that come, where this worker holds experts."""
        header = Header(
            self.member.generation, self.placement.version, self.steps + 1 if step is None else step, op,
            layer=layer, micro_batch=micro_batch, dtype=dtype, width=width,
        )  # fmt: skip
        rows = torch.zeros((len(self.group.holders), self._words), dtype=torch.int64)
        rows[:, :WORDS] = torch.tensor(header.words())
        for host, counts in enumerate(slot_counts or ()):
            if counts:
                rows[host, WORDS : WORDS + len(counts)] = torch.tensor(counts)
        return self._hear(rows)

    def _hear(self, rows: Tensor | None = None) -> list[list[int]]:
        """Send headers, if any, and read what comes: the counts of each worker, where this one holds experts."""
        came = self.group.headers(rows, self._words, out=self.absence.out)
        if not came:
            return []
        counts = self.absence.read(came, generation=self.member.generation, version=self.placement.version)
        if self.shard is not None and self.absence.out:
            self.shard.dropping = True
        return counts
