"""What an expert host does all day: wait for a header, take part in the operation it names. One data thread, no Ray.

The order of operations is the workers'; a host never decides anything but how to compute.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from experts.placement import Placement
from experts.replicas import gather_replica_gradients, send_fresh_weights
from experts.save import ExpertFiles, Snapshot
from experts.shard import ExpertShard, LayerShape
from experts.transport.protocol import DTYPES, WORDS, Header, Op, Transport, read_headers
from experts.vote import VoteLayout, tally
from raytrain.config import OptimConfig


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
        self._words = WORDS + max(1, *(max(map(len, layer.by_host.values())) for layer in placement.layers))
        self._does: dict[Op, Callable[[Header, list[list[int]]], None]] = {
            Op.SETUP: self._set_up, Op.FILL: self._fill, Op.FORWARD: self._forward, Op.RESERVE: self._forward,
            Op.RECOMPUTE: self._forward, Op.EVALUATE: self._forward, Op.BACKWARD: self._backward, Op.VOTE: self._vote,
            Op.DISCARD: self._discard, Op.SAVE: self._save, Op.FETCH: self._fetch,
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
            rows = self.group.headers(None, self._words)
            header = read_headers(rows, generation=self.generation, version=self.placement.version)
            if header.op == Op.END:
                return
            self._does[header.op](header, [row[WORDS:] for row in rows])

    # -- operations -------------------------------------------------------------------------------

    def _set_up(self, header: Header, _counts: list[list[int]]) -> None:
        told = json.loads(bytes(self._from_first(header.width, dtype=torch.uint8).numpy()))
        self.shard = ExpertShard(
            [LayerShape(**shape) for shape in told["shapes"]],
            self.placement,
            self.host,
            optim=OptimConfig(**told["optim"]),
            dtype=getattr(torch, told["dtype"]),
            device=self.device,
        )
        self.files = ExpertFiles(told["run_path"], host=self.host)
        if told["checkpoint"] is not None:
            self.files.load(self.shard, told["checkpoint"])

    def _fill(self, header: Header, _counts: list[list[int]]) -> None:
        shard = self._set()
        shape = shard.shapes[header.layer]
        held = shard.layers[header.layer].experts
        flat = self._from_first(len(held) * shape.numel, dtype=shard.dtype)
        for expert, piece in zip(held, flat.split(shape.numel) if held else (), strict=True):
            shard.set_weights((header.layer, expert), unpack(piece, shape))

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
        shard = self._set()
        gather_replica_gradients(self.group, shard, self.placement)
        layout = VoteLayout.of(shard.shapes)
        vector = layout.empty(header.step)
        layout.put_squares(vector, shard.squares())
        self.group.sum_(vector)
        agreed = tally(layout, vector, step=header.step, members=self.group.size)
        shard.commit(agreed.commit(shard.optim.max_grad_norm))
        send_fresh_weights(self.group, shard, self.placement)
        self.steps = header.step

    def _discard(self, _header: Header, _counts: list[list[int]]) -> None:
        self._set().discard()

    def _save(self, header: Header, _counts: list[list[int]]) -> None:
        assert self.files is not None
        self.files.begin(Snapshot.of(self._set()), step=header.step)

    def _fetch(self, header: Header, _counts: list[list[int]]) -> None:
        shard = self._set()
        homes = [expert for layer, expert in shard.homes() if layer == header.layer]
        pieces = [pack(shard.weights_of((header.layer, expert))) for expert in homes]
        sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=shard.dtype)
        self.group.exchange(sent, [len(sent)] + [0] * (self.group.size - 1), [0] * self.group.size).wait()

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
        return self.group.exchange(nothing, [0] * self.group.size, receive).wait()

    def _send(self, rows: Tensor, sources: list[list[int]]) -> None:
        send = [sum(source) for source in sources] + [0] * (self.group.size - self.workers)
        self.group.exchange(rows, send, [0] * self.group.size).wait()

    def _from_first(self, count: int, *, dtype: torch.dtype) -> Tensor:
        nothing = torch.empty(0, dtype=dtype)
        receive = [count] + [0] * (self.group.size - 1)
        return self.group.exchange(nothing, [0] * self.group.size, receive).wait()


def pack(weights: dict[str, Tensor]) -> Tensor:
    """The weights of one expert as one CPU vector."""
    return torch.cat([weight.reshape(-1).cpu() for weight in weights.values()])


def unpack(flat: Tensor, shape: LayerShape) -> dict[str, Tensor]:
    """The inverse of `pack`; views."""
    sizes = shape.weights()
    pieces = flat.split([rows * columns for rows, columns in sizes.values()])
    return {name: piece.view(size) for (name, size), piece in zip(sizes.items(), pieces, strict=True)}
