"""Fault records in the run folder: one file for each failed worker of an attempt, so there is never a second writer."""

from __future__ import annotations

import time
import traceback

from raytrain.errors import CollectiveFailed, OutOfMemory, RaytrainError, StateLost
from raytrain.execution.failure_policy import Fault
from raytrain.runs.folder import RunFolder
from raytrain.train.memory.device import is_out_of_memory


def fault_of(
    error: Exception,
    *,
    attempt: int,
    rank: int,
    step: int,
    precision: str,
    from_step: int,
    micro_batch: int | None = None,
) -> Fault:
    """The record of an exception that is being handled now; what raytrain explains itself will not go away."""
    return Fault(
        attempt=attempt,
        rank=rank,
        step=step,
        error=type(error).__name__,
        message=str(error).splitlines()[0] if str(error) else "",
        traceback=traceback.format_exc(),
        precision=precision,
        reduced=precision in ("bf16", "fp16", "tf32"),
        final=isinstance(error, RaytrainError) and not isinstance(error, OutOfMemory | CollectiveFailed | StateLost),
        from_step=from_step,
        time=time.time(),
        out_of_memory=is_out_of_memory(error, device=None),
        micro_batch=micro_batch,
    )


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
