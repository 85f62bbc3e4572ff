"""A model that watches the worker it trains in: reads of the device, queries of memory; it breaks where a test asks.
A second one has parts that torch.compile handles in different ways."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.trainable import Trainable

KEPT = 256 << 20
"""Bytes that the fault "keeps" allocates and never frees."""


def rows() -> dict[str, Any]:
    """240 rows of eight features and four classes, and none to evaluate on."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(240, 8, generator=draw)
    return {"train": {"x": x, "labels": (x @ torch.randn(8, 4, generator=draw)).argmax(dim=1)}}


class Watched(nn.Module):
    """Two layers; from step `at` on, the loss is infinite under autocast, or at step `at` a weight is moved."""

    def __init__(self, fault: str, at: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.step, self.half, self._fault, self._at = 0, False, fault, at

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.half, number = torch.is_autocast_enabled("cpu"), self.step + 1
        if self._fault == "keeps" and number == self._at:
            self.kept = torch.ones(KEPT // 4)
        if self._fault == "moves" and number == self._at:
            self.layers[0].weight = nn.Parameter(self.layers[0].weight.detach().to("meta"))
        loss = F.cross_entropy(self.layers(x).float(), labels)
        poisoned = self._fault == "overflows" and self.half and number >= self._at
        return {"loss": loss * float("inf") if poisoned else loss}


class Watch:
    """Of a worker's process: what was counted since the end of its first step."""

    def __init__(self, instruments: str) -> None:
        sys.path.append(instruments)
        from lab import DeviceReads

        self.reads, self.queries, self._thread = DeviceReads(), 0, threading.get_ident()
        self.reads.__enter__()
        sys.addaudithook(self._opened)

    def _opened(self, event: str, arguments: Any) -> None:
        if event == "open" and threading.get_ident() == self._thread:  # telemetry has a thread and a clock of its own
            self.queries += str(arguments[0]).endswith("proc/self/status")

    def take(self) -> dict[str, Any]:
        """What was counted since the last call."""
        taken = {"reads": self.reads.spots, "queries": self.queries}
        self.reads.spots, self.queries = [], 0
        return taken


WATCHES: list[Watch] = []


def watched(note: str, instruments: str, fault: str = "", at: int = 0) -> Trainable:
    """A builder; each line of `note` tells what was counted from the end of one step to the end of the next."""
    module = Watched(fault, at)
    trainable = Trainable.from_module(module)

    def between_steps(step: int) -> None:
        module.step = step
        WATCHES.extend([] if WATCHES else [Watch(instruments)])
        with Path(note).open("a") as file:
            file.write(json.dumps({"step": step, "half": module.half, **WATCHES[0].take()}) + "\n")

    trainable.between_steps = between_steps
    return trainable


class Smooth(nn.Linear):
    """Compiles as a whole, and once more when its Python state has changed."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.turned = False

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output + 1.0 if self.turned else output


class Looks(nn.Linear):
    """Python has to see a value in the middle: a graph break."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        return output * 2.0 if output.sum().item() > -1e9 else output


class Plain(nn.Linear):
    """Runs eager: its author asks torch not to compile it."""

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


class Parted(nn.Module):
    """One part of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.smooth, self.looks, self.plain = Smooth(8, 8), Looks(8, 8), Plain(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(self.plain(self.looks(self.smooth(x))), labels)}


def parted() -> Trainable:
    """A builder; `Smooth` changes after the third step."""
    module = Parted()
    trainable = Trainable.from_module(module)

    def between_steps(step: int) -> None:
        module.smooth.turned = step >= 3

    trainable.between_steps = between_steps
    return trainable
