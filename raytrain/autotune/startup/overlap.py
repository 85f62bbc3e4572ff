"""`scale.overlap: auto` on the real model: the passes of a step and its all-reduces, with and without overlap."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from raytrain.autotune.probe.arms import TimedArm, timed_arms
from raytrain.autotune.search.arms import choose_overlap
from raytrain.autotune.startup.choice import DeferredChoice, Record, record_of
from raytrain.plan.choice import Resolved
from raytrain.train.memory.oom import StepDropped
from raytrain.train.parallel.buckets import could_overlap
from raytrain.train.session import Session

#: Most micro-batches of each worker in a measurement; only the last pass of a step can overlap.
MEASURED_PASSES = 4
#: Overlap must win each of `MIN_ROUNDS`, so that fewer are enough where it has lost one.
MIN_ROUNDS = 5
MAX_ROUNDS = 15


class OverlapChoice(DeferredChoice):
    """Whether all-reduces overlap with the last backward pass; needs a prepared session."""

    name = "overlap"

    def applies(self) -> bool:
        """With fewer workers than were planned for there may be nothing to reduce."""
        return super().applies() and self.session.workers.world_size > 1

    def measure(self, settings: Any) -> Record:
        """See `measure_overlap`."""
        if why := _no_overlap(self.session):
            return record_of(Resolved(False, why), {})
        self.calibration.report_progress({"phase": "measuring overlap"})
        try:
            return record_of(*measure_overlap(self.session))
        except StepDropped as error:  # raised by all workers
            return record_of(Resolved(False, f"no memory while it was measured ({error})"), {})

    def apply(self, record: Record) -> None:
        """Overlap, or reduce after the last backward pass."""
        self.session.use(replace(self.session.settings, overlap=record["value"]))


def _no_overlap(session: Session) -> str:
    """Why there is nothing to measure, the same on every worker; "" where there is."""
    if session.step.filler is not None:
        return "the model runs collectives inside backward, with which the all-reduces must not interleave"
    if not could_overlap(session.step.gradients, session.workers):
        total = sum(flat.nbytes for flat in session.step.gradients.buffers)
        return f"the gradients are one bucket of {total:,} bytes, which is whole only when backward is over"
    return ""


def measure_overlap(session: Session) -> tuple[Resolved, dict[str, list[float]]]:
    """The choice, and the slowest worker's seconds of each round by arm ("after", "during"), on the real model and the
    first micro-batches of its global batch; changes nothing that it measures. Collective.

    Raises:
        StepDropped: a worker had no memory; all raise it.
    """
    loader, step, workers = session.loader, session.step, session.workers
    rows = loader.global_batch(session.state.cursor).indices
    rows = rows[: MEASURED_PASSES * loader.batches.micro_batch * workers.world_size]
    passes, reduction = loader.passes(rows), step.reduction

    def arm(overlap: bool) -> TimedArm:
        def before() -> None:
            reduction.overlap(overlap)
            workers.all_reduce_ints([0])  # a barrier: all workers start together

        def work() -> None:
            backward = partial(step.backward, loader.micro_batches(rows), global_weight=1, passes=passes)
            reduction.passed(backward, flags=_no_flags)

        return TimedArm(work, before=before)

    after, during = timed_arms(
        [arm(overlap=False), arm(overlap=True)],
        trainable=session.trainable,
        workers=workers,
        device=session.device,
        min_rounds=MIN_ROUNDS,
        max_rounds=MAX_ROUNDS,
        decided=_lost,
    )
    reduction.overlap(False)
    seconds = {"after": after.round_s, "during": during.round_s}
    return choose_overlap(seconds), seconds


def _lost(seconds: list[list[float]]) -> bool:
    return any(after <= during for after, during in zip(*seconds, strict=True))


def _no_flags() -> list[int]:
    return [0, 0]
