"""Fault records in the run folder: one file for each failed worker of an attempt, so there is never a second writer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from raytrain.errors import CollectiveFailed
from raytrain.runs.folder import RunFolder


@dataclass(frozen=True)
class Fault:
    """One failure of one attempt, as the failing worker (or the controller, for a dead one) recorded it.

    Attributes:
        attempt: the attempt that failed.
        rank: the worker.
        step: the optimizer step it was in (0 = before the first), None where a process just died.
        error: exception type name, or "WorkerDied".
        message: the first line of the exception.
        traceback: the text of the traceback ("" for a death).
        precision: `precision.dtype` in force.
        reduced: whether the step ran under autocast.
        final: raytrain's own explanation; will not go away by itself.
        from_step: the step the attempt had started from, as far as whoever wrote it knew (`origins` knows better).
        time: unix seconds.
        out_of_memory: by the type of the exception.
        micro_batch: rows of a micro-batch then; None where a process just died, or before there was any.
    """

    attempt: int
    rank: int
    step: int | None
    error: str
    message: str
    traceback: str
    precision: str
    reduced: bool
    final: bool
    from_step: int
    time: float
    out_of_memory: bool = False
    micro_batch: int | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)


def write_fault(run: RunFolder, fault: Fault) -> None:
    """One file for each failed worker of an attempt, below the run folder."""
    run.write_json(f"faults/{fault.attempt:04d}-rank{fault.rank:05d}.json", fault.to_json())


def read_faults(run: RunFolder, *, since: int) -> list[Fault]:
    """The decisive fault of each failed attempt from number `since` on: a death or an out-of-memory before the errors
    that it caused, and anything before what its peers noticed of it."""
    first: dict[int, Fault] = {}
    for entry in run.store.entries("faults"):
        fault = Fault(**run.read_json(f"faults/{entry.name}"))
        if fault.attempt < since:
            continue
        known = first.get(fault.attempt)
        if known is None or _rank(fault) < _rank(known):
            first[fault.attempt] = fault
    return [first[attempt] for attempt in sorted(first)]


def _rank(fault: Fault) -> tuple[bool, bool, float]:
    cause = fault.error == "WorkerDied" or fault.out_of_memory
    return fault.error == CollectiveFailed.__name__, not cause, fault.time


def fallen_precision(run: RunFolder) -> str | None:
    """The precision a fall-back of this run has settled on, if any."""
    rows = [row for row in run.read_rows(run.events) if row["kind"] == "decision" and row.get("precision")]
    return rows[-1]["precision"] if rows else None
