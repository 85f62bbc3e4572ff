"""`loop.micro_batch_size: auto` where the plan leaves it to memory: settled once by the workers, all alike.

A restarted or resumed attempt takes what was measured first, as `memory_probe.json` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raytrain.autotune.probe.step import StepProbe
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.micro_batch import (
    Next,
    choose_micro_batch,
    micro_batch_sizes,
    next_reading,
    settled_record,
)
from raytrain.autotune.startup.record import Push, shared_record, write_measured
from raytrain.errors import RunError
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.rules.memory import DOUBTFUL, TINY_PARAMETERS
from raytrain.plan.shares import SPLITS
from raytrain.plan.text import size_text
from raytrain.runs.folder import RunFolder
from raytrain.train.memory.allocator import give_back_freed_memory
from raytrain.train.memory.device import process_budget
from raytrain.train.session import Session
from raytrain.train.state import Reporter
from raytrain.trainable import parameters_of


class NothingFits(RunError):
    """Not even the smallest micro-batch fits into memory in this precision."""


def resolve_micro_batch(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """`loop.micro_batch_size: auto` where the plan leaves it to memory; needs a prepared session.

    What was measured for the same batch, workers, precision and layers in fp32 is taken again. A model of which the
    plan knew nothing, and which turns out to be tiny, is not measured.

    Raises:
        RunError: not even one row fits.
    """
    if isinstance(session.job.plan.micro_batch_size, Deferred):
        found = _measured_once(session, run, reporter=reporter, push=push)
        session.use_micro_batch(Resolved(found["value"], found["reason"]))
        spare_memory(session, peak=found["peak_bytes"], budget=found["budget_bytes"])


def take_fitting_rows(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """For what is measured before the micro-batch is settled: until then the feed has the largest, which may be more
    than there is memory for. Measured in the precision that the session stands in.

    Raises:
        RunError: not even one row fits.
    """
    if isinstance(session.job.plan.micro_batch_size, Deferred):
        session.loader.micro_batch = _measured_once(session, run, reporter=reporter, push=push)["value"]


def _measured_once(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> dict[str, Any]:
    """The record of the largest micro-batch that fits; of an earlier measurement where that was of the same."""
    job = session.job
    total, world_size = int(job.planned("global_batch_size")), session.workers.world_size
    settings = {
        "global_batch_size": total, "workers": world_size, "precision": session.precision,
        "fp32_layers": job.plan.value("fp32_layers", []),
    }  # fmt: skip
    known = shared_record(session, run, "micro_batch")
    if known is not None and known["settings"] == settings:
        return known
    share = micro_batch_sizes(total, world_size * _parts(session))[-1]
    unasked = session.device.type == "cpu" and job.plan.model_facts is None and job.cluster.memory_limit is None
    if unasked and parameters_of(session.trainable.module) < TINY_PARAMETERS:
        reason = f"one worker's share of {total}: the model has fewer than {TINY_PARAMETERS:,} parameters"
        return {"value": share, "reason": reason, "peak_bytes": None, "budget_bytes": None}
    push({"phase": "measuring memory"})
    chosen, record = measure_micro_batch(session, settings)
    if session.workers.rank == 0:
        write_measured(run, "micro_batch", record)
        reporter.event("decision", what="micro_batch", value=chosen.value, reason=chosen.reason)
    return record


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
        session.device, fraction=cluster.memory_fraction, limit=cluster.memory_limit, processes=session.sharing
    )
    known = [row[0] for row in session.workers.all_gather_floats([float(own or 0)]) if row[0]]
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
    shares = session.workers.world_size * _parts(session)
    sizes = sizes or micro_batch_sizes(int(session.job.planned("global_batch_size")), shares)
    budget = memory_budget(session)
    probe = StepProbe(session)
    tried = [(Next(one.candidate.micro_batch_size, None), one) for one in known]
    before = session.step.inflight
    if isinstance(session.job.plan.inflight, Deferred):
        session.step.inflight = 2  # what keeps more is measured
    try:
        while (asked := next_reading(sizes, [one for _, one in tried], budget=budget)) is not None:
            candidate = Candidate(session.precision, asked.rows)
            found = probe.measure(candidate, budget=budget, passes=0, with_memory=True)
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
    return NothingFits(
        f"not even a micro-batch of {rows} rows fits{needed}: {last.reason}; raise cluster.memory_fraction or"
        f" cluster.memory_limit{allowed}, set loop.activation_checkpointing, or make the model smaller"
    )
