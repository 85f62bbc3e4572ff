"""What a plan left to a measurement: settled once by the workers, all alike, and written to `memory_probe.json`.

A restarted or resumed attempt takes what was measured first.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

from raytrain.checkpoint import LoadedCheckpoint
from raytrain.faults import fallen_precision
from raytrain.loop_state import Reporter
from raytrain.pace import device_kind
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
        _write(session, run, "precision", chosen, trials, reporter)
        return str(chosen.value)
    session.prepare(known or session.job.planned("precision"))
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


def settle_shares(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """Each worker's share of a batch, where the plan leaves it open; needs a prepared session.

    An attempt on the same machines, rank by rank, takes the shares that the first one measured, and sums in its order.
    """
    if not isinstance(session.job.plan.shares, Deferred):
        return
    micro = session.feed.batches.micro_batch
    kind = device_kind(session.device)
    places = [place.decode() for place in session.workers.gather_bytes(f"{socket.gethostname()} {kind}".encode())]
    about = {"places": places, "micro_batch_size": micro}
    own = _measured(run).get("shares") if session.workers.rank == 0 else None
    known = json.loads(session.workers.gather_bytes(json.dumps(own).encode())[0])
    if known is not None and known["trials"]["of"] == about:
        session.use_shares(Resolved(known["value"], known["reason"]))
        return
    push({"phase": "measuring workers"})
    chosen, paces = session.measure_shares(_sizes(session, micro, places))
    session.use_shares(chosen)
    trials = {"of": about, "paces": [pace.to_json() for pace in paces]}
    _write(session, run, "shares", chosen, trials, reporter)


def _sizes(session: Session, micro: int, places: list[str]) -> list[int]:
    """Rows of a pass to try: on GPUs of several kinds each may have room for more than the smallest of them."""
    several = session.device.type == "cuda" and len({place.partition(" ")[2] for place in places}) > 1
    if not several or session.job.loop.micro_batch_size != "auto":
        return [micro]
    most = max(micro, int(session.job.planned("global_batch_size")) // session.workers.world)
    return [micro << power for power in range((most // micro).bit_length())]


def _measured(run: RunFolder) -> dict[str, Any]:
    return run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}


def _write(session: Session, run: RunFolder, what: str, chosen: Resolved, trials: Any, reporter: Reporter) -> None:
    if session.workers.rank == 0:
        record = {"value": chosen.value, "reason": chosen.reason, "trials": trials}
        run.write_json(run.memory_probe, {**_measured(run), what: record})
        reporter.event("decision", what=what, value=chosen.value, reason=chosen.reason)
