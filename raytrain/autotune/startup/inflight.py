"""`experts.inflight: auto` on the real model: the passes of a step with one and with two micro-batches in flight."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from raytrain.autotune.probe.arms import timed_passes
from raytrain.autotune.search.arms import choose_inflight
from raytrain.autotune.startup.choice import DeferredChoice, Record, record_of
from raytrain.errors import StateLost, first_line
from raytrain.plan.choice import Resolved
from raytrain.train.session import Session

#: Most micro-batches of each worker in a measurement.
MEASURED_PASSES = 4
MIN_ROUNDS = 3
MAX_ROUNDS = 12
IN_FLIGHT = (1, 2)


class InflightChoice(DeferredChoice):
    """One or two micro-batches in flight; needs a prepared session.

    A host that dies (`StateLost`) ends the attempt; where two were in flight, the next attempt uses one.
    """

    name = "inflight"

    def measure(self, settings: Any) -> Record:
        """See `measure_inflight`."""
        self.calibration.report_progress({"phase": "measuring micro-batches in flight"})
        try:
            return record_of(*measure_inflight(self.session))
        except StateLost as error:  # raised by all workers
            if self.session.step.inflight == 2:
                why = f"2 in flight failed while measured ({type(error).__name__}: {first_line(error)})"
                self.calibration.write(self.name, record_of(Resolved(1, why), {}))
            raise

    def apply(self, record: Record) -> None:
        """Keep so many micro-batches in flight."""
        self.session.use(replace(self.session.settings, inflight=record["value"]))


def measure_inflight(session: Session) -> tuple[Resolved, dict[int, float]]:
    """The choice, and the slowest worker's median seconds by micro-batches in flight, on the first micro-batches of the
    real model; no seconds if either fails. Changes nothing that it measures. Collective."""
    step, before = session.step, session.step.inflight
    befores = [partial(setattr, step, "inflight", number) for number in IN_FLIGHT]
    times, _ = timed_passes(session, befores, most=MEASURED_PASSES, rounds=(MIN_ROUNDS, MAX_ROUNDS))
    step.inflight = before
    arms = dict(zip(IN_FLIGHT, times, strict=True))
    failed = {number: arm.error for number, arm in arms.items() if arm.error}
    seconds = {} if failed else {number: arm.median_s for number, arm in arms.items()}
    return choose_inflight(seconds, failed), seconds
