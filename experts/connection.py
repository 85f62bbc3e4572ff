"""How a worker reaches the expert directory, joins a generation, and hears of its end."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError, RayTaskError

from experts.host import open_group
from experts.membership import Membership
from experts.placement import Placement
from experts.shapes import LayerShape
from experts.starting import PlacementRules
from experts.transport.process_group import gloo, nccl
from raytrain.gradients import WorkersGroup


@dataclass(frozen=True)
class HostConnection:
    """How a worker's builder reaches the directory; see `experts.membership.Connection`. Pickled to the workers."""

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
            raise error.as_instanceof_cause() from None
        group = open_group(told, rank=rank)
        lost = Lost(self.directory, told["generation"], [group])
        own = None
        if workers > 1:
            payload, flags = workers_groups(told, rank=rank, workers=workers, device=group.device)
            lost.groups += [Abortable(payload), Abortable(flags)]
            own = WorkersGroup(payload, flags, lost.reason)
        lost.begin()
        if rank == 0:
            self.directory.keep_spare.remote()
        return group, Membership(
            generation=told["generation"],
            rank=rank,
            workers=workers,
            placement=Placement.from_json(told["placement"]),
            run_path=self.run_path,
            workers_group=own,
            lost=lost.reason,
            switched=lambda placement: self.directory.switched.remote(placement.to_json()),
        )


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


def workers_groups(told: dict[str, Any], *, rank: int, workers: int, device: torch.device) -> tuple[Any, Any]:
    """(payload, flags) groups over the workers of one generation, which end with it."""
    host, port = told["address"]
    store = dist.TCPStore(host, port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
    name = f"generation-{told['generation']}/workers"
    flags = gloo(store, f"{name}/flags", rank, workers, interface=told["interface"], timeout_s=1800.0)
    if device.type != "cuda":
        return flags, flags
    return nccl(store, f"{name}/payload", rank, workers, timeout_s=1800.0), flags


class Abortable:
    """A process group with the `abort(reason)` of a joint group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def abort(self, _reason: str) -> None:
        """End what waits."""
        self._group.abort()


class Lost:
    """Thread of a worker: waits for the end of the generation, and then ends every group of it here."""

    def __init__(self, directory: Any, generation: int, groups: list[Any]) -> None:
        self._directory, self._generation, self.groups = directory, generation, groups
        self._reason: str | None = None

    def begin(self) -> None:
        """Start to watch."""
        threading.Thread(target=self._watch, daemon=True, name="generation-watch").start()

    def reason(self) -> str | None:
        """Why the generation is over; None while it lives."""
        return self._reason

    def _watch(self) -> None:
        try:
            reason = str(ray.get(self._directory.watch.remote(self._generation)))
        except RayError as error:
            reason = f"the expert directory is gone: {type(error).__name__}"
        self._reason = reason
        for group in {id(group): group for group in self.groups}.values():
            group.abort(reason)
