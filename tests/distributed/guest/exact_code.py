"""A small language model that writes down each unit it begins, and there may be slow, wait or die.

`ORDERS`, a folder, tells it what to do: its files `mode` and `at`. What it did is in `loads` and `units`, a line each.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raytrain.infer import worker
from raytrain.models.gpt import gpt
from raytrain.trainable import Trainable

LIMIT_S = 60
SLOWER = 5


class Orders:
    """Called before each forward pass of a whole prompt: with one batch in a unit, that is once for each unit."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.me = folder, str(os.getpid())

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        rows, width = kwargs["input_ids"].shape
        if width == 1:
            return
        place = self._append("units", f"{self.me} {rows}")
        mode = self._read("mode")
        if mode:
            getattr(self, mode)(place, int(self._read("at")))

    def kill(self, place: int, at: int) -> None:
        """The first worker to begin unit `at` or a later one dies."""
        if place >= at and self._first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)

    def written(self, write: Any) -> Any:
        """`write_part` after which, in the mode of this name, the first worker dies that has written the file of unit
        number `at` or a later one: its report is not sent."""

        def write_and_die(parts: str, unit: Any, *rest: Any, **named: Any) -> None:
            write(parts, unit, *rest, **named)
            if self._read("mode") == "die_reporting" and unit.number >= int(self._read("at")) and self._first("killed"):
                os.kill(os.getpid(), signal.SIGKILL)

        return write_and_die

    def die_reporting(self, place: int, at: int) -> None:
        """See `written`."""

    def hold(self, place: int, at: int) -> None:
        """From unit `at` on, all wait for the file `go`."""
        if place >= at:
            (self.folder / f"held-{self.me}").touch()
            self._wait(lambda: (self.folder / "go").exists())

    def together(self, place: int, at: int) -> None:
        """The first `grouped` units are computed in groups of `at`: each waits for the others of its group. A group
        that stays incomplete is written down. At the end Ray Data may have given one worker the last two units."""
        if place > int(self._read("grouped")):
            return
        if not self._wait(lambda: len(self._lines("units")) >= -(-place // at) * at):
            self._append("incomplete", self.me)

    def slow(self, place: int, at: int) -> None:
        """One worker takes as long for a unit as the other for `SLOWER`, until `at` units have begun."""
        if self._first("slow"):
            (self.folder / "slow").write_text(self.me)
        if (self.folder / "slow").read_text() == self.me:
            others = sum(line.split()[0] != self.me for line in self._lines("units")) + SLOWER
            self._wait(lambda: self._others() >= others or len(self._lines("units")) >= at)

    def _others(self) -> int:
        return sum(line.split()[0] != self.me for line in self._lines("units"))

    def _wait(self, done: Any, limit: float = LIMIT_S) -> bool:
        ends = time.monotonic() + limit
        while not done():
            if time.monotonic() > ends:
                return False
            time.sleep(0.005)
        return True

    def _first(self, name: str) -> bool:
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _append(self, name: str, line: str) -> int:
        """Append a line; its place in the file, from 1."""
        unique = f"{line} {time.monotonic_ns()}"
        file = os.open(self.folder / name, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(file, f"{unique}\n".encode())
        os.close(file)
        return self._lines(name).index(unique) + 1

    def _lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()

    def _read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""


def build(vocab_size: int, context: int) -> Trainable:
    """A GPT with weights of its own, which follows the orders."""
    orders = Orders(Path(os.environ["ORDERS"]).resolve())
    worker.write_part = orders.written(worker.write_part)
    orders._append("loads", f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')}")
    torch.manual_seed(3)
    trainable = gpt(vocab_size=vocab_size, layers=1, heads=2, width=16, context=context)
    trainable.module.register_forward_pre_hook(orders, with_kwargs=True)
    return trainable
