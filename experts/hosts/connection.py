"""How a worker reaches the expert directory, joins a generation, and learns of its end."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError

from experts.exchange.membership import Membership
from experts.hosts.generation import GenerationSpec, join_as_worker
from experts.placement.starting import PlacementRules
from experts.shapes import LayerShape
from raytrain.errors import RaytrainError


@dataclass(frozen=True)
class HostConnection:
    """A worker's connection to the directory; implements `experts.exchange.membership.Connection`."""

    directory: Any
    run_path: str

    def close(self) -> None:
        """End the directory and the hosts that it owns. Explicit, as a handle inside a job would keep it alive."""
        ray.kill(self.directory)

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[Any, Membership]:
        """See `Connection`."""
        import ray.train

        context = ray.train.get_context()
        rank, workers = context.get_world_rank(), context.get_world_size()
        return join_directory(self.directory, shapes, rules, rank=rank, workers=workers, run_path=self.run_path)


def join_directory(
    directory: Any, shapes: list[LayerShape], rules: PlacementRules, *, rank: int, workers: int, run_path: str
) -> tuple[Any, Membership]:
    """Join the next generation of a directory as one of its workers; see `Connection.join`."""
    try:
        request = directory.join.remote(gang=gang_number(), rank=rank, workers=workers, shapes=shapes, rules=rules)
        spec: GenerationSpec = ray.get(request)  # pyright: ignore[reportAssignmentType]
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, RaytrainError) else error) from None

    def await_end() -> str:
        try:
            return str(ray.get(directory.watch.remote(spec.number)))
        except RayError as error:
            return f"the expert directory has died: {type(error).__name__}"

    group, workers_group, lost = join_as_worker(spec, rank=rank, wait=await_end)
    if rank == 0:
        directory.keep_spare.remote()
    return group, Membership(
        generation=spec.number,
        rank=rank,
        workers=workers,
        placement=spec.placement,
        run_path=run_path,
        workers_group=workers_group,
        lost=lost,
        deaths=spec.deaths,
        acknowledge_deaths=lambda: directory.acknowledge_deaths.remote(spec.num_deaths),
        note=spec.note,
        hosts=spec.specs,
        switched=lambda placement: directory.switched.remote(spec.number, placement),
        trains=rules.trains,
    )


_GANG: list[int] = []


def gang_number() -> int:
    """A random number that all workers started together share for the life of their processes; rank 0 draws it."""
    if not _GANG:
        drawn = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
        if dist.is_initialized():
            drawn = drawn.to("cuda") if dist.get_backend() == "nccl" else drawn
            dist.broadcast(drawn, src=0)
        _GANG.append(int(drawn.item()))
    return _GANG[0]
