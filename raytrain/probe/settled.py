"""What a plan left to a measurement: settled once by the workers, all alike, and written to `memory_probe.json`.

A restarted or resumed attempt takes what was measured first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from raytrain.allocator import give_back_freed_memory
from raytrain.checkpoint import LoadedCheckpoint
from raytrain.errors import RunError, StateLost
from raytrain.faults import fallen_precision
from raytrain.loop_state import Reporter
from raytrain.memory import process_budget, processes_here
from raytrain.plan import Deferred, Resolved
from raytrain.plan_memory import DOUBTFUL, TINY_PARAMETERS
from raytrain.plan_values import size_text
from raytrain.probe.precisions import compare_inflight
from raytrain.probe.record import read_measured, shared_record, write_decision, write_measured
from raytrain.probe.settled_layers import settle_layers
from raytrain.run_folder import RunFolder
from raytrain.search.measurement import Candidate, Measurement
from raytrain.search.micro_batch import Next, choose_micro_batch, micro_batch_sizes, next_size, settled_record
from raytrain.search.precision import choose_inflight
from raytrain.search.shares import SPLITS
from raytrain.session import Session
from raytrain.trainable import parameters_of

Push = Callable[[dict[str, Any]], None]
"""Progress for the driver; silent but on rank 0."""

MEASURED_PASSES = 4
"""So many micro-batches of each worker, at most, show what a second one in flight is worth."""


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
        known = read_measured(run).get("precision", {}).get("value")
    if known is None and isinstance(planned, Deferred):
        session.prepare("fp32")
        settle_layers(session, run, precisions=planned.bounds, reporter=reporter)
        push({"phase": "measuring precisions"})
        chosen, trials = session.measure_precision(list(planned.bounds))
        session.use_precision(chosen.value)
        if session.workers.rank == 0:
            write_decision(run, "precision", chosen, trials, reporter)
        return str(chosen.value)
    session.prepare(known or session.job.planned("precision"))
    settle_layers(session, run, precisions=[session.precision or ""], reporter=reporter)
    return session.precision or ""


def settle_inflight(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """One or two micro-batches in flight, where the plan leaves it open; needs a prepared session.

    Raises:
        torch.OutOfMemoryError, StateLost: the measurement failed here, or on a host. It ends the attempt, for the
            others wait in the middle of an exchange; where two were in flight, the next attempt takes one.
    """
    if not isinstance(session.job.plan.inflight, Deferred):
        return
    known = shared_record(session, run, "inflight")
    if known is not None:
        session.settle(inflight=Resolved(known["value"], known["reason"]))
        return
    push({"phase": "measuring micro-batches in flight"})
    try:
        chosen, seconds = measure_inflight(session)
    except (torch.OutOfMemoryError, StateLost) as error:
        if session.step.inflight == 2:  # the next attempt, in which nothing waits any more for this one, takes one
            why = f"2 in flight failed while measured ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
            write_decision(run, "inflight", Resolved(1, why), {}, reporter)
        raise
    session.settle(inflight=chosen)
    if session.workers.rank == 0:
        write_decision(run, "inflight", chosen, seconds, reporter)


def measure_inflight(session: Session) -> tuple[Resolved, dict[int, float]]:
    """One and two micro-batches in flight on the real model and its first ones; changes nothing it measures."""
    feed, batches = session.feed, session.feed.batches
    handles, _ = feed.window(session.state.cursor)
    rows = handles[: MEASURED_PASSES * batches.micro_batch * batches.world]
    seconds = compare_inflight(
        session.step,
        lambda: feed.micro_batches(rows),
        passes=feed.passes(len(rows)),
        workers=session.workers,
        device=session.device,
    )
    return choose_inflight(seconds), seconds


def settle_micro_batch(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """`loop.micro_batch_size: auto` where the plan leaves it to memory; needs a prepared session.

    What was measured for the same batch, workers and precision is taken again. A model of which the plan knew nothing,
    and which turns out to be tiny, is not measured.

    Raises:
        RunError: not even one row fits.
    """
    job = session.job
    if not isinstance(job.plan.micro_batch_size, Deferred):
        return
    total, world = int(job.planned("global_batch_size")), session.workers.world
    settings = {"global_batch_size": total, "workers": world, "precision": session.precision}
    known = shared_record(session, run, "micro_batch")
    if known is not None and known["settings"] == settings:
        session.use_micro_batch(Resolved(known["value"], known["reason"]))
        spare_memory(session, peak=known["peak_bytes"], budget=known["budget_bytes"])
        return
    share = micro_batch_sizes(total, world * _parts(session))[-1]
    unasked = session.device.type == "cpu" and job.plan.model_facts is None and job.cluster.memory_limit is None
    if unasked and parameters_of(session.trainable.module) < TINY_PARAMETERS:
        reason = f"one worker's share of {total}: the model has fewer than {TINY_PARAMETERS:,} parameters"
        session.use_micro_batch(Resolved(share, reason))
        return
    push({"phase": "measuring memory"})
    chosen, record = measure_micro_batch(session, settings)
    session.use_micro_batch(chosen)
    spare_memory(session, peak=record["peak_bytes"], budget=record["budget_bytes"])
    if session.workers.rank == 0:
        write_measured(run, "micro_batch", record)
        reporter.event("decision", what="micro_batch", value=chosen.value, reason=chosen.reason)


def spare_memory(session: Session, *, peak: int | None, budget: int | None) -> None:
    """On a CPU, where a step needs more than half of what a worker may take, have it keep no freed memory.

    What malloc keeps made the resident set of a mixture of experts half as large again as what was in use.
    """
    if session.device.type == "cpu" and peak and budget and peak > DOUBTFUL * budget:
        give_back_freed_memory()


def memory_budget(session: Session) -> int | None:
    """Bytes that each worker may take (`cluster.memory_fraction`, `cluster.memory_limit`), the same on every worker."""
    cluster = session.job.cluster
    own = process_budget(
        session.device, fraction=cluster.memory_fraction, limit=cluster.memory_limit, processes=processes_here()
    )
    known = [row[0] for row in session.workers.gather_floats([float(own or 0)]) if row[0]]
    return int(min(known)) if known else None


def measure_micro_batch(
    session: Session, settings: dict[str, Any], *, sizes: Sequence[int] = (), known: Sequence[Measurement] = ()
) -> tuple[Resolved, dict[str, Any]]:
    """The largest micro-batch that fits, and the record of how it was found. Changes nothing it measures.

    Args:
        settings: what the answer holds for.
        sizes: to choose from, ascending; all that share the global batch where there are none.
        known: what has been measured already.
    Raises:
        RunError: not even the smallest micro-batch fits.
    """
    assert session.precision is not None, "measured after `prepare`"
    shares = session.workers.world * _parts(session)
    sizes = sizes or micro_batch_sizes(int(session.job.planned("global_batch_size")), shares)
    budget = memory_budget(session)
    tried = [(Next(one.candidate.micro_batch_size, None), one) for one in known]
    before = session.step.inflight
    if isinstance(session.job.plan.inflight, Deferred):
        session.step.inflight = 2  # what keeps more is measured
    try:
        while (asked := next_size(sizes, [one for _, one in tried], budget=budget)) is not None:
            candidate = Candidate(session.precision, asked.rows)
            found = session.measure(candidate, budget_bytes=budget, passes=0, with_memory=True)
            # a loss that is not finite takes as much memory as any other; the run itself has rules for it
            tried.append((asked, replace(found, outcome="ok") if found.outcome == "nonfinite" else found))
    finally:
        session.step.inflight = before
    chosen = choose_micro_batch(sizes, [one for _, one in tried], budget=budget)
    if chosen is None:
        raise _nothing_fits(tried[-1][1], budget)
    return chosen, settled_record(chosen, tried, budget=budget, settings=settings)


def _parts(session: Session) -> int:
    """Micro-batches of an equal share, where unequal ones are to be measured."""
    return SPLITS if isinstance(session.job.plan.shares, Deferred) else 1


def _nothing_fits(last: Measurement, budget: int | None) -> RunError:
    rows = last.candidate.micro_batch_size
    if last.outcome == "error":
        return RunError(f"a step of {rows} rows cannot be taken: {last.reason}")
    allowed = "" if budget is None else f" ({size_text(budget)} for a worker)"
    needed = "" if last.peak_bytes is None else f", {size_text(last.peak_bytes)} at its peak"
    return RunError(
        f"not even a micro-batch of {rows} rows fits{needed}: {last.reason}; raise cluster.memory_fraction or"
        f" cluster.memory_limit{allowed}, set loop.activation_checkpointing, or make the model smaller"
    )
