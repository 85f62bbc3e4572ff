"""The transport group of an experts bench: its processes join it without Ray, through a store in a shared file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from experts.exchange.host import HostServer
from experts.exchange.membership import Membership
from experts.placement.starting import PlacementRules
from experts.placement.values import Placement
from experts.shapes import LayerShape
from experts.transport.process_group import JointGroup

#: Longest wait of an arm while the others run their blocks, which can take long on a busy machine.
TIMEOUT_S = 4 * 3600.0


@dataclass(frozen=True)
class FileConnection:
    """A worker's connection to its hosts, with a fixed set of members.

    Args:
        settings: with "store", "workers" and "hosts" (0: the workers hold the experts).
        place: returns the initial placement of the layers of a model.
    """

    settings: dict[str, Any]
    rank: int
    place: Callable[[list[LayerShape], PlacementRules], Placement]

    def close(self) -> None:
        """Does nothing."""

    def join(self, shapes: list[LayerShape], rules: PlacementRules) -> tuple[JointGroup, Membership]:
        """Join the group of all processes."""
        membership = Membership(
            generation=1, rank=self.rank, workers=self.settings["workers"], placement=self.place(shapes, rules),
            run_path="unused", host=None if self.settings["hosts"] else self.rank,
        )  # fmt: skip
        return joint_group(self.settings, self.rank), membership


def joint_group(settings: dict[str, Any], rank: int) -> JointGroup:
    """This process's end of the group: workers first, then hosts."""
    workers, hosts = settings["workers"], settings["hosts"]
    size = workers + hosts
    return JointGroup(
        dist.FileStore(settings["store"], size),  # pyright: ignore[reportPrivateImportUsage]
        name="bench-experts",
        rank=rank,
        size=size,
        workers=workers,
        holders=list(range(workers, size)) if hosts else list(range(workers)),
        device=torch.device("cpu"),
        interface="lo",
        timeout_s=TIMEOUT_S,
    )


def serve_host(settings: dict[str, Any], rank: int, placement: Placement) -> None:
    """Run as a host until the workers let it exit."""
    group, device = joint_group(settings, rank), torch.device("cpu")
    HostServer(group, host=rank - settings["workers"], generation=1, placement=placement, device=device).serve()
