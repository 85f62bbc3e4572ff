"""The data plane of an expert host: wait for a header, take part in the operation that it names. One thread, no Ray.

The workers decide the order of operations; a host decides nothing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts.config import LayerShape
from experts.exchange.oom_dropout import ActiveWorkers
from experts.lifecycle.table import ExpertTable
from experts.member.checkpoint import ExpertFiles, snapshot
from experts.member.commit import StepCommit, VoteLayout, sum_shortages
from experts.member.moves import from_first, gather_layer, take_layer
from experts.member.shard import ExpertShard, rows_by_rank
from experts.placement.values import Placement
from experts.transport import DTYPES, HEADER_SIZE, ROW_OPERATIONS, Channel, Exchange, Header, JointGroup, Op
from raytrain.config.sections import OptimConfig
from raytrain.train.device import apply_process_settings
from raytrain.train.memory.device import Shortage, run_or_shortage

SENDS = 2
"""Sends of a host on a GPU that may be under way while it computes; each keeps its rows in memory."""


@dataclass(frozen=True)
class ExpertSetup:
    """What a holder of experts builds its shard from. Rank 0 sends it to the hosts with SETUP.

    Attributes:
        dtype: of the master weights.
        checkpoint: folder to load the experts from; None where they get the weights of the new model.
        process: settings of the workers' processes, which a host applies to its own.
        trains: see `Membership`.
        table: of the experts, where they come and go.
    """

    shapes: Sequence[LayerShape]
    optim: OptimConfig
    dtype: torch.dtype
    run_path: str
    checkpoint: str | None
    process: dict[str, Any]
    trains: bool = True
    table: ExpertTable | None = None

    def encode(self) -> bytes:
        row = {
            "shapes": [shape.to_json() for shape in self.shapes],
            "optim": self.optim.model_dump(mode="json"),
            "dtype": str(self.dtype).removeprefix("torch."),
            "run_path": self.run_path,
            "checkpoint": self.checkpoint,
            "process": self.process,
            "trains": self.trains,
            "table": None if self.table is None else self.table.to_json(),
        }
        return json.dumps(row).encode()

    @classmethod
    def decode(cls, data: bytes) -> ExpertSetup:
        row = json.loads(data)
        shapes = [LayerShape.from_json(shape) for shape in row["shapes"]]
        dtype, process = getattr(torch, row["dtype"]), row["process"]
        optim = OptimConfig(**row["optim"])
        table = None if row["table"] is None else ExpertTable.from_json(row["table"])
        return cls(shapes, optim, dtype, row["run_path"], row["checkpoint"], process, row["trains"], table)

    def build(self, placement: Placement, host: int, *, device: torch.device, files: ExpertFiles) -> ExpertShard:
        """Build the shard of `host`; loads the checkpoint if there is one."""
        shard = ExpertShard(
            list(self.shapes), placement, host, optim=self.optim, dtype=self.dtype, device=device, trains=self.trains
        )
        shard.table = self.table
        if self.checkpoint is not None:
            files.load(shard, self.checkpoint)
        return shard


class HostServer:
    """One host in one generation.

    Args:
        host: its index, 0 to H - 1; its rank is W + host.
        generation: every header must carry it.
        placement: in force at the start.
    """

    def __init__(
        self, group: JointGroup, *, host: int, generation: int, placement: Placement, device: torch.device
    ) -> None:
        self.group, self.host, self.generation = group, host, generation
        self.placement, self.device = placement, device
        self.files: ExpertFiles | None = None
        self._stopped = False
        self.steps = 0
        self._active_workers = ActiveWorkers(group.size - len(group.holders))
        self._commit: StepCommit | None = None
        self._header_size = header_size(placement)
        self._sends: deque[Exchange] = deque()
        self._operations: dict[Op, Callable[[Header, list[list[int]]], Any]] = {
            Op.SETUP: self._set_up, Op.FORWARD: self._forward, Op.RESERVE: self._forward, Op.RECOMPUTE: self._forward,
            Op.EVALUATE: self._forward, Op.BACKWARD: self._backward, Op.VOTE: self._vote, Op.SAVE: self._save,
            Op.DISCARD: self._discard, Op.FETCH: self._fetch,
            Op.FILL: lambda header, _counts: take_layer(self.group, self.shard, header.layer),
            Op.SHORTAGES: lambda _header, _counts: sum_shortages(self.group, self.shard),
        }  # fmt: skip

    @property
    def shard(self) -> ExpertShard:
        """This host's experts; SETUP, the first operation of a generation, builds them."""
        assert self._commit is not None and self._commit.shard is not None, "no SETUP before this operation"
        return self._commit.shard

    def serve(self) -> None:
        """Take part in operations until the workers end the generation.

        Raises:
            Aborted: the generation is over. HeaderMismatch: the workers disagree. Whatever an expert raises.
        """
        while True:
            header, counts = self._active_workers.receive(
                self.group, None, self._header_size, generation=self.generation, version=self.placement.version
            )
            if self._active_workers.dropped:
                self.shard.dropping = True
            if header is None:
                self._finish_sends()
                self._discard()
            elif header.op == Op.END:
                self._finish_sends()
                if self._commit is not None:
                    self._commit.migration.drop()
                return
            else:
                if header.op not in ROW_OPERATIONS:
                    self._finish_sends()
                self._operations[header.op](header, counts)

    def stop(self) -> None:
        """End the read of a checkpoint, from another thread; the group's `abort` ends everything else."""
        self._stopped = True
        if self.files is not None:
            self.files.stop()

    # -- operations -------------------------------------------------------------------------------

    def _set_up(self, header: Header, _counts: list[list[int]]) -> None:
        setup = ExpertSetup.decode(bytes(from_first(self.group, header.width, dtype=torch.uint8).numpy()))
        apply_process_settings(setup.process)
        self.files = ExpertFiles(setup.run_path, host=self.host)
        if self._stopped:
            self.files.stop()
        lifecycle = setup.table is not None
        layout = VoteLayout.of(setup.shapes, holders=len(self.group.holders), lifecycle=lifecycle)
        self._commit = StepCommit(self.group, self.placement, layout)
        self._commit.table = setup.table
        self._active_workers.layers = [shape.name for shape in setup.shapes]
        self._commit.shard = setup.build(self.placement, self.host, device=self.device, files=self.files)

    def _forward(self, header: Header, counts: list[list[int]]) -> None:
        sources = self.shard.sources(header.layer, counts)
        rows = self._receive(header, sources)
        keep = header.op in (Op.FORWARD, Op.RECOMPUTE)
        self._send(self.shard.forward(header.layer, header.micro_batch, rows, sources, keep=keep), sources)

    def _backward(self, header: Header, counts: list[list[int]]) -> None:
        sources = self.shard.sources(header.layer, counts)
        grads = self._receive(header, sources)
        self._send(self.shard.backward(header.layer, header.micro_batch, grads, sources), sources)

    def _vote(self, header: Header, _counts: list[list[int]]) -> None:
        assert self._commit is not None
        self._commit.run(header.step, max_grad_norm=self.shard.optim.max_grad_norm)
        self.steps = header.step
        if self._commit.placement is not self.placement:
            self.placement = self._commit.placement
            self._header_size = header_size(self.placement)

    def _discard(self, _header: Header | None = None, _counts: list[list[int]] | None = None) -> None:
        self.shard.discard()
        self._active_workers.dropped.clear()

    def _save(self, header: Header, _counts: list[list[int]]) -> None:
        assert self.files is not None
        self.files.begin(snapshot(self.shard), step=header.step)

    def _fetch(self, header: Header, _counts: list[list[int]]) -> None:
        shard, layer = self.shard, header.layer
        gather_layer(self.group, shard.shapes[layer], layer, shard=shard, routes=None, dtype=shard.dtype)

    # -- rows -------------------------------------------------------------------------------------

    def _receive(self, header: Header, sources: list[list[int]]) -> Tensor:
        receive = rows_by_rank(sources, self.group.size)

        def allocate() -> Tensor:
            return torch.empty((sum(receive), header.width), dtype=DTYPES[header.dtype], device=self.device)

        rows = run_or_shortage(allocate, device=self.device, who=f"expert host {self.host}")
        if isinstance(rows, Shortage):  # the step is dropped: releasing what backward needs makes room
            self.shard.ran_out(rows)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # released blocks may be too small, or of another stream
            rows = allocate()
        nothing, none = rows[:0], [0] * self.group.size
        return self.group.exchange(nothing, none, receive, channel=Channel.TO_HOLDERS, into=rows).wait()

    def _send(self, rows: Tensor, sources: list[list[int]]) -> None:
        """On a GPU the last `SENDS` stay under way: `wait` would make the stream of the next products wait for them."""
        send, none = rows_by_rank(sources, self.group.size), [0] * self.group.size
        self._sends.append(self.group.exchange(rows, send, none, channel=Channel.TO_WORKERS))
        self._finish_sends(SENDS if self.device.type == "cuda" else 0)

    def _finish_sends(self, keep: int = 0) -> None:
        while len(self._sends) > keep:
            self._sends.popleft().wait()


def header_size(placement: Placement) -> int:
    """Int64 words of a header with the counts of the host that has the most slots in any layer."""
    return HEADER_SIZE + max(1, *(max(map(len, layer.by_host.values())) for layer in placement.layers))
