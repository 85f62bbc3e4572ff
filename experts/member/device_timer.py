"""Measures how long a device computes: with the clock on a CPU, with events on a GPU, which runs asynchronously."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class DeviceTimer:
    """Sums the seconds of pieces of work on one device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Add the work inside."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
            return
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        yield
        pair[1].record()
        self._pairs.append(pair)

    def take(self) -> float:
        """Return the seconds since the last call; waits for a GPU to finish that work."""
        for begin, end in self._pairs:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        taken, self._seconds = self._seconds, 0.0
        self._pairs.clear()
        return taken
