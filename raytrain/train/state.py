"""The loop's limits, its state and its clock, and the interfaces through which it reports and saves.

Held by `raytrain.train.loop`; `Reporter` and `Saver` are what `raytrain.execution` implements.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from raytrain.accelerator import gpu_module, on_gpu
from raytrain.config.decode import JsonRecord
from raytrain.data.rows.batches import Cursor

Item = TypeVar("Item")


class Clock:
    """Seconds by purpose, on this worker, since its attempt began (`time` in result.json). `step`: the step that the
    attempt begins at."""

    def __init__(self, step: int = 0) -> None:
        purposes = ("data", "compute", "communication", "compile", "eval", "save", "sleep", "restart", "lost")
        self.seconds: dict[str, float] = dict.fromkeys(purposes, 0.0)
        self._kept: dict[int, tuple[float, dict[str, float]]] = {}
        self.keep(step)

    def add(self, purpose: str, seconds: float) -> None:
        self.seconds[purpose] += seconds

    def share(self, purpose: str) -> float:
        """The fraction of all charged seconds that a purpose has; 0 before anything was charged."""
        total = sum(self.seconds.values())
        return self.seconds[purpose] / total if total else 0.0

    def keep(self, step: int) -> None:
        """Note the checkpoint of `step`: time spent until now is not lost where the run goes back to it."""
        self._kept[step] = time.perf_counter(), dict(self.seconds)

    def rewind(self, step: int, *, restart_s: float) -> None:
        """Go back to the checkpoint of `step`: time spent since then counts as lost, except that of the restart."""
        before = max((known for known in self._kept if known <= step), default=min(self._kept))
        kept_at, seconds = self._kept[before]
        self.seconds = dict(seconds)
        self.add("restart", restart_s)
        self.add("lost", time.perf_counter() - kept_at - restart_s)
        self._kept = {known: then for known, then in self._kept.items() if known < step}
        self.keep(step)


class Fetching:
    """Seconds of the training process that waits for batches or makes them, and of these, CPU time of its thread."""

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0

    def timed(self, batches: Iterator[Item]) -> Iterator[Item]:
        """Yield the same batches; adds up the time of each."""
        while True:
            begin, cpu = time.perf_counter(), time.thread_time()
            item = next(batches, None)
            self.seconds += time.perf_counter() - begin
            self.cpu_s += time.thread_time() - cpu
            if item is None:
                return
            yield item


# ---------------------------------------------------------------- state


@dataclass(frozen=True)
class LoopLimits:
    """The resolved numbers that limit a loop (steps count from 1)."""

    max_steps: int
    log_every: int | Literal["epoch"]
    eval_every: int | None
    patience: int | None
    min_delta: float
    nonfinite_steps: int
    clear_every: int | None = None


@dataclass
class LoopState(JsonRecord):
    """What a resumed loop needs besides tensors: plain numbers, written to the checkpoint."""

    step: int = 0
    cursor: Cursor = field(default_factory=lambda: Cursor(epoch=0, position=0))
    best_eval_loss: float | None = None
    best_step: int | None = None
    gain_from: float | None = None  # the next eval loss must be lower by `min_delta`
    evals_without_gain: int = 0
    last_eval: dict[str, Any] | None = None
    final_loss: float | None = None
    skipped_steps: int = 0
    weight_unit: float | None = None  # of the step (`TrainingStep.weight_unit`)


@dataclass(frozen=True)
class LoopOutcome:
    """Why a loop returned: "done", "plateau", "interrupted" or "rollback"; `reason` in words."""

    kind: str
    reason: str
    bad_steps: int = 0


class Reporter(Protocol):
    """Receives rows and events; only rank 0's writes anything."""

    def metrics(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl."""

    def event(self, kind: str, **fields: Any) -> None:
        """One row of events.jsonl."""

    def interval(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        """One row of experts.jsonl, and routing traces by step."""


class Saver:
    """Writes checkpoints; every worker calls `save` at the same step. This one writes none, as in measurements."""

    def due(self, step: int) -> bool:
        """Whether rank 0 wants a checkpoint after `step`."""
        return False

    def save(self, state: LoopState, *, final: bool, only_best: bool = False) -> None:
        """Take a snapshot of the state after `state.step` and write it.

        Args:
            final: return when it is written.
            only_best: saved only because its evaluation is the best so far; the next best one may replace it before it
                is written.
        """


class NonFinite:
    """Counts skipped steps on the device, and knows on the host what the count was `LAG` steps ago.

    After each step, the longest run of failed steps so far is copied into pinned host memory without blocking. The host
    reads the copy of `LAG` steps ago, which has arrived unless the host is that far ahead of the device. The lag is
    fixed, on a CPU too, so that all workers decide at the same step.
    """

    LAG = 2

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._run = torch.zeros((), dtype=torch.float64, device=device)
        self.longest = torch.zeros((), dtype=torch.float64, device=device)
        self._steps = 0
        self._copies = [HostCopy(device) for _ in range(self.LAG + 1)]

    def add(self, skip: Tensor, *, scale: Tensor | None) -> None:
        """Count one step. A skip while the loss scale is above 1 only lowers the scale and is no failure."""
        self.total += skip
        failed = skip if scale is None else skip & (scale <= 1.0)
        self._run = (self._run + 1) * failed
        self.longest = torch.maximum(self.longest, self._run)
        self._steps += 1
        self._copies[self._steps % len(self._copies)].start(self.longest)

    def longest_before(self) -> int:
        """The longest run of failed steps, as it was `LAG` steps ago; waits for no later step."""
        return int(self._copies[(self._steps - self.LAG) % len(self._copies)].value())

    def reset_longest(self) -> None:
        self.longest = torch.zeros_like(self.longest)


class HostCopy:
    """A float64 scalar on its way from a device to the host; zero before the first."""

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros((), dtype=torch.float64, pin_memory=on_gpu(device))
        self._value = self._host.numpy()  # the same memory
        self._device = device
        self._arrived = gpu_module(device).Event(blocking=True) if on_gpu(device) else None

    def start(self, value: Tensor) -> None:
        """Copy `value` as it will be after the work queued so far."""
        self._host.copy_(value, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record(gpu_module(self._device).current_stream(self._device))

    def value(self) -> float:
        """The value; waits until it has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return float(self._value)
