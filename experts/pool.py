"""The worker's side of the expert exchange: every operation of a generation, in the one order of all members.

A pool belongs to one worker and one generation. It sets the experts up on first use, sends rows, takes part in the
vote, and has snapshots taken. Where experts are colocated, the worker's own shard computes between the two exchanges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experts.call import Call
from experts.placement import Placement
from experts.replicas import gather_replica_gradients, send_fresh_weights
from experts.routes import LayerRoutes, Route
from experts.save import ExpertFiles, Snapshot, await_files
from experts.serve import pack, unpack
from experts.shard import ExpertShard, LayerShape
from experts.transport.protocol import WORDS, Header, Op, Transport, read_headers
from experts.vote import VoteLayout, tally
from raytrain.config import OptimConfig
from raytrain.gradients import WorkersGroup
from raytrain.trainable import GlobalStep, LocalStep


@dataclass(frozen=True)
class Membership:
    """What a worker is told when it joins a generation.

    Attributes:
        rank, workers: this worker, and how many there are.
        placement: in force at the start; `placement.num_hosts` hosts.
        host: the index of this worker's own shard where experts are colocated, else None.
        workers_group: of the workers alone, which ends with the generation; None is torch's default group.
        lost: why the generation is over, None while it lives.
        note: what is different from the generation before; for the record.
    """

    generation: int
    rank: int
    workers: int
    placement: Placement
    run_path: str
    host: int | None = None
    workers_group: WorkersGroup | None = None
    lost: Callable[[], str | None] = lambda: None
    note: str = ""


@dataclass
class Source:
    """Where the experts' state comes from at the next set-up: first weights (rank 0 has them), or a checkpoint."""

    first: list[dict[str, Tensor]] = field(default_factory=list)
    checkpoint: str | None = None


