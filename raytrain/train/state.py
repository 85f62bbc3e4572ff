"""What a loop obeys, what it must remember, and the doors through which it reports and saves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from raytrain.data.rows.batches import Cursor

Got = TypeVar("Got")


@dataclass(frozen=True)
class LoopLimits:
    """The resolved numbers a loop obeys (steps count from 1)."""

    max_steps: int
    log_every: int
    eval_every: int | None
    eval_batches: int | None
    patience: int | None
    min_delta: float
    nonfinite_steps: int


@dataclass
class LoopState:
    """Exactly what a resumed loop needs besides tensors; plain numbers, written to the checkpoint."""

    step: int = 0
    cursor: Cursor = field(default_factory=lambda: Cursor(epoch=0, position=0))
    best_eval_loss: float | None = None
    best_step: int | None = None
    gain_from: float | None = None  # the eval loss that the next must undercut by `min_delta`
    evals_without_gain: int = 0
    last_eval: dict[str, Any] | None = None
    final_loss: float | None = None
    skipped_steps: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> LoopState:
        """What `to_json` wrote."""
        return cls(**{**record, "cursor": Cursor(**record["cursor"])})


@dataclass(frozen=True)
class LoopOutcome:
    """Why a loop returned: "done", "plateau", "interrupted" or "rollback"; `reason` in words."""

    kind: str
    reason: str
    bad_steps: int = 0


class Reporter(Protocol):
    """Where rows go; only rank 0's writes anything."""

    def metrics(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl."""
        ...

    def event(self, kind: str, **fields: Any) -> None:
        """One row of events.jsonl."""
        ...

    def window(self, row: dict[str, Any], traces: dict[int, bytes]) -> None:
        """One row of experts.jsonl, and routing traces by step."""
        ...


class Saver(Protocol):
    """Writes checkpoints; `save` is called by every worker at the same step."""

    def due(self, step: int) -> bool:
        """Whether rank 0 wants a checkpoint after `step`."""
        ...

    def save(self, state: LoopState, *, final: bool) -> None:
        """Take a snapshot of the state after `state.step` and write it."""
        ...


class NeverSaves:
    """The saver of a loop whose state nobody keeps (measurements)."""

    def due(self, step: int) -> bool:
        """Never."""
        return False

    def save(self, state: LoopState, *, final: bool) -> None:
        """Nothing is written."""


class Fetching:
    """What getting batches takes from the process that trains.

    Attributes:
        seconds: in which it waited for them, or made them.
        cpu_s: of these, in which it computed itself.
    """

    def __init__(self) -> None:
        self.seconds = self.cpu_s = 0.0

    def timed(self, batches: Iterator[Got]) -> Iterator[Got]:
        """The same batches, what each takes added up."""
        came: Got | None = None
        while True:
            begin, cpu = time.perf_counter(), time.thread_time()
            came = next(batches, None)
            self.seconds += time.perf_counter() - begin
            self.cpu_s += time.thread_time() - cpu
            if came is None:
                return
            yield came


class Clock:
    """Seconds by purpose, on this worker, since its attempt began (DESIGN section 3, `time` in result.json).

    Args:
        step: that the attempt begins with.
    """

    def __init__(self, step: int = 0) -> None:
        purposes = ("data", "compute", "communication", "compile", "eval", "save", "restart", "lost")
        self.seconds: dict[str, float] = dict.fromkeys(purposes, 0.0)
        self._kept: dict[int, tuple[float, dict[str, float]]] = {}
        self.keep(step)

    def add(self, purpose: str, seconds: float) -> None:
        """Charge seconds to a purpose."""
        self.seconds[purpose] += seconds

    def keep(self, step: int) -> None:
        """A checkpoint of `step`: with it nothing of what was spent so far can be lost."""
        self._kept[step] = time.perf_counter(), dict(self.seconds)

    def rewind(self, step: int, *, restart_s: float) -> None:
        """The checkpoint of `step` is in force again: whatever came after it was lost, but for the way back."""
        before = max((known for known in self._kept if known <= step), default=min(self._kept))
        kept_at, seconds = self._kept[before]
        self.seconds = dict(seconds)
        self.add("restart", restart_s)
        self.add("lost", time.perf_counter() - kept_at - restart_s)
        self._kept = {known: then for known, then in self._kept.items() if known < step}
        self.keep(step)


class NonFinite:
    """Skipped steps, counted on the device; read with the other values of a logged row."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self._run = torch.zeros((), dtype=torch.float64, device=device)
        self.longest = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, skip: Tensor, *, scale: Tensor | None) -> None:
        """Count one step. While a loss scale above 1 can still fall, a skip is its ordinary search and no failure."""
        self.total += skip
        failed = skip if scale is None else skip & (scale <= 1.0)
        self._run = torch.where(failed, self._run + 1, 0.0)
        self.longest = torch.maximum(self.longest, self._run)
