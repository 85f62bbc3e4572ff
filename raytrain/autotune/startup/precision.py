"""Precision and micro-batches in flight where a plan left them to a measurement: settled once by the workers, all
alike, and written to `memory_probe.json`. (`settled_memory`, `settled_layers` and `settled_shares` have the others.)

A restarted or resumed attempt takes what was measured first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrain.autotune.probe.precision import compare_inflight, compare_precisions
from raytrain.autotune.search.precision import choose_inflight, choose_precision
from raytrain.autotune.startup.layers import resolve_layers
from raytrain.autotune.startup.micro_batch import NothingFits, take_fitting_rows
from raytrain.autotune.startup.record import Push, shared_record, write_decision
from raytrain.checkpoint.reader import LoadedCheckpoint
from raytrain.errors import StateLost, first_line
from raytrain.plan.choice import Deferred, Resolved
from raytrain.runs.faults import fallen_precision
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session
from raytrain.train.state import Reporter

MEASURED_PASSES = 4
"""So many micro-batches of each worker, at most, show what a second one in flight is worth."""


def resolve_precision(
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
    fallen = session.workers.broadcast_object(forced or fallen)
    known = fallen or (loaded.state["precision"] if loaded else None)
    if known is None and isinstance(planned, Deferred):
        known = (shared_record(session, run, "precision") or {}).get("value")
    if known is None and isinstance(planned, Deferred):
        session.prepare("fp32")
        try:
            take_fitting_rows(session, run, reporter=reporter, push=push)
        except NothingFits as error:
            return _settle_unheld(session, run, planned.bounds, error, reporter=reporter, push=push)
        resolve_layers(session, run, precisions=planned.bounds, reporter=reporter, push=push)
        push({"phase": "measuring precisions"})
        chosen, trials = measure_precision(session, list(planned.bounds))
        session.use_precision(chosen.value)
        if session.workers.rank == 0:
            write_decision(run, "precision", chosen, trials, reporter)
        return str(chosen.value)
    session.prepare(known or session.job.planned("precision"))
    resolve_layers(session, run, precisions=[session.precision or ""], reporter=reporter, push=push)
    return session.precision or ""


def _settle_unheld(
    session: Session, run: RunFolder, bounds: Sequence[str], why: NothingFits, *, reporter: Reporter, push: Push
) -> str:
    """The first precision of which a row fits where none does in fp32: nothing can be held against fp32 then."""
    for name in bounds:
        session.use_precision(name)
        try:
            take_fitting_rows(session, run, reporter=reporter, push=push)
        except NothingFits:
            continue
        unheld = f"in fp32 {why}; {name} fits, and could not be held against it: watch its loss"
        layers = isinstance(session.job.plan.fp32_layers, Deferred)
        if layers:
            session.apply_choices(fp32_layers=Resolved([], unheld))
        if layers and session.workers.rank == 0:  # for an attempt that follows: it could not measure them either
            write_decision(run, "fp32_layers", Resolved([], unheld), {"precision": name, "layers": []}, reporter)
        if session.workers.rank == 0:
            write_decision(run, "precision", Resolved(name, unheld), [], reporter)
        return name
    raise why


def measure_precision(session: Session, candidates: list[str]) -> tuple[Resolved, list[dict[str, Any]]]:
    """The precision of these for the real model, and what each showed: on the first micro-batch of the window, the same
    on every worker. Needs `prepare("fp32")` first; changes nothing it measures. Collective."""
    indices, _ = session.loader.window(session.state.cursor)
    trials = compare_precisions(
        session.trainable,
        session.loader.first(indices),
        candidates=candidates,
        gradients=session.step.gradients,
        workers=session.workers,
        device=session.device,
    )
    return choose_precision(trials), [trial.to_json() for trial in trials]


def resolve_inflight(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """One or two micro-batches in flight, where the plan leaves it open; needs a prepared session.

    Raises:
        StateLost: a host is gone. It ends the attempt; where two were in flight, the next one takes one.
    """
    if not isinstance(session.job.plan.inflight, Deferred):
        return
    known = shared_record(session, run, "inflight")
    if known is not None:
        session.apply_choices(inflight=Resolved(known["value"], known["reason"]))
        return
    push({"phase": "measuring micro-batches in flight"})
    try:
        chosen, seconds = measure_inflight(session)
    except StateLost as error:  # all workers notice: one writes
        if session.step.inflight == 2 and session.workers.rank == 0:
            why = f"2 in flight failed while measured ({type(error).__name__}: {first_line(error)})"
            write_decision(run, "inflight", Resolved(1, why), {}, reporter)
        raise
    session.apply_choices(inflight=chosen)
    if session.workers.rank == 0:
        write_decision(run, "inflight", chosen, seconds, reporter)


def measure_inflight(session: Session) -> tuple[Resolved, dict[int, float]]:
    """One and two micro-batches in flight on the real model and its first ones; changes nothing it measures."""
    loader, batches = session.loader, session.loader.batches
    indices, _ = loader.window(session.state.cursor)
    rows = indices[: MEASURED_PASSES * batches.micro_batch * batches.world_size]
    seconds, failed = compare_inflight(
        session.step,
        lambda: loader.micro_batches(rows),
        passes=loader.passes(rows),
        workers=session.workers,
        device=session.device,
    )
    return choose_inflight(seconds, failed), seconds
