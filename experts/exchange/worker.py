"""The worker's end of the expert exchange: every operation of a generation, in the same order on all workers.

`dispatch.py` calls it in each pass, `experts.distribute` at each step's end; it counts what is sent and received.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from experts.config import LayerShape
from experts.exchange.host_server import ExpertSetup, header_size
from experts.exchange.membership import Membership
from experts.exchange.oom_dropout import OomDropout
from experts.exchange.rebalancer import LoadRebalancer
from experts.lifecycle.controller import Lifecycle
from experts.member.checkpoint import ExpertFiles, await_files, snapshot
from experts.member.commit import StepCommit, VoteLayout, name_holder, name_shortages, sum_shortages
from experts.member.moves import gather_layer, scatter_layer, to_holders
from experts.member.shard import ExpertShard
from experts.placement.policy import costs_of, newcomer_home
from experts.placement.values import Placement, equal_hosts
from experts.router import LayerRoutes
from experts.transport import HEADER_SIZE, Header, JointGroup, Op, bytes_tensor
from raytrain.config.sections import OptimConfig
from raytrain.train.device import process_settings
from raytrain.train.memory.device import Shortage, StepDropped
from raytrain.train.parallel.collectives import Interleaver
from raytrain.trainable import GlobalStep, LocalStep

# ---------------------------------------------------------------- traffic


class Traffic:
    """What one worker has sent and received since the last logged row: of each layer the `rows` of training forwards
    to each host, without recomputed ones, and the `bytes` to and from each host but its `own`, of every pass."""

    def __init__(self, *, layers: int, hosts: int, own: int | None) -> None:
        self._own = own
        self.rows = [[0] * hosts for _ in range(layers)]
        self.bytes = [0] * hosts

    def add(self, layer: int, host_counts: Sequence[int], *, row_bytes: int, counted: bool) -> None:
        """Add rows of `row_bytes` that go to the hosts and come back; `counted` for a first training forward."""
        for host, rows in enumerate(host_counts):
            if counted:
                self.rows[layer][host] += rows
            if host != self._own:
                self.bytes[host] += 2 * rows * row_bytes

    def take(self) -> list[float]:
        """Return the bytes of each host, then the rows layer by layer; resets both."""
        taken = [*self.bytes, *(count for row in self.rows for count in row)]
        self.rows, self.bytes = [[0] * len(row) for row in self.rows], [0] * len(self.bytes)
        return [float(value) for value in taken]


# ---------------------------------------------------------------- worker

Weights = list[list[dict[str, Tensor]]]
"""[layer][expert]: weights by name."""


class ExpertClient:
    """See the module.

    Args:
        first: initial weights of each layer and expert; on rank 0 and where experts are colocated, else empty.
        rebalancer: decides on rank 0 where experts live; None keeps the placement.

    Attributes:
        placement: in force. routes: of each layer, for that placement.
        steps: the last committed step.
        busy_s: seconds that each holder of experts has computed.
        recomputed: (layer, micro-batch) whose forward ran a second time in this step.
        users_calls: while a function of the model's author runs, the layers that it has called; else None.
        calls: the layers, and how, of the last pass with gradients (True) and without: others' passes call them alike.
    """

    def __init__(
        self, group: JointGroup, membership: Membership, *, shapes: Sequence[LayerShape], first: Weights,
        rebalancer: LoadRebalancer | None = None, lifecycle: Lifecycle | None = None,
    ) -> None:  # fmt: skip
        self.group, self.member, self.shapes = group, membership, list(shapes)
        self.layout = VoteLayout.of(self.shapes, holders=len(group.holders), lifecycle=lifecycle is not None)
        self._commit = StepCommit(group, membership.placement, self.layout)
        self._use_placement(membership.placement)
        self.optim, self.dtype, self.device = OptimConfig(), torch.float32, torch.device("cpu")
        self.interleaver = Interleaver()
        self.steps = 0
        self.rebalancer, self.lifecycle = rebalancer, lifecycle
        self.busy_s = [0.0] * len(group.holders)
        self.traffic = Traffic(layers=len(self.shapes), hosts=self.placement.num_hosts, own=membership.host)
        self._first, self._checkpoint = first, ""
        self._ready = False
        self._files = None if membership.host is None else ExpertFiles(membership.run_path, host=membership.host)
        self._forwards = [0] * len(self.shapes)
        self.recomputed: set[tuple[int, int]] = set()
        self.dropout = OomDropout(group, membership.workers, send=self.send_header, receive=self._exchange_headers)
        self.dropout.active_workers.layers = [shape.name for shape in self.shapes]
        self._announcement: tuple[int, bytes | None] = (0, None)
        self.users_calls: list[tuple[int, Op]] | None = None
        every_layer = [(layer, Op.FORWARD) for layer in range(len(self.shapes))]
        self.calls = {True: every_layer, False: every_layer}

    @property
    def shard(self) -> ExpertShard | None:
        """This worker's own experts, where they are colocated."""
        return self._commit.shard

    def _use_placement(self, placement: Placement) -> None:
        self.placement = placement
        self.routes = [LayerRoutes.of(placement, layer) for layer in range(len(self.shapes))]
        self._header_size = header_size(placement)

    # -- set-up ---------------------------------------------------------------------------------------------

    def configure(self, optim: OptimConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        """Set the optimizer and the master dtype; the experts are set up again before their next use."""
        self.optim, self.dtype, self.device = optim, dtype, device
        self._ready = False

    def restore(self, checkpoint: str, *, step: int) -> None:
        """Load the experts from this checkpoint before their next use."""
        self._checkpoint, self.steps = checkpoint, step
        self._ready = False

    def _ensure_ready(self) -> None:
        """Set the experts up on their holders, before the first use and after a change of their state."""
        if self._ready:
            return
        self._ready = True
        self._forget_passes()
        self._commit.table = None if self.lifecycle is None else self.lifecycle.table
        setup = ExpertSetup(
            self.shapes, self.optim, self.dtype, self.member.run_path, self._checkpoint or None,
            process_settings(), self.member.trains, self._commit.table,
        )  # fmt: skip
        if self.member.host is not None:
            assert self._files is not None
            shard = setup.build(self.placement, self.member.host, device=self.device, files=self._files)
            self._commit.shard = shard
            if setup.checkpoint is None:
                for layer, expert in shard.held():
                    shard.set_weights((layer, expert), self._first[layer][expert])
            return
        payload = bytes_tensor(setup.encode())
        self.send_header(Op.SETUP, width=len(payload))
        to_holders(self.group, [payload] * len(self.group.holders), empty=payload[:0])
        if setup.checkpoint is not None:
            return
        for layer in range(len(self.shapes)):
            self.send_header(Op.FILL, layer=layer)
            first = self._first[layer] if self.member.rank == 0 else []
            scatter_layer(self.group, self.routes[layer], first, dtype=self.dtype)
        if not self.member.trains:  # nothing sets these hosts up again, and all experts may be large
            self._first.clear()

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the model's author, which must not read the experts' weights: this process has none."""

        @wraps(call)
        def watched(*arguments: Any, **named: Any) -> Any:
            self.users_calls, with_gradients = [], torch.is_grad_enabled()
            try:
                result = call(*arguments, **named)
                self.calls[with_gradients] = self.users_calls or self.calls[with_gradients]
                return result
            finally:
                self.users_calls = None

        return watched

    # -- passes ---------------------------------------------------------------------------------------------

    def begin_forward(self, layer: int, *, op: Op) -> int:
        """Count a forward through a layer; returns the number of its micro-batch in this step."""
        self._ensure_ready()
        if self.users_calls is not None and op is not Op.RECOMPUTE:
            self.users_calls.append((layer, op))
        if op in (Op.FORWARD, Op.RESERVE):
            self._forwards[layer] += 1
        micro_batch = self._forwards[layer] - 1
        if op is Op.RECOMPUTE:
            while (layer, micro_batch) in self.recomputed:  # called several times in a pass: the last is the first back
                micro_batch -= 1
            self.recomputed.add((layer, micro_batch))
        return micro_batch

    def end_passes(self, *, short: bool) -> None:
        """End this worker's passes of a step or an evaluation; with `short` before their end, for lack of memory."""
        self._ensure_ready()
        self.dropout.end_passes(self.shard, short=short)

    def _forget_passes(self) -> None:
        self._forwards = [0] * len(self.shapes)
        self.recomputed.clear()

    # -- the end of a step ----------------------------------------------------------------------------------

    def agree(self, local: LocalStep) -> GlobalStep:
        """Vote on the step and commit the experts' part of it. Collective over all members."""
        self._ensure_ready()
        self.send_header(Op.VOTE, step=local.step)
        # what rank 0 has decided on: changes of experts or the next placement; the same again where a vote is repeated
        if self._announcement[0] != local.step:
            message = self._changes(local.step) if self.member.rank == 0 else None
            if message is None and self.rebalancer is not None:
                placement = self.rebalancer.next_placement(local.step)
                message = None if placement is None else {"placement": placement.to_json()}
            self._announcement = local.step, None if message is None else json.dumps(message).encode()

        def fill_in(vector: Tensor) -> None:
            scale = torch.ones_like(local.sum_of_squares) if local.inverse_scale is None else local.inverse_scale
            own = torch.stack([local.sum_of_squares, local.nonfinite.double(), scale.double()])
            counts = own[:0] if local.counts is None else local.counts.double()
            squares, nonfinite, inverse_scale, *routed = torch.cat([own, counts]).tolist()
            self.layout.put(vector, nonfinite=nonfinite)
            if self.member.rank == 0:  # the trunk's gradients are already equal on every worker: they count once
                self.layout.put(vector, trunk=squares, inverse_scale=inverse_scale, lr=local.lr)
            if routed:
                vector[self.layout.counts] = torch.tensor(routed, dtype=torch.float64)

        result = self._commit.run(
            local.step, max_grad_norm=self.optim.max_grad_norm, fill_in=fill_in, announcement=self._announcement[1]
        )
        self._forget_passes()
        self.busy_s = [total + own for total, own in zip(self.busy_s, result.busy_s, strict=True)]
        if self._commit.placement is not self.placement:
            self._use_placement(self._commit.placement)
            if self.member.rank == 0:
                self.member.switched(self.placement)
        if result.shortages:
            raise StepDropped(name_shortages(result.shortages, colocated=self.shard is not None))
        self.steps = local.step
        if self.rebalancer is not None:
            self.rebalancer.committed(local.step, result, self.placement, refused=self._commit.refused)
        colocated, device = self.shard is not None, local.sum_of_squares.device
        homes = [(key, name_holder(self.placement.home_of(*key), colocated=colocated)) for key in result.nonfinite]
        return GlobalStep(
            norm=result.norm.to(device), skip=result.skip.to(device),
            counts=None if local.counts is None else result.counts.to(device),
            nonfinite=tuple(
                f"expert {expert} of layer {layer} on {home.removeprefix('the experts of ')}"
                for (layer, expert), home in homes
            ),
        )  # fmt: skip

    def _changes(self, step: int) -> dict[str, Any] | None:
        """The arguments of `StepCommit.change`, with the homes of newcomers; None without changes."""
        lifecycle = self.lifecycle
        if lifecycle is None or not lifecycle.pending:
            return None
        placement, homes = self._commit.migration.next or self.placement, {}
        hosts, costs = self.member.hosts or equal_hosts(placement.num_hosts), costs_of(self.shapes)
        rows = lifecycle.rows_since() if lifecycle.config.placement != "fewest" else None
        for change in lifecycle.pending:
            if change.kind == "birth":
                assert change.slot is not None
                living = [row.slot for row in lifecycle.table.layers[change.layer]]
                load = None if rows is None else rows[change.layer]
                where = partial(newcomer_home, living=living, load=load, hosts=hosts, costs=costs)
                host = where(placement, change.layer, change.slot)
                if host != placement.home_of(change.layer, change.slot):
                    homes[f"{change.layer}.{change.slot}"] = host
                    placement = placement.with_copies(change.layer, change.slot, (host,))
        return {
            "changes": [change.to_json() for change in lifecycle.pending], "homes": homes,
            "table": lifecycle.next_table(step).hash(),
        }  # fmt: skip

    def discard(self) -> None:
        """Forget the gradients and passes of a step that is not committed, on all members."""
        self._forget_passes()
        if self._ready and not self.dropout.end_step():
            self.send_header(Op.DISCARD)
        if self.shard is not None:
            self.shard.discard()

    def shortages(self) -> list[Shortage]:
        """Return which holders of experts ran out of memory since the last step or discard. Collective over all
        members."""
        self.send_header(Op.SHORTAGES)
        return name_shortages(sum_shortages(self.group, self.shard), colocated=self.shard is not None)

    # -- state ----------------------------------------------------------------------------------------------

    def begin_save(self, step: int) -> None:
        """Have every holder snapshot the experts at home there, and write them in the background."""
        self._ensure_ready()
        self.send_header(Op.SAVE, step=step)
        if self.shard is not None and self._files is not None:
            self._files.begin(snapshot(self.shard), step=step)

    def finish_save(self, folder: str) -> dict[str, Any]:
        """Wait for the files that the holders write, see `await_files`; called by rank 0's writer."""
        return await_files(folder, self.placement.num_hosts, lost=self.member.lost)

    def fetch(self, layer: int) -> list[dict[str, Tensor]] | None:
        """Gather the weights of each expert of a layer on rank 0; None on other workers. Collective."""
        self._ensure_ready()
        self.send_header(Op.FETCH, layer=layer)
        routes = self.routes[layer]
        return gather_layer(self.group, self.shapes[layer], layer, shard=self.shard, routes=routes, dtype=self.dtype)

    def end(self) -> None:
        """End the generation; this client must not be used afterwards."""
        self.send_header(Op.END)
        self._commit.migration.drop()
        self.group.close()

    # -- headers --------------------------------------------------------------------------------------------

    def send_header(
        self, op: Op, *, step: int | None = None, layer: int = 0, micro_batch: int = 0, dtype: int = 0, width: int = 0,
        slot_counts: list[list[int]] | None = None,
    ) -> list[list[int]]:  # fmt: skip
        """Send an operation's header to every holder of experts.

        Returns:
            the counts received from each worker, if this one holds experts.
        """
        header = Header(
            self.member.generation, self.placement.version, self.steps + 1 if step is None else step, op,
            layer=layer, micro_batch=micro_batch, dtype=dtype, width=width,
        )  # fmt: skip
        rows = torch.zeros((len(self.group.holders), self._header_size), dtype=torch.int64)
        rows[:, :HEADER_SIZE] = torch.tensor(header.encode())
        for host, counts in enumerate(slot_counts or ()):
            if counts:
                rows[host, HEADER_SIZE : HEADER_SIZE + len(counts)] = torch.tensor(counts)
        return self._exchange_headers(rows)

    def _exchange_headers(self, rows: Tensor | None = None) -> list[list[int]]:
        """Send headers, if any, and return the counts received from each worker, if this one holds experts."""
        workers = self.dropout.active_workers
        header, counts = workers.receive(
            self.group, rows, self._header_size, generation=self.member.generation, version=self.placement.version
        )
        self.dropout.header = header
        if self.shard is not None and workers.dropped:
            self.shard.dropping = True
        return counts
