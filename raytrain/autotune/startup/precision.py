"""`precision.dtype: auto` on the real model: the precision that the session is prepared in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrain.autotune.probe.precision import compare_precisions
from raytrain.autotune.search.precision import choose_precision
from raytrain.autotune.startup.choice import Calibration, DeferredChoice, Record, record_of
from raytrain.autotune.startup.layers import LayersChoice
from raytrain.autotune.startup.micro_batch import NothingFits, use_fitting_rows
from raytrain.checkpoint.reader import LoadedCheckpoint
from raytrain.plan.choice import Deferred, Resolved
from raytrain.runs.faults import fallen_precision
from raytrain.train.session import Session


class PrecisionChoice(DeferredChoice):
    """Prepares the session in the first of these that there is: the precision after a fall-back, the checkpoint's, the
    plan's, the recorded one, the one measured now. The layers in fp32 are resolved with it.

    Args:
        forced: by the failure rules; None where they demand none.
        loaded: the checkpoint to resume from.
    """

    name = "precision"

    def __init__(self, calibration: Calibration, *, forced: str | None, loaded: LoadedCheckpoint | None) -> None:
        super().__init__(calibration)
        self._forced, self._loaded = forced, loaded
        self._prepared = False

    def resolve(self) -> None:
        """Prepare the session."""
        planned = self.session.job.plan.precision
        if given := self._given():
            self._prepare(given)
        elif isinstance(planned, Deferred):
            self.decide()
        else:
            self._prepare(planned.value)

    def _given(self) -> str | None:
        session = self.session
        fallen = fallen_precision(self.calibration.run) if session.workers.rank == 0 else None
        fallen = session.workers.broadcast_object(self._forced or fallen)
        return fallen or (self._loaded.state["precision"] if self._loaded else None)

    def _prepare(self, precision: str) -> None:
        self.session.prepare(precision)
        LayersChoice(self.calibration, precisions=[precision]).resolve()

    def apply(self, record: Record) -> None:
        """Prepare the session in a recorded precision; a measurement has prepared it in fp32."""
        if self._prepared:
            self.session.use_precision(record["value"])
        else:
            self._prepare(record["value"])

    def shown(self, record: Record) -> tuple[str, str]:
        """The precision."""
        return "precision", record["value"]

    def measure(self, settings: Any) -> Record:
        """Prepare the session in fp32, and measure with as many rows as fit. If none does, the answer is the first
        precision in which one fits."""
        planned = self.session.job.plan.precision
        assert isinstance(planned, Deferred), "measured only where the plan leaves it open"
        self.session.prepare("fp32")
        self._prepared = True
        try:
            use_fitting_rows(self.calibration)
        except NothingFits as error:
            return self._first_that_fits(planned.bounds, error)
        LayersChoice(self.calibration, precisions=planned.bounds).resolve()
        self.calibration.report_progress({"phase": "measuring precisions"})
        return record_of(*measure_precision(self.session, list(planned.bounds)))

    def _first_that_fits(self, candidates: Sequence[str], why: NothingFits) -> Record:
        """Where no row fits in fp32 nothing can be compared with it."""
        for name in candidates:
            self.session.use_precision(name)
            try:
                use_fitting_rows(self.calibration)
            except NothingFits:
                continue
            chosen = Resolved(name, f"in fp32 {why}; {name} fits, and could not be compared with it: watch its loss")
            layers = LayersChoice(self.calibration, precisions=[name])
            if layers.applies():  # recorded for the next attempt, which could not measure them either
                record = {"value": [], "reason": chosen.reason, "trials": {"precision": name, "layers": []}}
                layers.apply(record)
                self.calibration.write(layers.name, record)
            return record_of(chosen, [])
        raise why


def measure_precision(session: Session, candidates: list[str]) -> tuple[Resolved, list[dict[str, Any]]]:
    """The precision of these for the real model, and what each showed on the first micro-batch of the global batch, the
    same on every worker. Needs `prepare("fp32")`; changes nothing that it measures. Collective."""
    indices, _ = session.loader.global_batch(session.state.cursor)
    trials = compare_precisions(
        session.trainable,
        session.loader.first(indices),
        candidates=candidates,
        gradients=session.step.gradients,
        workers=session.workers,
        device=session.device,
    )
    return choose_precision(trials), [trial.to_json() for trial in trials]
