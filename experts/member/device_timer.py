"""How long a device computes: the clock on a CPU, events on a GPU, which returns before it is done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class DeviceTimer:
    """Adds up the seconds between the beginning and the end of pieces of work on one device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Around a piece of work."""
        if not self._on_gpu:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin
            return
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        yield
        pair[1].record()
        self._pairs.append(pair)

    def take(self) -> float:
        """Seconds since the last call; waits for a GPU to be done with them."""
        for begin, end in self._pairs:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        taken, self._seconds = self._seconds, 0.0
        self._pairs.clear()
        return taken
