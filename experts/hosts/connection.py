"""How a worker reaches the expert directory, joins a generation, and hears of its end."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError

from experts.exchange.membership import Membership
from experts.hosts.generation import join_as_worker
from experts.placement.starting import PlacementRules
from experts.placement.values import HostSpec, Placement
from experts.shapes import LayerShape
from raytrain.errors import RaytrainError
from raytrain.trainable import Death


@dataclass(frozen=True)
class HostConnection:
    """How a worker's builder reaches the directory; see `experts.exchange.membership.Connection`. Pickled to the
    workers."""

    directory: Any
    run_path: str

    def close(self) -> None:
        """Driver: end the directory, and with it the hosts it owns. A handle that travelled in a job keeps it alive."""
        ray.kill(self.directory)

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[Any, Membership]:
        """Meet the other workers and the hosts in the next generation."""
        import ray.train

        context = ray.train.get_context()
        rank, workers = context.get_world_rank(), context.get_world_size()
        about = {"rank": rank, "workers": workers, "shapes": [shape.to_json() for shape in shapes]}
        about["rules"] = rules.to_json()
        try:
            told: Any = ray.get(self.directory.join.remote(gang=gang_number(), **about))
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, RaytrainError) else error) from None
        group, own, lost = join_as_worker(told, rank=rank, wait=lambda: self._end_of(told["generation"]))
        if rank == 0:
            self.directory.keep_spare.remote()
        return group, Membership(
            generation=told["generation"],
            rank=rank,
            workers=workers,
            placement=Placement.from_json(told["placement"]),
            run_path=self.run_path,
            workers_group=own,
            lost=lost,
            deaths=[Death(**row) for row in told["deaths"]],
            acknowledge_deaths=lambda: self.directory.acknowledge_deaths.remote(told["deaths_known"]),
            note=told["note"],
            hosts=[HostSpec(**row) for row in told["specs"]],
            switched=lambda placement: self.directory.switched.remote(told["generation"], placement.to_json()),
        )

    def _end_of(self, generation: int) -> str:
        try:
            return str(ray.get(self.directory.watch.remote(generation)))
        except RayError as error:
            return f"the expert directory is gone: {type(error).__name__}"


_GANG: list[int] = []


def gang_number() -> int:
    """One random number for all workers of this start, for the life of this process; rank 0 draws it."""
    if not _GANG:
        drawn = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
        if dist.is_initialized():
            drawn = drawn.to("cuda") if dist.get_backend() == "nccl" else drawn
            dist.broadcast(drawn, src=0)
        _GANG.append(int(drawn.item()))
    return _GANG[0]
