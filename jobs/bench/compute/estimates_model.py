"""A network of a user's kind for bench `estimates`: the plan has no formula for it, so that its sizes are traced."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """A normalised two-layer network with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class ResidualNetwork(nn.Module):
    """Rows of 64 features to one of ten classes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(depth))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x / 255)
        for block in self.blocks:
            hidden = block(hidden)
        return {"loss": F.cross_entropy(self.last(hidden), labels)}


def network(*, width: int, depth: int) -> nn.Module:
    """Build a `ResidualNetwork`."""
    return ResidualNetwork(width, depth)
