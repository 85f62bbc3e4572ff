"""What a model tells at each logged row beside scalars: a row of a file of its own, and traces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True)
class WindowRow:
    """What a window of steps leaves behind.

    Attributes:
        metrics: scalars for the row of metrics.jsonl.
        row: of experts.jsonl in the run folder.
        traces: step -> content of its routing trace, on rank 0.
        events: (kind, fields) for events.jsonl.
    """

    metrics: dict[str, float]
    row: dict[str, Any]
    traces: dict[int, bytes] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class WindowLog(Protocol):
    """What a model tells at each logged row beside its scalars: sums over the steps since the row before."""

    def device_values(self) -> Tensor:
        """(n,) on the device, the same on every worker; read together with the row's other values."""
        ...

    def host_values(self) -> list[float]:
        """This worker's own numbers, as many as every other worker's."""
        ...

    def forget(self) -> None:
        """What ran since the last step was none: a measurement, of which nothing may stay."""
        ...

    def close(self, step: int, device: list[float], workers: list[list[float]]) -> WindowRow:
        """End the window with both, as read, and those of all workers; the next one begins."""
        ...
