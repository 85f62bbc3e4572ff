"""`memory_probe.json`: what was measured at the start of a run; restarted and resumed attempts take it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raytrain.plan.choice import Resolved
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session
from raytrain.train.state import Reporter

Push = Callable[[dict[str, Any]], None]
"""Progress for the driver; silent but on rank 0."""


def shared_record(session: Session, run: RunFolder, what: str) -> dict[str, Any] | None:
    """What rank 0 reads of one decision in memory_probe.json, on every worker; None where it was not taken yet."""
    own = read_measured(run).get(what) if session.workers.rank == 0 else None
    return session.workers.broadcast_object(own)


def read_measured(run: RunFolder) -> dict[str, Any]:
    """What this run has measured so far, by what it decides."""
    return run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}


def write_measured(run: RunFolder, what: str, record: dict[str, Any]) -> None:
    """Add one decision to memory_probe.json; one rank's alone, mostly rank 0's."""
    run.write_json(run.memory_probe, {**read_measured(run), what: record})


def write_decision(run: RunFolder, what: str, chosen: Resolved, trials: Any, reporter: Reporter) -> None:
    """The same with its event: what was decided, why, and from what."""
    write_measured(run, what, {"value": chosen.value, "reason": chosen.reason, "trials": trials})
    reporter.event("decision", what=what, value=chosen.value, reason=chosen.reason)
