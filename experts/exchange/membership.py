"""Joining a generation: what a builder on a worker asks of whoever brings workers and hosts together. No Ray here."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from experts.exchange.rebalancer import Balances
from experts.placement.starting import PlacementRules, starting_placement
from experts.placement.values import HostSpec, Placement
from experts.shapes import LayerShape
from experts.transport.process_group import JointGroup
from experts.transport.protocol import Transport
from raytrain.train.parallel.collectives import WorkersGroup
from raytrain.trainable import Death


@dataclass(frozen=True)
class Membership:
    """What a worker is told when it joins a generation.

    Attributes:
        rank, workers: this worker, and how many there are.
        placement: in force at the start; `placement.num_hosts` hosts.
        host: the index of this worker's own shard where experts are colocated, else None.
        workers_group: of the workers alone, which ends with the generation; None is torch's default group.
        lost: why the generation is over, None while it lives.
        switched: told on rank 0 of each placement that came into force.
        hosts: what is known of them; empty for nothing.
        deaths: of hosts, since the last step that was committed; `acknowledge_deaths` is called when that has been
            written down.
        note: what is different from the generation before; for the record.
        balancer: somebody else to decide where experts live than the `experts` section names.
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
    balancer: Balances | None = None


class Connection(Protocol):
    """Travels to the workers inside the `experts` section; it is pickled."""

    def close(self) -> None:
        """Driver, when the workers are done: end whatever was started for them."""
        ...

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[Transport, Membership]:
        """Meet all workers and hosts in the next generation; blocks until they are there.

        Raises:
            RunError: they do not come.
        """
        ...


_GENERATIONS = itertools.count(1)
"""Of this process; the workers of a gang join as often as each other."""


@dataclass(frozen=True)
class ColocatedConnection:
    """Experts inside the workers: each holds its share, and the workers are all the members there are.

    They end and begin with the workers, so there is nobody to watch over: a worker's death restarts them all.
    """

    run_path: str
    interface: str | None
    device: str

    def close(self) -> None:
        """Nothing was started."""

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[Transport, Membership]:
        """On the store of torch's default group."""
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
            interface=self.interface,
        )
        placement = starting_placement(rules, shapes, [HostSpec(host, 1.0, None) for host in range(workers)])
        return group, Membership(
            generation=generation, rank=rank, workers=workers, placement=placement, run_path=self.run_path, host=rank
        )
