"""Rows of one mebibyte that are made as they are read, and a model that looks at all of each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 1 << 18


class LargeRows:
    """48 rows, whose label is the sign of their first number; each reading is noted with its process and the parent."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(Path(__file__).parent / "readers.txt", "a") as file:
            file.write(f"{os.getppid()}-{os.getpid()} {index}\n")
        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": int(x[0] > 0)}


def rows() -> dict[str, Any]:
    """The source."""
    return {"train": LargeRows()}


class Sums(nn.Module):
    """A linear layer on a few numbers that depend on the whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layer(x.view(len(x), 8, -1).mean(2)), labels)}


def sums() -> nn.Module:
    """The builder."""
    return Sums()
