"""Ranks the precisions of a search against the reference, and says why the others were not chosen. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from raytrain.autotune.search.head_to_head import HeadToHead
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.precision import WORTHWHILE_GAIN, GateReport, gate_refusal
from raytrain.autotune.search.space import BatchSpace
from raytrain.autotune.search.throughput import ThroughputCurve, chosen_size

#: A precision whose upper bound is below this fraction of what it has to reach is dropped.
HOPELESS = 0.95


class Ranking:
    """The throughput curves of all precisions, compared.

    Attributes:
        curves: by precision. lead: the reference's, or the first.
        gates: reports by precision.
        contest: the last one in which all contenders succeeded, or None.
    """

    def __init__(
        self,
        space: BatchSpace,
        measurements: Iterable[Measurement],
        gates: Iterable[GateReport],
        contests: Sequence[HeadToHead],
    ) -> None:
        failed = [one for contest in contests for one in contest.measurements if one.outcome != "ok"]
        known = [*measurements, *failed]
        held = [contest for contest in contests if contest.valid]
        self.space, self.contest = space, held[-1] if held else None
        self.curves = {name: ThroughputCurve(space, name, known, held) for name in space.precisions}
        self.lead = self.curves[space.lead]
        self.gates: Mapping[str, GateReport] = {gate.precision: gate for gate in gates}

    def cannot_win(self, curve: ThroughputCurve) -> bool:
        """Whether a precision cannot win any more, even at the upper bounds of its unmeasured sizes, because another
        one that no gate has refused is faster. To count as faster than the reference takes `WORTHWHILE_GAIN`."""
        for rival in self.curves.values():
            if (
                rival is curve
                or rival.nonfinite
                or self.refused(rival)
                or (curve is self.lead and (self.not_always_faster(rival) or self.too_noisy(rival)))
            ):
                continue
            needed = rival.best
            if self.lead in (curve, rival):
                needed *= 1 + WORTHWHILE_GAIN if rival is self.lead else 1 / (1 + WORTHWHILE_GAIN)
            if curve.reach < HOPELESS * needed:
                return True
        return False

    def refused(self, curve: ThroughputCurve) -> str:
        """Why the gate refused a precision; "" if it did not."""
        gate = self.gates.get(curve.precision)
        return "" if gate is None else gate_refusal(gate)

    def not_always_faster(self, curve: ThroughputCurve) -> bool:
        """Whether a precision was slower than the reference in some round of a contest between them: a better median
        alone may be due to other work on the machine."""
        size = chosen_size(curve)
        if curve is self.lead or self.contest is None or size is None or curve.entry(size) is None:
            return False
        own, leads = Candidate(curve.precision, size), [one.candidate for one in self.contest.measurements]
        rows = self.space.rows_per_step
        return any(
            min(self.contest.gains(own, one, rows=rows)) <= 1 for one in leads if one.precision == self.lead.precision
        )

    def is_noisy(self, curve: ThroughputCurve) -> bool:
        """Whether times of a precision or of the reference vary, since the machine did other work."""
        held = () if self.contest is None else self.contest.measurements
        names = (curve.precision, self.lead.precision)
        return curve.noisy or self.lead.noisy or any(not o.is_steady for o in held if o.candidate.precision in names)

    def too_noisy(self, curve: ThroughputCurve) -> bool:
        """Whether a contest has not shown that a precision is faster than the reference at the same number of rows,
        although times vary: a difference between their own best sizes may be due to the sizes, or to noise."""
        size = chosen_size(curve)
        if curve is self.lead or self.contest is None or size is None or curve.entry(size) is None:
            return False
        if chosen_size(self.lead) is None or not self.is_noisy(curve):
            return False
        own, rows = Candidate(curve.precision, size), self.space.rows_per_step
        if self.lead.entry(size) is not None:
            return not self.contest.told_apart(own, Candidate(self.lead.precision, size), rows=rows)
        if size in self.lead.fitting():
            return True
        leads = [o.candidate for o in self.contest.measurements if o.candidate.precision == self.lead.precision]
        return not all(self.contest.told_apart(own, one, rows=rows) for one in leads)

    def untold(self) -> list[str]:
        """Precisions that may be faster or slower than the reference: times vary too much to tell."""
        if chosen_size(self.lead) is None:
            return []
        others = [one for one in self.curves.values() if one is not self.lead and not self.refused(one)]
        return [one.precision for one in others if chosen_size(one) is not None and self._is_untold(one)]

    def _is_untold(self, curve: ThroughputCurve) -> bool:
        if not self.is_noisy(curve):
            return False
        size, best = chosen_size(curve), chosen_size(self.lead)
        assert size is not None and best is not None, "both are measured"
        if self.contest is not None and curve.entry(size) is not None:
            if self.gain(curve) > 1 + WORTHWHILE_GAIN:
                return self.too_noisy(curve)
            held = [
                one.candidate for one in self.contest.measurements if one.candidate.precision == self.lead.precision
            ]
            own, rows = Candidate(curve.precision, size), self.space.rows_per_step
            return not any(self.contest.told_apart(one, own, rows=rows) for one in held)
        both = [(self.lead.seconds[at], curve.seconds[at]) for at in curve.measured if at in self.lead.measured]
        return not any(max(lead) * (1 + WORTHWHILE_GAIN) < min(own) for lead, own in both)

    def gain(self, curve: ThroughputCurve) -> float:
        """Throughput of a precision at its best size relative to the reference's at its own; from the contest, if both
        took part."""
        size, lead = chosen_size(curve), chosen_size(self.lead)
        assert size is not None and lead is not None, "both are measured"
        return curve.score(size) / self.lead.score(lead)

    def winners(self) -> list[ThroughputCurve]:
        """Precisions that beat the reference on time, the fastest first."""
        others = [curve for curve in self.curves.values() if curve is not self.lead and chosen_size(curve) is not None]
        if chosen_size(self.lead) is None:
            return sorted(others, key=lambda curve: curve.best, reverse=True)
        faster = [one for one in others if self.gain(one) > 1 + WORTHWHILE_GAIN]
        faster = [one for one in faster if not self.not_always_faster(one) and not self.too_noisy(one)]
        return sorted(faster, key=self.gain, reverse=True)

    def winner(self) -> ThroughputCurve | None:
        """The fastest that also passes its gate, else the reference; None if nothing runs."""
        alone = chosen_size(self.lead) is None
        for curve in self.winners():
            passed = curve.precision in self.gates and not self.refused(curve)
            if alone or not self.space.gate_steps or passed:
                return curve
        return None if alone else self.lead

    # -- reasons ---------------------------------------------------------------------------------

    def sizes_in_turn(self, curve: ThroughputCurve, size: int) -> list[str]:
        """How the chosen size compared with others of its precision in the contest."""
        own = Candidate(curve.precision, size)
        if self.contest is None or curve.entry(size) is None:
            return []
        others = [one.candidate for one in self.contest.measurements if one.candidate.precision == curve.precision]
        return [self.contest.comparison(own, other, rows=self.space.rows_per_step) for other in others if other != own]

    def _against(self, curve: ThroughputCurve, other: ThroughputCurve) -> str:
        """`curve` against `other`, each at its own best size."""
        size, best = chosen_size(curve), chosen_size(other)
        assert size is not None and best is not None, "both are measured"
        if self.contest is not None and curve.entry(size) is not None and other.entry(best) is not None:
            points = Candidate(curve.precision, size), Candidate(other.precision, best)
            return self.contest.comparison(*points, rows=self.space.rows_per_step)
        ratio = curve.score(size) / other.score(best)
        return f"measured {ratio:.2f} times as fast as {other.precision}"

    def _why_not(self, curve: ThroughputCurve) -> str:
        """Why a precision other than the chosen one was not chosen."""
        size = chosen_size(curve)
        if curve.nonfinite:
            return f"refused: {curve.nonfinite}"
        if size is None:
            failed = next(iter(curve.broken.values()), "")
            return f"refused: {failed}" if failed else "no size of it was measured, or none fits"
        if curve is self.lead or chosen_size(self.lead) is None:
            return ""
        text = self._against(curve, self.lead)
        if self.not_always_faster(curve) and self.gain(curve) > 1 + WORTHWHILE_GAIN:
            text += ", not in every round"
        elif curve.precision in self.untold():
            text += f"; too noisy to tell them apart{self._at_same_rows(curve, size)}"
        if self.refused(curve):
            return f"{text}, but refused: {self.refused(curve)}"
        few = " and dropped after its first two sizes" if len(curve.seconds) <= 2 and self.cannot_win(curve) else ""
        return f"{text}{few}"

    def _at_same_rows(self, curve: ThroughputCurve, size: int) -> str:
        """How a precision compared with the reference at the same number of rows, if that was measured in turn."""
        if self.contest is None or self.lead.entry(size) is None:
            return " at the same number of rows"
        gains = self.contest.gains(
            Candidate(curve.precision, size), Candidate(self.lead.precision, size), rows=self.space.rows_per_step
        )
        return f" at the same {size} rows ({median(gains):.2f} [{min(gains):.2f}, {max(gains):.2f}] times)"

    def refusals(self, chosen: ThroughputCurve) -> dict[str, str]:
        """Precision -> why it was not chosen."""
        found = {name: self._why_not(one) for name, one in self.curves.items() if one is not chosen}
        return {name: why for name, why in found.items() if why}

    def precision_reason(self, curve: ThroughputCurve) -> str:
        """Why this one was chosen."""
        reasons = [f"{name} {why}" for name, why in self.refusals(curve).items()]
        if curve is self.lead:
            return "; ".join(reasons) or f"nothing but {curve.precision} to compare"
        if chosen_size(self.lead) is None:
            return "; ".join([*reasons, f"so that {curve.precision} could not be compared with it: watch its loss"])
        checked = "" if curve.precision not in self.gates else ", loss and gradient norm agree"
        gain = f"{self._against(curve, self.lead)}, "
        if self.cannot_win(self.lead):  # so that not all of its sizes were measured
            bound = curve.best / self.lead.reach
            gain += f"at least {bound:.2f} times as fast as {self.lead.precision} can be at any size"
        else:
            gain += "each at its own best size"
        return "; ".join([f"{gain}{checked}", *reasons])
