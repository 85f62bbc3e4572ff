"""Models of `bench infer` that every worker of a pool builds for itself."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor, nn

from raytrain.models.gpt import gpt
from raytrain.trainable import Trainable

VOCABULARY = 256  # bytes


class Sleeper(nn.Module):
    """Sleeps instead of computing, so that the machine's cores do not limit the workers.

    Args:
        seconds: of a batch.
        claim: a file; the process or thread that creates it is the slow one. None: all are equal.
        slowness: times as long as the others the slow one sleeps.
    """

    def __init__(self, seconds: float, claim: str | None, slowness: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        slow = claim is not None and _created(claim)
        self.seconds = seconds * slowness if slow else seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x * 2 + self.weight


def _created(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def sleeper(*, seconds: float, claim: str | None = None, slowness: float = 2.0) -> nn.Module:
    """Build a `Sleeper`."""
    return Sleeper(seconds, claim, slowness)


def seeded_gpt(*, layers: int, heads: int, width: int, context: int, vocab_size: int, seed: int) -> Trainable:
    """A GPT with random weights that are the same in every process."""
    torch.manual_seed(seed)
    return gpt(layers=layers, heads=heads, width=width, context=context, vocab_size=vocab_size)
