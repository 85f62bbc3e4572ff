"""What a plan left to a measurement: settled once by the workers, all alike, and written to `memory_probe.json`.

A restarted or resumed attempt takes what was measured first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from raytrain.checkpoint import LoadedCheckpoint
from raytrain.faults import fallen_precision
from raytrain.loop_state import Reporter
from raytrain.measured_layers import settle_layers
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
        settle_layers(session, run, precisions=planned.bounds, reporter=reporter)
        push({"phase": "measuring precisions"})
        chosen, trials = session.measure_precision(list(planned.bounds))
        session.use_precision(chosen.value)
        _write(session, run, "precision", chosen, trials, reporter)
        return str(chosen.value)
    session.prepare(known or session.job.planned("precision"))
    settle_layers(session, run, precisions=[session.precision or ""], reporter=reporter)
    return session.precision or ""


def settle_inflight(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """One or two micro-batches in flight, where the plan leaves it open; needs a prepared session."""
    if not isinstance(session.job.plan.inflight, Deferred):
        return
    own = _measured(run).get("inflight") if session.workers.rank == 0 else None
    known = json.loads(session.workers.gather_bytes(json.dumps(own).encode())[0])
    if known is not None:
        session.use_inflight(Resolved(known["value"], known["reason"]))
        return
    push({"phase": "measuring micro-batches in flight"})
    chosen, seconds = session.measure_inflight()
    session.use_inflight(chosen)
    _write(session, run, "inflight", chosen, seconds, reporter)


def _measured(run: RunFolder) -> dict[str, Any]:
    return run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}


def _write(session: Session, run: RunFolder, what: str, chosen: Resolved, trials: Any, reporter: Reporter) -> None:
    if session.workers.rank == 0:
        record = {"value": chosen.value, "reason": chosen.reason, "trials": trials}
        run.write_json(run.memory_probe, {**_measured(run), what: record})
        reporter.event("decision", what=what, value=chosen.value, reason=chosen.reason)
