"""A model and data with a planted fault: one slow rank, slow rows, or a router that prefers one expert."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts.models import moe_mlp
from experts.router import TopKRouter


class Net(nn.Module):
    """Somebody's module; rank `slow_rank` takes `delay_s` longer for each forward pass, and waits forever in one once
    there is a file `stuck_by`, which it takes away: so too in an evaluation, and in a save of rank 0, by a file of that
    name with `.eval` or `.save`."""

    def __init__(self, *, slow_rank: int, delay_s: float, stuck_by: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        slow = os.environ.get("RANK") == str(slow_rank)
        self.delay_s, self.stuck_by = delay_s if slow else 0.0, Path(stuck_by) if slow and stuck_by else None
        if stuck_by and os.environ.get("RANK") == "0":
            self.register_state_dict_pre_hook(lambda *_: hang_by(Path(stuck_by).with_suffix(".save")))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        time.sleep(self.delay_s)
        if self.stuck_by is not None:
            hang_by(self.stuck_by if self.training else self.stuck_by.with_suffix(".eval"))
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


def hang_by(file: Path) -> None:
    """Wait forever once there is this file, which is taken away."""
    if file.exists():
        file.unlink()
        while True:
            time.sleep(1.0)


def net(*, slow_rank: int = -1, delay_s: float = 0.0, stuck_by: str = "") -> nn.Module:
    """The model of a job."""
    return Net(slow_rank=slow_rank, delay_s=delay_s, stuck_by=stuck_by)


def skewed(experts: Any, **keys: Any) -> Any:
    """The built-in mixture of experts with a router that prefers the first expert."""
    made = moe_mlp(experts=experts, **keys)
    routers = [module for module in made.module.modules() if isinstance(module, TopKRouter)]
    assert routers
    for router in routers:
        for parameter in router.parameters():
            nn.init.zeros_(parameter)
            parameter.requires_grad_(False)
    return made


class SlowRows:
    """A map-style dataset whose rows take `seconds` each to read."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 8, generator=draw)
        self.labels = (self.x @ torch.randn(8, 4, generator=draw)).argmax(-1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        return {"x": self.x[index], "labels": self.labels[index]}


def rows(*, count: int = 512, seconds: float = 0.0) -> dict[str, Any]:
    """The data of a job: in memory, or slow to read."""
    made = SlowRows(count, seconds)
    return {"train": made if seconds else {"x": made.x, "labels": made.labels}}
