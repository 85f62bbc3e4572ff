"""Joining a generation: how a model builder on a worker connects to the other workers and the hosts. No Ray here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from experts.config import LayerShape
from experts.exchange.rebalancer import LoadRebalancer, kind_of, measure_speed, recorded_speeds, speeds_by_kind
from experts.placement.policy import PlacementRules, starting_placement
from experts.placement.values import HostSpec, Placement
from experts.transport import JointGroup
from raytrain.runs.faults import Death
from raytrain.train.parallel.collectives import WorkersGroup


@dataclass(frozen=True)
class Membership:
    """A worker's place in a generation, and what it knows about the hosts.

    Attributes:
        rank, workers: of this worker, and the number of workers.
        placement: in force at the start, on `placement.num_hosts` hosts.
        host: the index of this worker's own shard where experts are colocated, else None.
        workers_group: of the workers alone, which ends with the generation; None for torch's default group.
        lost: returns why the generation is over, None while it lives.
        switched: called on rank 0 with each placement that came into force.
        hosts: their specs; empty if nothing is known.
        deaths: of hosts, since the last committed step; `acknowledge_deaths` is called once they are recorded.
        note: what differs from the generation before, for the record.
        rebalancer: replaces the one that the `experts` section asks for.
        trains: False if the experts only answer: no holder keeps gradients or an optimizer.
    """

    generation: int
    rank: int
    workers: int
    placement: Placement
    run_path: str
    host: int | None = None
    workers_group: WorkersGroup | None = None
    lost: Callable[[], str | None] = lambda: None
    switched: Callable[[Placement], Any] = lambda _placement: None
    hosts: list[HostSpec] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    acknowledge_deaths: Callable[[], Any] = lambda: None
    note: str = ""
    rebalancer: LoadRebalancer | None = None
    trains: bool = True


class Connection(Protocol):
    """How a worker joins a generation; pickled to the workers inside the `experts` section."""

    def close(self) -> None:
        """End what was started for the workers; called by the driver when they are done."""
        ...

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[JointGroup, Membership]:
        """Join the next generation; blocks until all workers and hosts have.

        Raises:
            RunError: one did not join in time.
        """
        ...


_GENERATIONS = itertools.count(1)
"""Numbers the generations of this process; all workers of a run join equally often."""


@dataclass(frozen=True)
class ColocatedConnection:
    """Experts inside the workers: each worker holds a part, and there are no other members.

    Nothing needs to be supervised: a worker's death restarts all workers, and with them the experts.
    """

    run_path: str
    interface: str | None
    device: str
    dtype: str = "fp32"
    """Planned number format of the experts' products."""
    through_host: bool = False
    """Workers share a GPU, so that rows travel through the host."""

    def close(self) -> None:
        """Nothing was started."""

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[JointGroup, Membership]:
        """Join on the store of torch's default group."""
        generation = next(_GENERATIONS)
        grouped = dist.is_initialized()
        rank, workers = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        store = dist.distributed_c10d._get_default_store() if grouped else dist.HashStore()  # pyright: ignore
        group = JointGroup(
            store,
            name=f"colocated-experts-{generation}",
            rank=rank,
            size=workers,
            workers=workers,
            holders=list(range(workers)),
            device=torch.device(self.device),
            through_host=self.through_host,
            interface=self.interface,
        )
        # where kinds differ all workers measure, unless the run has recorded speeds
        threads = torch.get_num_threads()
        device = torch.device(self.device)
        rows = torch.zeros((group.size, NAME_BYTES), dtype=torch.float64)
        data = kind_of(device, threads=threads).encode()[:NAME_BYTES]
        rows[group.rank, : len(data)] = torch.tensor(list(data), dtype=torch.float64)
        group.all_reduce(rows)
        kinds = [bytes(int(value) for value in row if value).decode(errors="replace") for row in rows.tolist()]

        def measure(distinct: Sequence[str]) -> list[float]:
            known = recorded_speeds(self.run_path) if group.rank == 0 else {}
            found = torch.tensor([known.get(kind, 0.0) for kind in distinct], dtype=torch.float64)
            group.all_reduce(found)
            if not found.all():
                each = torch.zeros(group.size, dtype=torch.float64)
                each[group.rank] = measure_speed(device, shapes, self.dtype, threads=threads)
                group.all_reduce(each)
                of = dict(zip(reversed(kinds), reversed(each.tolist()), strict=True))
                return [of[kind] for kind in distinct]
            return found.tolist()

        speeds = speeds_by_kind(kinds, measure)
        specs = [HostSpec(host, speeds[host], None, kind=kinds[host]) for host in range(workers)]
        placement = starting_placement(rules, shapes, specs)
        return group, Membership(
            generation=generation, rank=rank, workers=workers, placement=placement, run_path=self.run_path, host=rank,
            hosts=specs,
        )  # fmt: skip


NAME_BYTES = 128
