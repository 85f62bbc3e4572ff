"""Fault records in the run folder: one file per failed worker of an attempt, so that each has a single writer; and the
deaths of other processes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from raytrain.config.decode import JsonRecord
from raytrain.errors import ClusterLost, CollectiveFailed
from raytrain.runs.folder import RunFolder

#: The error of an attempt that ended because Ray itself was lost; also begins the reason of such a run.
CLUSTER_LOST = ClusterLost.__name__
#: Errors that are the cause of other errors of the same attempt.
CAUSES = ("WorkerDied", CLUSTER_LOST)
#: In the reason of a run whose training is complete; the report finds its remedy by it.
NOT_EXPORTED = "weights could not be exported"
#: Begins the reason of a run that Ray itself ended, where no fault is recorded.
RAY_FAILED = "Ray failed during the command"
#: Begins the reason of a run whose private cluster did not start.
RAY_NOT_STARTED = "Ray did not start on this machine"


@dataclass(frozen=True)
class Death:
    """A process that held state and has died."""

    who: str
    node: str  # "" where it never started
    pid: int | None
    time: float  # when the death was noticed, in unix seconds
    why: str
    silent: bool = False  # it did not respond, and was ended

    @property
    def title(self) -> str:
        where = f" on {self.node}" if self.node else ""
        return f"{self.who}{where}{f' (pid {self.pid})' if self.pid else ''}"


@dataclass(frozen=True)
class Fault(JsonRecord):
    """One failure of one attempt, recorded by the failing worker, by the controller if the worker died, or by the
    driver if Ray itself was lost.
    """

    attempt: int  # that failed
    rank: int | None  # None if Ray itself was lost
    # the optimizer step it was running (0 = before the first). Of a process that died: the one after the last that rank
    # 0 had reported, which may be seconds old; None before the first
    step: int | None
    error: str  # name of the exception type, "WorkerDied" or "ClusterLost"
    message: str  # the first line of the exception's; of a process that died, which one and what is known of why
    traceback: str = ""
    precision: str = ""  # the `precision.dtype` in use
    reduced: bool = False  # the step ran under autocast
    final: bool = False  # an error that raytrain explains itself, so that a retry cannot succeed
    from_step: int = 0  # the step that the attempt started from, as far as known (`recovery.origins` is exact)
    time: float = field(default_factory=time.time)
    out_of_memory: bool = False
    micro_batch: int | None = None  # its rows; None if the process died, or before the first micro-batch
    node: str | None = None  # id of the node of the worker in Ray, where known
    place: str = ""  # `file:line in function` of the user's own code that raised the exception

    @property
    def what(self) -> str:
        """The error, its message, and where in the user's code it was raised."""
        text = f"{self.error}: {self.message}" if self.message not in ("", self.error) else self.error
        return f"{text} at {self.place}" if self.place else text


def write_fault(run: RunFolder, fault: Fault) -> None:
    """Writes the record of one failed worker of an attempt, or of the loss of Ray."""
    run.write_json(record_of(fault.attempt, fault.rank), fault.to_json())


def record_of(attempt: int, rank: int | None) -> str:
    """The file in a run folder about one failed worker of an attempt, or, without a rank, the loss of Ray."""
    return f"faults/{attempt:04d}-{'cluster' if rank is None else f'rank{rank:05d}'}.json"


def record_lost_ranks(
    run: RunFolder, ranks: Sequence[int], *, message: str, step: int | None = None, node: str | None = None
) -> None:
    """Record that workers of the newest attempt died, unless they recorded a fault of their own.

    The others may notice only that a collective failed, and end the attempt before Ray reports the loss of a node.
    """
    attempt = run.current_attempt()
    for rank in ranks:
        if not run.exists(record_of(attempt, rank)):
            write_fault(run, Fault(attempt, rank, step, "WorkerDied", message, node=node))


def lost_cluster(attempt: int, message: str, *, time: float) -> Fault:
    """The fault of an attempt that ended because Ray itself was lost."""
    return Fault(attempt, None, None, CLUSTER_LOST, message, time=time)


def read_faults(run: RunFolder, *, since: int) -> list[Fault]:
    """The decisive fault of each failed attempt with a number of at least `since`.

    The loss of Ray, a died worker or an out-of-memory error comes before other errors, which it may have caused, and a
    failed collective, which is only a consequence, comes last.
    """
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
    cause = fault.error in CAUSES or fault.out_of_memory
    return fault.error == CollectiveFailed.__name__, not cause, fault.time


def fallen_precision(run: RunFolder) -> str | None:
    rows = [row for row in run.read_rows(run.events) if row["kind"] == "decision" and row.get("precision")]
    return rows[-1]["precision"] if rows else None
