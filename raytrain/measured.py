"""What a plan left to a measurement: settled once by the workers, all alike, and written to `memory_probe.json`.

A restarted or resumed attempt takes what was measured first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from raytrain.checkpoint import LoadedCheckpoint
from raytrain.errors import StateLost
from raytrain.faults import fallen_precision
from raytrain.loop_state import Reporter
from raytrain.plan import Deferred, Resolved
from raytrain.run_folder import RunFolder
from raytrain.session import Session

Push = Callable[[dict[str, Any]], None]
"""Progress for the driver; silent but on rank 0."""


def settle_precision(
    session: Session, run: RunFolder, *, forced: str | None, loaded: LoadedCheckpoint | None, reporter: Reporter,
    push: Push,
) -> str:  # fmt: skip
    """Prepare the session in the precision in force: a fall-back, else the checkpoint's, else what was measured, else
    measured now.

    Args:
        forced: by the failure rules; None where they say nothing.
    """
    planned = session.job.plan.precision
    fallen = fallen_precision(run) if session.workers.rank == 0 else None
    fallen = session.workers.gather_bytes((forced or fallen or "").encode())[0].decode()
    known = fallen or (loaded.state["precision"] if loaded else None)
    if known is None and isinstance(planned, Deferred):
        known = _measured(run).get("precision", {}).get("value")
    if known is None and isinstance(planned, Deferred):
        session.prepare("fp32")
        push({"phase": "measuring precisions"})
        chosen, trials = session.measure_precision(list(planned.bounds))
        session.use_precision(chosen.value)
        if session.workers.rank == 0:
            _write(run, "precision", chosen, trials, reporter)
        return str(chosen.value)
    session.prepare(known or session.job.planned("precision"))
    return session.precision or ""


def settle_inflight(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """One or two micro-batches in flight, where the plan leaves it open; needs a prepared session.

    Raises:
        torch.OutOfMemoryError, StateLost: the measurement failed here, or on a host. It ends the attempt, for the
            others wait in the middle of an exchange; where two were in flight, the next attempt takes one.
    """
    if not isinstance(session.job.plan.inflight, Deferred):
        return
    own = _measured(run).get("inflight") if session.workers.rank == 0 else None
    known = json.loads(session.workers.gather_bytes(json.dumps(own).encode())[0])
    if known is not None:
        session.use_inflight(Resolved(known["value"], known["reason"]))
        return
    push({"phase": "measuring micro-batches in flight"})
    try:
        chosen, seconds = session.measure_inflight()
    except (torch.OutOfMemoryError, StateLost) as error:
        if session.step.inflight == 2:  # the next attempt, in which nothing waits any more for this one, takes one
            why = f"2 in flight failed while measured ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            _write(run, "inflight", Resolved(1, why), {}, reporter)
        raise
    session.use_inflight(chosen)
    if session.workers.rank == 0:
        _write(run, "inflight", chosen, seconds, reporter)


def _measured(run: RunFolder) -> dict[str, Any]:
    return run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}


def _write(run: RunFolder, what: str, chosen: Resolved, trials: Any, reporter: Reporter) -> None:
    record = {"value": chosen.value, "reason": chosen.reason, "trials": trials}
    run.write_json(run.memory_probe, {**_measured(run), what: record})
    reporter.event("decision", what=what, value=chosen.value, reason=chosen.reason)
