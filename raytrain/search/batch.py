"""The search over batch size and precision: measurements in, the next ones to make or the decision out. Pure.

For each precision two small sizes give a line of time and one of memory. The time predicts the size from which
throughput hardly rises (the knee), which is measured next; bounds drawn through what is measured then say whether any
other size could change the answer, and which. The answer is the smallest size within `NEAR` of the best that memory
allows. A lower precision must beat the reference at its own best size by `WORTHWHILE_GAIN`, and pass the numeric gate.

A caller measures whatever `next_proposals` names until it names nothing, then asks `decide`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raytrain.planning.values import Resolved
from raytrain.search.decision import BatchDecision, nothing_fits, table_of
from raytrain.search.knee import SURE, chosen_size, doubt_of, next_size, size_reason, unsure_size
from raytrain.search.measurement import Candidate, Measurement
from raytrain.search.precision import WORTHWHILE_GAIN, GateReport, gate_refusal
from raytrain.search.space import MEMORY_PASSES, MOST_SIZES, MOST_STEPS, PASSES, BatchSpace, Proposal, nearest_at_most
from raytrain.search.speed_curve import SpeedCurve

__all__ = ["BatchDecision", "BatchSpace", "Proposal", "decide", "next_proposals"]

#: A precision whose bounds promise less than this part of what it has to reach is dropped.
HOPELESS = 0.95
#: A line of memory is read again beyond so many times the sizes that it was drawn through.
FAR = 2
#: Rows of a step of the gate, at most: rounding does not need many, and its steps are most of what a search costs.
GATE_ROWS = 8


def next_proposals(
    space: BatchSpace,
    measurements: Iterable[Measurement],
    running: Sequence[Proposal] = (),
    gates: Iterable[GateReport] = (),
) -> list[Proposal]:
    """What to measure now, at most as many as devices are idle; nothing while results must be awaited, or at the end.

    Args:
        measurements: all results so far. A measurement that crashed is one with the outcome "error".
        running: what was proposed and has not ended.
        gates: results of the proposals with `gate_steps`.
    """
    search = _Search(space, measurements, gates)
    idle = space.devices - len(running)
    return [wanted for wanted in search.wanted() if wanted not in running][: max(0, idle)]


def decide(space: BatchSpace, measurements: Iterable[Measurement], gates: Iterable[GateReport] = ()) -> BatchDecision:
    """The best that the measurements show; also of a search that was broken off.

    Raises:
        RunError: nothing that was measured can run; says how many bytes are wanted and which key allows more.
    """
    return _Search(space, measurements, gates).decision()


class _Search:
    def __init__(self, space: BatchSpace, measurements: Iterable[Measurement], gates: Iterable[GateReport]) -> None:
        known = list(measurements)
        self.space = space
        self.curves = {name: SpeedCurve(space, name, known) for name in space.precisions}
        self.lead = self.curves[space.lead]
        self.gates: Mapping[str, GateReport] = {gate.precision: gate for gate in gates}

    # -- what to measure --------------------------------------------------------------------------

    def wanted(self) -> list[Proposal]:
        """Everything that could be measured at the same time, the most urgent first: two sizes of every precision, the
        reference's before the others', then whatever promises most."""
        curves = sorted(self.curves.values(), key=lambda curve: curve is not self.lead)
        begun = [one for curve in curves for one in (*self._begin(curve), *self._again(curve))]
        by_promise = sorted(curves, key=lambda curve: -curve.reach)
        settled = [curve for curve in by_promise if not self._begin(curve) and not self._again(curve)]
        found = begun + [one for curve in settled for one in self._go_on(curve)]
        return found or self._between() or self._gate() or self._confirm()

    def _begin(self, curve: SpeedCurve) -> list[Proposal]:
        """The first sizes of a precision that have not been measured."""
        if curve.nonfinite or (len(curve.broken) > 1 and not curve.seconds):
            return []
        missing = [size for size in self._first(curve) if size not in curve.seconds]
        return [self._timed(curve, size, with_memory=self._unread(curve, size)) for size in missing]

    def _again(self, curve: SpeedCurve) -> list[Proposal]:
        """Once more what was timed beside other work on the machine, in a process of its own at another moment."""
        left = MOST_STEPS - curve.steps - self._reserved()
        if curve.nonfinite or left < 2:
            return []
        return [self._timed(curve, size, most=left - 1) for size in curve.unsteady if size in curve.measured]

    def _go_on(self, curve: SpeedCurve) -> list[Proposal]:
        """What one precision needs after its first sizes."""
        left = MOST_STEPS - curve.steps - self._reserved()
        if curve.nonfinite or not curve.measured or left < 2 or self._outdone(curve):
            return []
        size = next_size(curve) if curve.sizes_tried < MOST_SIZES else None
        if size is not None:
            read = left >= 2 + MEMORY_PASSES and self._frontier(curve, size)
            most = left - 1 - (MEMORY_PASSES if read else 0)
            return [self._timed(curve, size, most=most, with_memory=read)]
        unsure = unsure_size(curve)
        return [] if unsure is None or left < 3 else [self._timed(curve, unsure, most=left - 1)]

    def _first(self, curve: SpeedCurve) -> list[int]:
        """The two sizes to begin with; others near them where those do not work or fit."""
        fitting = [size for size in curve.fitting() if self._guessed_to_fit(curve, size)]
        start = [size for size in self.space.first_sizes() if size in fitting]
        known = [size for size in curve.measured if size not in start]
        begin = self.space.first_sizes()[0]
        spare = [size for size in fitting if size > begin and size not in start]
        spare += [size for size in reversed(fitting) if size < begin]
        return sorted((start + known + spare)[: min(2, len(fitting))])

    def _guessed_to_fit(self, curve: SpeedCurve, size: int) -> bool:
        """Before a precision has read its own memory, the reference's counts: weights and optimizer are the same."""
        return curve.line is not None or curve is self.lead or size in self.lead.fitting() or not self.lead.fitting()

    def _unread(self, curve: SpeedCurve, size: int) -> bool:
        return self.space.budget_bytes is not None and size not in curve.peaks

    def _reserved(self) -> int:
        """Steps kept for the confirmation of a peak."""
        return MEMORY_PASSES if self.space.budget_bytes is not None else 0

    def _frontier(self, curve: SpeedCurve, size: int) -> bool:
        """Whether larger sizes are out only by a line of memory that is drawn on from far smaller ones: an allocator
        that takes memory in large pieces makes it a rough one, so that it is read again here."""
        if not self._unread(curve, size) or curve.too_large is not None or not curve.peaks:
            return False
        return size == curve.fitting()[-1] < self.space.sizes[-1] and size > FAR * max(curve.peaks)

    def _timed(self, curve: SpeedCurve, size: int, *, most: int = PASSES, with_memory: bool = False) -> Proposal:
        passes = max(1, min(PASSES, most))
        return Proposal(Candidate(curve.precision, size), passes=passes, with_memory=with_memory)

    def _outdone(self, curve: SpeedCurve) -> bool:
        """Whether a precision cannot win any more, whatever its unmeasured sizes give by their bounds: another one,
        that no gate has refused, is ahead. To be ahead of the reference takes a gain that is worth its rounding."""
        for rival in self.curves.values():
            if rival is curve or rival.nonfinite or self._refused(rival):
                continue
            needed = rival.best
            if self.lead in (curve, rival):
                needed *= 1 + WORTHWHILE_GAIN if rival is self.lead else 1 / (1 + WORTHWHILE_GAIN)
            if curve.reach < HOPELESS * needed:
                return True
        return False

    def _refused(self, curve: SpeedCurve) -> str:
        """What the gate said against a precision, if it did."""
        gate = self.gates.get(curve.precision)
        return "" if gate is None else gate_refusal(gate)

    def _between(self) -> list[Proposal]:
        """More passes of the reference and of whoever may or may not beat it, where noise decides between them."""
        lead = chosen_size(self.lead)
        if lead is None:
            return []
        for curve in self.curves.values():
            size = chosen_size(curve)
            if curve is self.lead or size is None or self._outdone(curve):
                continue
            doubt = doubt_of(self.lead, lead, curve, size)
            if doubt > SURE and abs(self._gain(curve) / (1 + WORTHWHILE_GAIN) - 1) < 2 * doubt:
                pair = sorted(((self.lead, lead), (curve, size)), key=lambda one: -one[0].error(one[1]))
                for unsure, at in pair:
                    left = MOST_STEPS - unsure.steps - self._reserved()
                    if left >= 3:
                        return [self._timed(unsure, at, most=left - 1)]
        return []

    def _gate(self) -> list[Proposal]:
        if not self.space.gate_steps or chosen_size(self.lead) is None:
            return []
        for curve in self._winners():
            if curve.precision not in self.gates:
                both = [size for size in curve.fitting() if size in self.lead.fitting()]
                size = nearest_at_most(both, GATE_ROWS) or self.lead.measured[0]
                return [Proposal(Candidate(curve.precision, size), passes=0, gate_steps=self.space.gate_steps)]
            if not self._refused(curve):
                return []
        return []

    def _confirm(self) -> list[Proposal]:
        """The peak of the size that is going to be chosen."""
        curve = self._winner()
        size = None if curve is None else chosen_size(curve)
        if curve is None or size is None or not self._unread(curve, size):
            return []
        return [Proposal(Candidate(curve.precision, size), passes=0, with_memory=True)]

    # -- what follows -----------------------------------------------------------------------------

    def _gain(self, curve: SpeedCurve) -> float:
        """Throughput of a precision at its own best size against the reference's at its own."""
        size, lead = chosen_size(curve), chosen_size(self.lead)
        assert size is not None and lead is not None, "a gain is asked for where both were measured"
        return curve.score(size) / self.lead.score(lead)

    def _winners(self) -> list[SpeedCurve]:
        """Precisions that beat the reference on time, the fastest first."""
        others = [curve for curve in self.curves.values() if curve is not self.lead and chosen_size(curve) is not None]
        if chosen_size(self.lead) is None:
            return sorted(others, key=lambda curve: curve.best, reverse=True)
        faster = [curve for curve in others if self._gain(curve) > 1 + WORTHWHILE_GAIN]
        return sorted(faster, key=self._gain, reverse=True)

    def _winner(self) -> SpeedCurve | None:
        """The first that also passes its gate, else the reference; None where nothing runs."""
        alone = chosen_size(self.lead) is None
        for curve in self._winners():
            passed = curve.precision in self.gates and not self._refused(curve)
            if alone or not self.space.gate_steps or passed:
                return curve
        return None if alone else self.lead

    def _why_not(self, curve: SpeedCurve) -> str:
        """Why a precision other than the chosen one was not taken."""
        size = chosen_size(curve)
        if curve.nonfinite:
            return f"refused: {curve.nonfinite}"
        if size is None:
            failed = next(iter(curve.broken.values()), "")
            return f"refused: {failed}" if failed else "no size of it was measured, or none fits"
        if curve is self.lead or chosen_size(self.lead) is None:
            return ""
        told = f"{self._gain(curve):.2f} times as fast as {self.space.lead}"
        if self._refused(curve):
            return f"measured {told}, but refused: {self._refused(curve)}"
        few = " and dropped after its first two sizes" if len(curve.seconds) <= 2 and self._outdone(curve) else ""
        return f"measured {told}{few}"

    def decision(self) -> BatchDecision:
        """See `decide`."""
        curve = self._winner()
        size = None if curve is None else chosen_size(curve)
        if curve is None or size is None:
            raise nothing_fits(self.space, list(self.curves.values()))
        line = curve.line_without(size) or curve.line
        chosen = {name: chosen_size(one) for name, one in self.curves.items()}
        refusals = {name: self._why_not(one) for name, one in self.curves.items() if one is not curve}
        return BatchDecision(
            candidate=Candidate(curve.precision, size),
            precision=Resolved(curve.precision, self._precision_reason(curve, refusals)),
            micro_batch_size=Resolved(size, size_reason(curve, size)),
            rows_per_s=curve.score(size),
            predicted_peak=None if line is None else line.predict(size),
            measured_peak=curve.peaks.get(size),
            table=table_of(self.curves.values()),
            refusals={name: why for name, why in refusals.items() if why},
            knees={name: at for name, at in chosen.items() if at is not None},
            steps={name: one.steps for name, one in self.curves.items()},
            complete=not self.wanted(),
        )

    def _precision_reason(self, curve: SpeedCurve, refusals: Mapping[str, str]) -> str:
        told = [f"{name} {why}" for name, why in refusals.items() if why]
        if curve is not self.lead and chosen_size(self.lead) is not None:
            checked = "" if curve.precision not in self.gates else ", loss and gradient norm agree"
            gain = f"{self._gain(curve):.2f} times as fast as {self.space.lead}, each at its own best size"
            if self._outdone(self.lead):  # and so not measured to its end
                ratio = self.space.lead, curve.best / self.lead.reach
                gain = f"at least {ratio[1]:.2f} times as fast as {ratio[0]} can be at any size"
            told.insert(0, f"measured {gain}{checked}")
        return "; ".join(told) or f"nothing but {curve.precision} to compare"