class ExpertPool:
    """See the module.

    Args:
        group: this worker's end of the joint group.
        shapes: of the layers of the model.
        first: the weights that the model was built with, stacked per layer; read on rank 0 and where colocated.
    """

    def __init__(
        self,
        group: Transport,
        membership: Membership,
        *,
        shapes: Sequence[LayerShape],
        first: list[dict[str, Tensor]],
    ) -> None:
        self.group, self.member, self.shapes = group, membership, list(shapes)
        self.placement = membership.placement
        self.routes = [LayerRoutes.of(self.placement, layer) for layer in range(len(self.shapes))]
        self.layout = VoteLayout.of(self.shapes)
        self.optim, self.dtype, self.device = OptimConfig(), torch.float32, torch.device("cpu")
        self.steps = 0
        self.shard: ExpertShard | None = None
        self._source = Source(first)
        self._ready = False
        self._files: ExpertFiles | None = None
        self._forwards = [0] * len(self.shapes)
        self.recomputed: set[tuple[int, int]] = set()
        """(layer, micro-batch) of this step whose forward ran a second time."""
        self._words = WORDS + max(1, *(routes.most_slots for routes in self.routes))

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
        gather_replica_gradients(self.group, self.shard, self.placement)
        vector = self.layout.empty(local.step)
        self._put_own(vector, local)
        if self.shard is not None:
            self.layout.put_squares(vector, self.shard.squares())
        self.group.sum_(vector)
        agreed = tally(self.layout, vector, step=local.step, members=self.group.size)
        if self.shard is not None:
            self.shard.commit(agreed.commit(self.optim.max_grad_norm))
        send_fresh_weights(self.group, self.shard, self.placement)
        self.steps = local.step
        self._forget_passes()
        device = local.sum_of_squares.device
        counts = None if local.counts is None else agreed.counts.to(device)
        return GlobalStep(norm=agreed.norm.to(device), skip=agreed.skip.to(device), counts=counts)

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
        if not self._ready:
            return
        self.say(Op.DISCARD)
        if self.shard is not None:
            self.shard.discard()

    def _forget_passes(self) -> None:
        self._forwards = [0] * len(self.shapes)
        self.recomputed.clear()

    # -- rows there and back ------------------------------------------------------------------------------

    def route(self, layer: int, counts: list[int]) -> Route:
        """Where the rows of one micro-batch go."""
        return self.routes[layer].route(counts)

    def begin_forward(self, layer: int, rows: Tensor, route: Route, *, op: Op) -> Call:
        """Send rows (in the order of the route's segments) on their way."""
        self._get_ready()
        if op in (Op.FORWARD, Op.RESERVE):
            self._forwards[layer] += 1
        call = Call(self, layer, self._forwards[layer] - 1, route, rows.dtype, rows.shape[1])
        if op is Op.RECOMPUTE:
            self.recomputed.add((layer, call.micro_batch))
        call.begin(op, rows)
        return call

    def idle_route(self, layer: int) -> Route:
        """No rows at all, in a micro-batch of the other workers."""
        return self.routes[layer].route([0] * self.shapes[layer].num_experts)

    # -- state --------------------------------------------------------------------------------------------

    def begin_save(self, step: int) -> None:
        """Everybody snapshots the experts at home with it and writes them in the background."""
        self._get_ready()
        self.say(Op.SAVE, step=step)
        if self.shard is not None:
            self._own_files().begin(Snapshot.of(self.shard), step=step)

    def finish_save(self, folder: str) -> dict[str, Any]:
        """Rank 0's writer thread: what the hosts have written into this checkpoint; see `await_files`."""
        return await_files(folder, self.placement.num_hosts, lost=self.member.lost)

    def fetch(self, layer: int) -> dict[str, Tensor] | None:
        """The stacked weights of a layer, (E, ...), on rank 0; None elsewhere. Collective."""
        self._get_ready()
        self.say(Op.FETCH, layer=layer)
        shape, placed = self.shapes[layer], self.routes[layer]
        homes = [[expert for expert, copy in held if copy == 0] for held in placed.slots]
        own = [expert for held_layer, expert in (self.shard.homes() if self.shard else []) if held_layer == layer]
        pieces = [pack(self.shard.weights_of((layer, expert))) for expert in own if self.shard]
        sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=self.dtype)
        receive = [0] * self.group.size
        if self.member.rank == 0:
            for host, rank in enumerate(self.group.holders):
                receive[rank] = len(homes[host]) * shape.numel
        received = self.group.exchange(sent, [len(sent)] + [0] * (self.group.size - 1), receive).wait()
        if self.member.rank:
            return None
        experts: dict[int, dict[str, Tensor]] = {}
        for host, piece in enumerate(received.split([receive[rank] for rank in self.group.holders])):
            for expert, flat in zip(homes[host], piece.split(shape.numel) if len(piece) else (), strict=True):
                experts[expert] = unpack(flat, shape)
        return {name: torch.stack([experts[e][name] for e in range(shape.num_experts)]) for name in shape.weights()}

    def end(self) -> None:
        """The hosts leave the generation; this pool is of no more use."""
        self.say(Op.END)

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
                self._fill(layer)

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
        hosts = len(self.group.holders)
        self._from_first([payload] * hosts, nothing=payload[:0])

    def _set_up_own(self, host: int) -> None:
        self.shard = ExpertShard(
            self.shapes, self.placement, host, optim=self.optim, dtype=self.dtype, device=self.device
        )
        if self._source.checkpoint is not None:
            self._own_files().load(self.shard, self._source.checkpoint)
            return
        for layer, expert in self.shard.held():
            weights = {name: value[expert] for name, value in self._source.first[layer].items()}
            self.shard.set_weights((layer, expert), weights)

    def _fill(self, layer: int) -> None:
        """Rank 0's first weights of a layer to all copies of its experts."""
        self.say(Op.FILL, layer=layer)
        pieces = []
        if self.member.rank == 0:
            first = {name: value.to(self.dtype) for name, value in self._source.first[layer].items()}
            for held in self.routes[layer].slots:
                own = [pack({name: value[expert] for name, value in first.items()}) for expert, _ in held]
                pieces.append(torch.cat(own) if own else torch.empty(0, dtype=self.dtype))
        self._from_first(pieces, nothing=torch.empty(0, dtype=self.dtype))

    def _from_first(self, pieces: list[Tensor], *, nothing: Tensor) -> None:
        """One tensor from rank 0 to each host; the other workers send nothing."""
        send = [0] * self.group.size
        sent = nothing
        if self.member.rank == 0:
            for rank, piece in zip(self.group.holders, pieces, strict=True):
                send[rank] = len(piece)
            sent = torch.cat(pieces)
        self.group.exchange(sent, send, [0] * self.group.size).wait()

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
        came = self.group.headers(rows, self._words)
        if came:
            read_headers(came, generation=self.member.generation, version=self.placement.version)
        return [row[WORDS:] for row in came]
