"""Joining a generation: what a builder on a worker asks of whoever brings workers and hosts together. No Ray here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from experts.pool import Membership
from experts.shard import LayerShape
from experts.starting import first_placement
from experts.transport.process_group import JointGroup
from experts.transport.protocol import Transport


class Connection(Protocol):
    """Travels to the workers inside the `experts` section; it is pickled."""

    def close(self) -> None:
        """Driver, when the workers are done: end whatever was started for them."""
        ...

    def join(self, shapes: list[LayerShape]) -> tuple[Transport, Membership]:
        """Meet all workers and hosts in the next generation; blocks until they are there.

        Raises:
            RunError: they do not come.
        """
        ...


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

    def join(self, shapes: list[LayerShape]) -> tuple[Transport, Membership]:
        """On the store of torch's default group."""
        grouped = dist.is_initialized()
        rank, workers = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        store = dist.distributed_c10d._get_default_store() if grouped else dist.HashStore()  # pyright: ignore
        group = JointGroup(
            store,
            name="colocated-experts",
            rank=rank,
            size=workers,
            workers=workers,
            holders=list(range(workers)),
            device=torch.device(self.device),
            interface=self.interface,
        )
        placement = first_placement([shape.num_experts for shape in shapes], hosts=workers)
        return group, Membership(
            generation=1, rank=rank, workers=workers, placement=placement, run_path=self.run_path, host=rank
        )
