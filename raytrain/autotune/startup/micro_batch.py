"""`loop.micro_batch_size: auto` on the real model, where memory decides: the largest size that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.wording import counted
from raytrain.autotune.probe.step import StepProbe
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.micro_batch import (
    NextSize,
    choose_micro_batch,
    micro_batch_record,
    micro_batch_sizes,
    next_micro_batch,
)
from raytrain.autotune.startup.choice import Calibration, DeferredChoice, Record
from raytrain.errors import RunError
from raytrain.plan.choice import Deferred, Resolved
from raytrain.plan.rules.memory import DOUBTFUL, TINY_PARAMETERS
from raytrain.plan.shares import SPLITS
from raytrain.plan.text import size_text
from raytrain.train.memory.allocator import give_back_freed_memory
from raytrain.train.memory.device import process_budget
from raytrain.train.session import Session
from raytrain.trainable import parameters_of


class NothingFits(RunError):
    """Not even the smallest micro-batch fits into memory in this precision."""


class MicroBatchChoice(DeferredChoice):
    """Rows of a micro-batch; needs a prepared session. A tiny model of unknown size, on a CPU without a memory limit,
    is not measured.

    Raises:
        NothingFits: not even one row.
    """

    name = "micro_batch"

    def applies(self) -> bool:
        """Where the plan leaves it to memory, and no failure rule has decided."""
        return self.session.settings.micro_batch is None

    def settings(self) -> dict[str, Any]:
        """Batch, workers, precision and layers in fp32."""
        job = self.session.job
        return {
            "global_batch_size": int(job.planned("global_batch_size")), "workers": self.session.workers.world_size,
            "precision": self.session.precision, "fp32_layers": list(self.session.settings.fp32_layers),
        }  # fmt: skip

    def settings_of(self, known: Record) -> dict[str, Any]:
        """The same when it was measured."""
        return known["settings"]

    def shown(self, record: Record) -> tuple[str, str]:
        """The rows of a micro-batch."""
        return "batch", f"micro-batches of {record['value']}"

    def unmeasured(self) -> Record | None:
        """A worker's share, for a tiny model."""
        job = self.session.job
        unknown = job.plan.model_facts is None and job.cluster.memory_limit is None
        if self.session.device.type != "cpu" or not unknown:
            return None
        if parameters_of(self.session.trainable.module) >= TINY_PARAMETERS:
            return None
        share, total = _sizes(self.session)[-1], int(job.planned("global_batch_size"))
        reason = f"one worker's share of {total}: the model has fewer than {TINY_PARAMETERS:,} parameters"
        return {"value": share, "reason": reason, "peak_bytes": None, "budget_bytes": None}

    def measure(self, settings: dict[str, Any]) -> Record:
        """See `measure_micro_batch`."""
        self.calibration.report_progress({"phase": "measuring memory"})
        return measure_micro_batch(self.calibration.probe, settings)[1]

    def apply(self, record: Record) -> None:
        """Also keeps no freed memory where there is little."""
        self.session.use(replace(self.session.settings, micro_batch=record["value"]))
        spare_memory(self.session, peak=record["peak_bytes"], budget=record["budget_bytes"])


def use_fitting_rows(calibration: Calibration) -> None:
    """Before a measurement that precedes the choice of the micro-batch: until then the loader has the largest size,
    which may need more memory than there is. Measures in the session's present precision.

    Raises:
        NothingFits: not even one row.
    """
    choice = MicroBatchChoice(calibration)
    if choice.applies():
        calibration.session.loader.micro_batch = choice.known_or_measured()["value"]


def spare_memory(session: Session, *, peak: int | None, budget: int | None) -> None:
    """On a CPU, if a step needs more than half of a worker's memory, make malloc return freed memory.

    What malloc keeps made the resident set of a mixture of experts half as large again as what was in use.
    """
    if session.device.type == "cpu" and peak and budget and peak > DOUBTFUL * budget:
        give_back_freed_memory()


def memory_budget(session: Session) -> int | None:
    """Bytes that each worker may use (`cluster.memory_fraction`, `cluster.memory_limit`), the same on every worker."""
    cluster = session.job.cluster
    own = process_budget(
        session.device, fraction=cluster.memory_fraction, limit=cluster.memory_limit, processes=session.sharing
    )
    known = [row[0] for row in session.workers.all_gather_floats([float(own or 0)]) if row[0]]
    return int(min(known)) if known else None


def measure_micro_batch(
    probe: StepProbe, settings: dict[str, Any], *, sizes: Sequence[int] = (), known: Sequence[Measurement] = ()
) -> tuple[Resolved, Record]:
    """The largest micro-batch that fits, and the record of how it was found. Changes nothing that it measures.

    Args:
        settings: what the answer holds for.
        sizes: to choose from, ascending; by default all that divide the global batch.
        known: what has been measured already.
    Raises:
        RunError: not even the smallest micro-batch fits.
    """
    session = probe.session
    assert session.precision is not None, "measured after `prepare`"
    sizes = sizes or _sizes(session)
    budget = memory_budget(session)
    tried = [(NextSize(one.candidate.micro_batch_size, None), one) for one in known]
    before = session.step.inflight
    if isinstance(session.job.plan.inflight, Deferred):
        session.step.inflight = 2  # which needs more memory
    try:
        while (proposal := next_micro_batch(sizes, [one for _, one in tried], budget=budget)) is not None:
            candidate = Candidate(session.precision, proposal.rows)
            found = probe.measure(candidate, budget=budget, passes=0, with_memory=True)
            # a loss that is not finite needs as much memory as any other; training has its own rules for it
            tried.append((proposal, replace(found, outcome="ok") if found.outcome == "nonfinite" else found))
    finally:
        session.step.inflight = before
    chosen = choose_micro_batch(sizes, [one for _, one in tried], budget=budget)
    if chosen is None:
        raise _nothing_fits(tried[-1][1], budget)
    return chosen, micro_batch_record(chosen, tried, budget=budget, settings=settings)


def _sizes(session: Session) -> tuple[int, ...]:
    """All sizes that divide the global batch; smaller ones where shares are still to be measured."""
    parts = SPLITS if isinstance(session.job.plan.shares, Deferred) else 1
    return micro_batch_sizes(int(session.job.planned("global_batch_size")), session.workers.world_size * parts)


def _nothing_fits(last: Measurement, budget: int | None) -> RunError:
    rows = last.candidate.micro_batch_size
    if last.outcome == "error":
        return RunError(f"a step of {counted(rows, 'row')} cannot be run: {last.reason}")
    allowed = "" if budget is None else f" ({size_text(budget)} for a worker)"
    needed = "" if last.peak_bytes is None else f", {size_text(last.peak_bytes)} at its peak"
    return NothingFits(
        f"not even a micro-batch of {counted(rows, 'row')} fits{needed}: {last.reason}; raise cluster.memory_fraction"
        f" or cluster.memory_limit{allowed}, set loop.activation_checkpointing, or make the model smaller"
    )
