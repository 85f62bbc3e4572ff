"""What a search had found for a job (`tune.found`), held against the real run at its start; all workers alike.

Two ways it can be out of date. Its signature is another: then its micro-batch is measured anew for memory. The
signature is the same, and yet the step in the real group takes another time or memory than the trial did: beyond a
tenth the measured figures replace the found ones. Either is an event.
"""

from __future__ import annotations

import math
from typing import Any

from cluster.environment import package_version
from raytrain.autotune.probe.step import StepProbe
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.micro_batch import micro_batch_sizes
from raytrain.autotune.search.signature import Signature, make_signature
from raytrain.autotune.startup.micro_batch import measure_micro_batch, memory_budget, spare_memory
from raytrain.autotune.startup.record import Push, shared_record, write_measured
from raytrain.config.sections import TuneFound
from raytrain.data.rows.longest import longest_row
from raytrain.plan.choice import Resolved
from raytrain.plan.text import size_text
from raytrain.runs.folder import RunFolder
from raytrain.train.device import device_bytes, device_name
from raytrain.train.session import Session
from raytrain.train.state import Reporter

VERSIONS = ("raytrain", "torch")
#: A difference up to this part of a found figure is noise.
TOLERATED = 0.1
#: Timed passes of the confirmation.
PASSES = 5


def signature_of(session: Session, *, workers: int | None = None) -> Signature:
    """What figures measured in this session depend on; needs no `prepare`.

    Args:
        workers: of the run that they are for, where this session is one process of a search.
    """
    job, split = session.job, session.source.train
    longest = longest_row(split)
    facts = job.plan.model_facts
    return make_signature(
        model=job.model, optim=job.optim, loop=job.loop,
        experts=job.builder_sections.get("experts"),
        parameters=None if facts is None else facts.parameters,
        longest_row=split.tokens_per_row or session.source.facts.row_bytes if longest is None else longest.size,
        device=device_name(session.device), device_bytes=device_bytes(session.device),
        threads=int(job.planned("threads") or 0),
        workers=session.workers.world_size if workers is None else workers,
        versions={name: str(package_version(name)) for name in VERSIONS},
    )  # fmt: skip


def confirm_found(session: Session, run: RunFolder, *, reporter: Reporter, push: Push) -> None:
    """Once in a run, before it trains, where the job carries `tune.found`; needs a prepared session with its
    micro-batch. Changes nothing that it measures.

    Raises:
        RunError: the signature is another, and not even one row fits now.
    """
    found = session.job.found
    if found is None or session.job.planned("strategy") == "fsdp":  # which measures nothing
        return
    if (known := shared_record(session, run, "found")) is not None:  # by an earlier attempt of this run
        planned = session.job.plan.micro_batch_size  # a restart after an out-of-memory takes less than what was known
        if planned.value_or(math.inf) > known["value"]:
            session.use_micro_batch(Resolved(known["value"], known["reason"]))
        again = known.get("micro_batch", known)
        spare_memory(session, peak=again["peak_bytes"], budget=again["budget_bytes"])
        return
    push({"phase": "confirming what the search found"})
    own = signature_of(session).to_json() if session.workers.rank == 0 else None
    now = Signature(**session.workers.broadcast_object(own))
    micro = int(session.job.planned("micro_batch_size"))
    if (reason := _other(found, now, micro=micro, precision=session.precision or "")) is not None:
        chosen, record = _measured_anew(session, micro)
        record = {"confirmed": False, "reason": reason, "micro_batch": record}
        text = f"{reason}; its micro-batch was measured anew: {chosen.reason}"
        _write(session, run, record, reporter, value=chosen.value, reason=text)
        return
    budget = memory_budget(session)
    measured = StepProbe(session).measure(
        Candidate(found.precision, micro), budget=budget, passes=PASSES, with_memory=True
    )
    rows = -(-int(session.job.planned("global_batch_size")) // session.workers.world_size)
    step_s = measured.step_s(rows) if measured.pass_s else None
    off = differences(found, step_s=step_s, peak_bytes=measured.peak_bytes)
    off += [measured.reason] if measured.outcome in ("error", "nonfinite") else []
    figures = {"step_s": step_s, "peak_bytes": measured.peak_bytes, "budget_bytes": budget}
    record = {"confirmed": not off, **figures, "was": found.model_dump()}
    text = "; ".join(off) or "step time and peak memory are within a tenth of what the search found"
    spare_memory(session, peak=measured.peak_bytes, budget=budget)
    if measured.outcome == "out_of_memory":
        chosen, again = _measured_anew(session, micro, known=measured)
        record["micro_batch"], record["confirmed"] = again, False
        text, micro = f"it does not fit the real group ({measured.reason}): {chosen.reason}", chosen.value
    _write(session, run, record, reporter, value=micro, reason=text)


def differences(found: TuneFound, *, step_s: float | None, peak_bytes: int | None) -> list[str]:
    """What differs from the found figures by more than a tenth, in words with both numbers."""
    told = []
    if step_s is not None and abs(step_s / found.step_s - 1) > TOLERATED:
        told.append(f"a step takes {1e3 * step_s:.4g} ms, the search found {1e3 * found.step_s:.4g} ms")
    if peak_bytes and found.peak_bytes and abs(peak_bytes / found.peak_bytes - 1) > TOLERATED:
        told.append(f"its peak is {size_text(peak_bytes)}, the search found {size_text(found.peak_bytes)}")
    return told


def _other(found: TuneFound, now: Signature, *, micro: int, precision: str) -> str | None:
    """Why the found figures are not of this run; None where they are."""
    if (found.precision, found.micro_batch_size) != (precision, micro):
        was = f"{found.precision} and {found.micro_batch_size} rows"
        return f"the search found {was}, this run has {precision} and {micro} rows"
    if now.hash in (found.signature, *found.also):
        return None
    changed = now.differences(found.facts)
    return f"the search was for something else ({'; '.join(changed) or 'another version of its signature'})"


def _measured_anew(
    session: Session, micro: int, *, known: Measurement | None = None
) -> tuple[Resolved, dict[str, Any]]:
    sizes = micro_batch_sizes(int(session.job.planned("global_batch_size")), session.workers.world_size)
    within = sorted({size for size in sizes if size <= micro} | {micro})
    chosen, record = measure_micro_batch(session, {}, sizes=within, known=() if known is None else (known,))
    session.use_micro_batch(chosen)
    spare_memory(session, peak=record["peak_bytes"], budget=record["budget_bytes"])
    return chosen, record


def _write(
    session: Session, run: RunFolder, record: dict[str, Any], reporter: Reporter, *, value: int, reason: str
) -> None:
    if session.workers.rank == 0:
        write_measured(run, "found", {"value": value, "reason": reason, **record})
        reporter.event("decision", what="tune.found", value=value, reason=reason)
        if not record["confirmed"]:
            print(f"unlike the search: {reason}")
