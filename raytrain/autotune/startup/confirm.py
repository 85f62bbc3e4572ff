"""Confirms at the start of a run what a search found for its job (`tune.found`), the same on every worker.

It can be out of date in two ways. Its signature differs: then the memory of its micro-batch is measured again. Or the
signature is the same, but a step of the real group needs another time or memory than the trial did: if they differ by
more than a tenth, the measured figures replace the found ones. Either is an event.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster.environment import package_version
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.micro_batch import micro_batch_sizes
from raytrain.autotune.search.signature import Signature, make_signature
from raytrain.autotune.startup.choice import DeferredChoice, Record
from raytrain.autotune.startup.micro_batch import measure_micro_batch, memory_budget, spare_memory
from raytrain.config.sections import TuneFound
from raytrain.data.rows.longest import longest_row
from raytrain.plan.choice import Resolved
from raytrain.plan.text import digits_text, size_text
from raytrain.train.device import device_bytes, device_name
from raytrain.train.session import Session

VERSIONS = ("raytrain", "torch")
#: A difference up to this fraction of a found figure is noise.
TOLERATED = 0.1
#: Timed passes of the confirmation.
PASSES = 5


def signature_of(session: Session, *, workers: int | None = None) -> Signature:
    """What figures measured in this session depend on; needs no `prepare`.

    Args:
        workers: of the run that the figures are for, if this session is one process of a search.
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


class FoundConfirmation(DeferredChoice):
    """Once in a run, before it trains: what a search found (`tune.found`), measured again in the real group of workers.
    Needs a prepared session with its micro-batch.

    Raises:
        RunError: the signature differs, and not even one row fits now.
    """

    name = "found"
    event = "tune.found"

    def applies(self) -> bool:
        """Where the job carries it; under fsdp nothing is measured."""
        return self.session.job.found is not None and self.session.job.planned("strategy") != "fsdp"

    def apply(self, record: Record) -> None:
        """Use the micro-batch that an earlier attempt had to reduce; a restart after an out-of-memory may use less."""
        settings = self.session.settings
        if settings.micro_batch is None or settings.micro_batch > record["value"]:
            self.session.use(replace(settings, micro_batch=record["value"]))
        measured = record.get("micro_batch", record)
        spare_memory(self.session, peak=measured["peak_bytes"], budget=measured["budget_bytes"])

    def measure(self, settings: Any) -> Record:
        """Compare signatures, then step time and peak memory."""
        session, found = self.session, self.session.job.found
        assert found is not None, "see `applies`"
        self.calibration.report_progress({"phase": "confirming what the search found"})
        own = signature_of(session).to_json() if session.workers.rank == 0 else None
        now = Signature(**session.workers.broadcast_object(own))
        micro = int(session.job.planned("micro_batch_size"))
        if (reason := _other(found, now, micro=micro, precision=session.precision or "")) is not None:
            chosen, measured = self._remeasure_micro_batch(micro)
            reason_now = f"{reason}; its micro-batch was measured again: {chosen.reason}"
            record = {"value": chosen.value, "reason": reason_now, "confirmed": False, "micro_batch": measured}
        else:
            record = self._compared(found, micro)
        if session.workers.rank == 0:
            print_difference(record)
        return record

    def _compared(self, found: TuneFound, micro: int) -> Record:
        session = self.session
        budget = memory_budget(session)
        candidate = Candidate(found.precision, micro)
        measured = self.calibration.probe.measure(candidate, budget=budget, passes=PASSES, with_memory=True)
        rows = -(-int(session.job.planned("global_batch_size")) // session.workers.world_size)
        step_s = measured.step_s(rows) if measured.pass_s else None
        off = differences(found, step_s=step_s, peak_bytes=measured.peak_bytes)
        off += [measured.reason] if measured.outcome in ("error", "nonfinite") else []
        reason = "; ".join(off) or "step time and peak memory are within a tenth of what the search found"
        record: Record = {"value": micro, "reason": reason, "confirmed": not off, "step_s": step_s}
        record |= {"peak_bytes": measured.peak_bytes, "budget_bytes": budget, "was": found.model_dump()}
        if measured.outcome == "out_of_memory":
            spare_memory(session, peak=measured.peak_bytes, budget=budget)
            chosen, again = self._remeasure_micro_batch(micro, known=measured)
            reason = f"it does not fit the real group ({measured.reason}): {chosen.reason}"
            record |= {"value": chosen.value, "reason": reason, "confirmed": False, "micro_batch": again}
        return record

    def _remeasure_micro_batch(self, micro: int, *, known: Measurement | None = None) -> tuple[Resolved, Record]:
        session = self.session
        sizes = micro_batch_sizes(int(session.job.planned("global_batch_size")), session.workers.world_size)
        whole = session.job.loop.micro_batch_size == "whole"
        within = [micro] if whole else sorted({size for size in sizes if size <= micro} | {micro})
        tried = () if known is None else (known,)
        chosen, record = measure_micro_batch(self.calibration.probe, {}, sizes=within, known=tried)
        session.use(replace(session.settings, micro_batch=chosen.value))
        return chosen, record


def print_difference(record: Record) -> None:
    """Print how a run differs from its search."""
    if not record["confirmed"]:
        print(f"unlike the search: {record['reason']}")


def differences(found: TuneFound, *, step_s: float | None, peak_bytes: int | None) -> list[str]:
    """What differs from the found figures by more than a tenth, each with both numbers."""
    off = []
    if step_s is not None and abs(step_s / found.step_s - 1) > TOLERATED:
        now, then = (digits_text(1e3 * spent, 4) for spent in (step_s, found.step_s))
        off.append(f"a step takes {now} ms, the search found {then} ms")
    if peak_bytes and found.peak_bytes and abs(peak_bytes / found.peak_bytes - 1) > TOLERATED:
        off.append(f"its peak is {size_text(peak_bytes)}, the search found {size_text(found.peak_bytes)}")
    return off


def _other(found: TuneFound, now: Signature, *, micro: int, precision: str) -> str | None:
    """Why the found figures do not hold for this run; None if they do."""
    if (found.precision, found.micro_batch_size) != (precision, micro):
        was = f"{found.precision} and {found.micro_batch_size} rows"
        return f"the search found {was}, this run has {precision} and {micro} rows"
    if now.hash in (found.signature, *found.also):
        return None
    changed = now.differences(found.facts)
    return f"the search was for something else ({'; '.join(changed) or 'another version of its signature'})"
