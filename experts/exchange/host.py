"""What an expert host does all day: wait for a header, take part in the operation it names. One data thread, no Ray.

The order of operations is the workers'; a host never decides anything but how to compute.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from experts.exchange.attendance import Attendance
from experts.member.checkpoint import ExpertFiles, ExpertSnapshot
from experts.member.commit import StepCommit
from experts.member.gather import from_first, gather_layer, take_layer
from experts.member.shard import ExpertShard
from experts.member.vote import VoteLayout, sum_shortages
from experts.placement.values import Placement
from experts.shapes import LayerShape
from experts.transport.protocol import DTYPES, WORDS, Header, Op, Transport
from raytrain.config.sections import OptimConfig
from raytrain.train.memory.oom import Shortage, run_or_shortage


class HostServer:
    """One host in one generation.

    Args:
        group: its end of the joint group.
        host: its index, 0 to H - 1; its rank is W + host.
        generation: every header must carry it.
        placement: in force at the start.
        device: of its experts.
    """

    def __init__(
        self, group: Transport, *, host: int, generation: int, placement: Placement, device: torch.device
    ) -> None:
        self.group, self.host, self.generation = group, host, generation
        self.placement, self.device = placement, device
        self.shard: ExpertShard | None = None
        self.files: ExpertFiles | None = None
        self.steps = 0
        self._attendance = Attendance(self.workers)
        self._end: StepCommit | None = None
        self._words = header_words(placement)
        self._does: dict[Op, Callable[[Header, list[list[int]]], None]] = {
            Op.SETUP: self._set_up, Op.FILL: self._fill, Op.FORWARD: self._forward, Op.RESERVE: self._forward,
            Op.RECOMPUTE: self._forward, Op.EVALUATE: self._forward, Op.BACKWARD: self._backward, Op.VOTE: self._vote,
            Op.DISCARD: self._discard, Op.SAVE: self._save, Op.FETCH: self._fetch,
            Op.SHORTAGES: self._shortages,
        }  # fmt: skip

    @property
    def workers(self) -> int:
        """How many workers send headers."""
        return self.group.size - len(self.group.holders)

    def serve(self) -> None:
        """Until the workers end it.

        Raises:
            Aborted: the generation is over. HeaderMismatch: the workers disagree. Whatever an expert raises.
        """
        while True:
            rows = self.group.headers(None, self._words, out=self._attendance.out)
            header, counts = self._attendance.read(rows, generation=self.generation, version=self.placement.version)
            if self._attendance.out:
                self._set().dropping = True
            if header is None:
                self._discard()
            elif header.op == Op.END:
                return self._end.migration.drop() if self._end is not None else None
            else:
                self._does[header.op](header, counts)

    # -- operations -------------------------------------------------------------------------------

    def _set_up(self, header: Header, _counts: list[list[int]]) -> None:
        told = json.loads(bytes(from_first(self.group, header.width, dtype=torch.uint8).numpy()))
        shapes = [LayerShape.from_json(shape) for shape in told["shapes"]]
        self.shard = ExpertShard(
            shapes,
            self.placement,
            self.host,
            optim=OptimConfig(**told["optim"]),
            dtype=getattr(torch, told["dtype"]),
            device=self.device,
        )
        layout = VoteLayout.of(shapes, holders=len(self.group.holders))
        self._end = StepCommit(self.group, self.placement, layout)
        self._end.shard = self.shard
        self.files = ExpertFiles(told["run_path"], host=self.host)
        if told["checkpoint"] is not None:
            self.files.load(self.shard, told["checkpoint"])

    def _fill(self, header: Header, _counts: list[list[int]]) -> None:
        take_layer(self.group, self._set(), header.layer)

    def _forward(self, header: Header, counts: list[list[int]]) -> None:
        shard = self._set()
        sources = self._sources(header, counts)
        rows = self._receive(header, sources)
        keep = header.op in (Op.FORWARD, Op.RECOMPUTE)
        self._send(shard.forward(header.layer, header.micro_batch, rows, sources, keep=keep), sources)

    def _backward(self, header: Header, counts: list[list[int]]) -> None:
        sources = self._sources(header, counts)
        grads = self._receive(header, sources)
        self._send(self._set().backward(header.layer, header.micro_batch, grads, sources), sources)

    def _vote(self, header: Header, _counts: list[list[int]]) -> None:
        assert self._end is not None
        self._end.run(header.step, max_grad_norm=self._set().optim.max_grad_norm)
        self.steps = header.step
        if self._end.placement is not self.placement:
            self.placement = self._end.placement
            self._words = header_words(self.placement)

    def _discard(self, _header: Header | None = None, _counts: list[list[int]] | None = None) -> None:
        self._set().discard()
        self._attendance.all_again()

    def _shortages(self, _header: Header, _counts: list[list[int]]) -> None:
        sum_shortages(self.group, self._set())

    def _save(self, header: Header, _counts: list[list[int]]) -> None:
        assert self.files is not None
        self.files.begin(ExpertSnapshot.of(self._set()), step=header.step)

    def _fetch(self, header: Header, _counts: list[list[int]]) -> None:
        shard, layer = self._set(), header.layer
        gather_layer(self.group, shard.shapes[layer], layer, shard=shard, routes=None, dtype=shard.dtype)

    # -- the wire ---------------------------------------------------------------------------------

    def _set(self) -> ExpertShard:
        assert self.shard is not None, "the first operation of a generation sets the experts up"
        return self.shard

    def _sources(self, header: Header, counts: list[list[int]]) -> list[list[int]]:
        slots = len(self._set().layers[header.layer].experts)
        return [row[:slots] for row in counts]

    def _receive(self, header: Header, sources: list[list[int]]) -> Tensor:
        nothing = torch.empty((0, header.width), dtype=DTYPES[header.dtype], device=self.device)
        receive = [sum(source) for source in sources] + [0] * (self.group.size - self.workers)
        room = run_or_shortage(
            lambda: self._room(sum(receive), header), device=self.device, who=f"expert host {self.host}"
        )
        if isinstance(room, Shortage):  # what is kept for backward makes room: the step is dropped by then
            self._set().ran_out(room)
            room = self._room(sum(receive), header)
        return self.group.exchange(nothing, [0] * self.group.size, receive, into=room).wait()

    def _room(self, rows: int, header: Header) -> Tensor:
        return torch.empty((rows, header.width), dtype=DTYPES[header.dtype], device=self.device)

    def _send(self, rows: Tensor, sources: list[list[int]]) -> None:
        send = [sum(source) for source in sources] + [0] * (self.group.size - self.workers)
        self.group.exchange(rows, send, [0] * self.group.size).wait()


def header_words(placement: Placement) -> int:
    """Of a header with the counts of the host that has the most slots in any layer."""
    return WORDS + max(1, *(max(map(len, layer.by_host.values())) for layer in placement.layers))
