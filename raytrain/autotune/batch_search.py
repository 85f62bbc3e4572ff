"""The search over batch size and precision. Pure: measurements in, the next proposals out; `batch_decision.decide`
gives the answer.

Its goals, measured by `raytrain bench tune`: at most 0.3 of the time of an exhaustive grid, 0.4 of that of doubling
the size until it fails; at least 0.95 of the throughput of the grid's best point; never above the memory budget; and
the run afterwards is the same to the bit as without a search.

How it gets there:

1. Two small sizes of each precision give a line of time and one of memory. Passes get longer with each further row,
   nearly a line that bends upwards where caches end, so that lines through measured sizes bound the others.
2. Measured next is the smallest size that may be within `NEAR` of the best that memory allows, until that size is a
   measured one (`size_curve`, which also has the margin for noise).
3. A lower precision must beat the reference by `WORTHWHILE_GAIN`, each at its own best size, and pass the numeric gate.
4. Each size is timed at one moment, at which the machine may have been slow: at the end the winner and its rivals take
   turns in one process (a contest), whose times decide.

A caller measures what `next_proposals` returns until it returns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, median

from raytrain.autotune.batch_space import BatchSpace, Proposal, SearchResults
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.precision import WORTHWHILE_GAIN, gate_refusal, told_apart
from raytrain.autotune.size_curve import SizeCurve

#: Timed rounds of a contest, after one round that is dropped; and contests of a search at most.
ROUNDS, MOST_CONTESTS = 3, 2
#: A precision whose upper bound is below this fraction of what it has to reach is dropped.
HOPELESS = 0.95
#: Rows of a step of the gate, at most: rounding shows with few, and its steps are most of the cost of a search.
GATE_ROWS = 4


def next_proposals(space: BatchSpace, results: SearchResults, running: Sequence[Proposal] = ()) -> list[Proposal]:
    """What to measure now, at most one proposal for each idle device; nothing while results are awaited, or at the end.

    Args:
        running: proposals without a result so far.
    """
    in_progress = {one.aim for one in running}
    wanted = [one for one in CandidateSearch(space, results).wanted() if one.aim not in in_progress]
    return wanted[: max(0, space.devices - len(running))]


class CandidateSearch:
    """All that was measured, compared.

    Attributes:
        curves: precision -> its measurements by size, those before the last contest corrected by it.
        lead: that of the reference.
        gates: precision -> why its gate refuses it, "" where it passed.
        contest: the last contest's measurements; empty without one.
    """

    def __init__(self, space: BatchSpace, results: SearchResults) -> None:
        self.space, self.results, known = space, results, list(results.measurements)
        self.contest: dict[Candidate, Measurement] = {}
        for contest in results.contests:
            if all(one.outcome == "ok" and one.pass_s for one in contest):
                self.contest = {one.candidate: one for one in contest}
            else:  # a contender that failed is out
                known += [one for one in contest if one.outcome != "ok"]
        if self.contest:
            known = _corrected(known, self.contest)
        self.curves = {name: SizeCurve(space, name, known) for name in space.precisions}
        self.lead = self.curves[space.lead]
        self.gates = {gate.precision: gate_refusal(gate) for gate in results.gates}

    # -- what is best -----------------------------------------------------------------------------

    def choice(self, curve: SizeCurve) -> Candidate | None:
        """The best size of a precision."""
        size = curve.chosen()
        return None if size is None else Candidate(curve.precision, size)

    def winner(self) -> SizeCurve | None:
        """The fastest that also passes its gate, else the reference; None if nothing runs."""
        alone = self.choice(self.lead) is None
        for curve in self.winners():
            if alone or not self.space.gate_steps or self.gates.get(curve.precision) == "":
                return curve
        return None if alone else self.lead

    def winners(self) -> list[SizeCurve]:
        """Precisions that beat the reference on time, the fastest first."""
        others = [one for one in self.curves.values() if one is not self.lead and self.choice(one) is not None]
        if self.choice(self.lead) is None:
            return sorted(others, key=lambda curve: curve.best, reverse=True)
        faster = [one for one in others if self.gain(one) > 1 + WORTHWHILE_GAIN and not self.is_untold(one)]
        return sorted(faster, key=self.gain, reverse=True)

    def gain(self, curve: SizeCurve) -> float:
        """Rows per second at a precision's best size over those of the reference at its own."""
        own, lead = self.choice(curve), self.choice(self.lead)
        assert own is not None and lead is not None, "both are measured"
        return curve.bound(own.micro_batch_size) / self.lead.bound(lead.micro_batch_size)

    def is_untold(self, curve: SizeCurve) -> bool:
        """Whether rounds in turn did not show that a precision with the better median is faster than the reference."""
        rounds = self.in_turn(curve)
        return curve is not self.lead and rounds is not None and not told_apart(*rounds)

    def in_turn(self, curve: SizeCurve) -> tuple[list[float], list[float]] | None:
        """Seconds for a row of a precision and of the reference, by round; None if they did not meet in a contest."""
        own, lead = self.choice(curve), self.choice(self.lead)
        if own is None or own not in self.contest:
            return None
        if lead not in self.contest:  # another size of it
            lead = next((one for one in self.contest if one.precision == self.lead.precision), None)
        return None if lead is None else (self.row_s(own), self.row_s(lead))

    def row_s(self, candidate: Candidate) -> list[float]:
        """A contender's seconds for a row, in each round."""
        one, size = self.contest[candidate], candidate.micro_batch_size
        return [1 / self.space.score(size, seconds, one.update_s) for seconds in one.pass_s]

    def cannot_win(self, curve: SizeCurve) -> bool:
        """Whether even the upper bounds of a precision are below what another one has shown that no gate refused."""
        for rival in self.curves.values():
            if rival is curve or rival.nonfinite or self.gates.get(rival.precision) or self.is_untold(rival):
                continue
            gain = 1 + WORTHWHILE_GAIN
            needed = rival.best * (gain if rival is self.lead else 1 / gain if curve is self.lead else 1.0)
            if curve.reach < HOPELESS * needed:
                return True
        return False

    # -- what to measure --------------------------------------------------------------------------

    def wanted(self) -> list[Proposal]:
        """Everything that could be measured at the same time, the most urgent first: two sizes of every precision, the
        reference's first, then the sizes with the highest upper bounds. Then one at a time: the gate, the contest."""
        first, later = [], []
        for curve in sorted(self.curves.values(), key=lambda one: (one is not self.lead, -one.reach)):
            if curve.nonfinite or (len(curve.broken) > 1 and not curve.seconds):
                continue
            begin = [size for size in self._first_sizes(curve) if size not in curve.seconds]
            again = [
                size for size in curve.unsteady
                if size in curve.measured and Candidate(curve.precision, size) not in self.contest
            ]  # fmt: skip
            if begin or again:
                first += [self._timed(curve, size) for size in (*begin, *again)]
            elif not self.cannot_win(curve) and (size := curve.next_size()) is not None:
                later.append(self._timed(curve, size))
        return first + later or self._gate() or self._contest()

    def _first_sizes(self, curve: SizeCurve) -> list[int]:
        """The two sizes to begin with; others near them if those fail or do not fit. Until the memory of a precision is
        read, the reference's is used: weights and optimizer are the same."""
        guess = self.lead.fitting if curve.line_without() is None and self.lead.fitting else self.space.sizes
        fitting = [size for size in curve.fitting if size in guess]
        begin = self.space.first_sizes()[0]
        start = [size for size in self.space.first_sizes() if size in fitting]
        spare = [size for size in curve.measured if size not in start]
        spare += [size for size in fitting if size > begin and size not in start]
        spare += [size for size in reversed(fitting) if size < begin]
        return sorted((start + spare)[: min(2, len(fitting))])

    def _timed(self, curve: SizeCurve, size: int) -> Proposal:
        """Memory is read as well, unless there is room for far more."""
        read = size not in curve.peaks and not curve.roomy and not self.lead.roomy
        return Proposal(Candidate(curve.precision, size), with_memory=read)

    def _gate(self) -> list[Proposal]:
        if not self.space.gate_steps or self.choice(self.lead) is None:
            return []
        for curve in self.winners():
            if curve.precision not in self.gates:
                both = [size for size in curve.fitting if size in self.lead.fitting]
                size = max((one for one in both if one <= GATE_ROWS), default=self.lead.measured[0])
                return [Proposal(Candidate(curve.precision, size), passes=0, gate_steps=self.space.gate_steps)]
            if not self.gates[curve.precision]:
                return []
        return []

    def _contest(self) -> list[Proposal]:
        """The contest of the candidate about to be chosen, and the reading of its peak."""
        curve, chosen = self.chosen()
        if curve is None or chosen is None:
            return []
        unread = self.space.budget_bytes is not None and chosen.micro_batch_size not in curve.peaks
        over = chosen in self.contest or len(self.results.contests) >= MOST_CONTESTS
        if rivals := () if over else self._rivals(curve, chosen):
            return [Proposal(chosen, ROUNDS, with_memory=unread, against=rivals)]
        return [Proposal(chosen, passes=0, with_memory=True)] if unread else []

    def _rivals(self, curve: SizeCurve, chosen: Candidate) -> tuple[Candidate, ...]:
        """The runner-up of the same precision, if it is small enough to be measured again, and the best of each other
        precision that could be chosen."""
        size = chosen.micro_batch_size
        others = [other for other in curve.measured if other != size and other <= 2 * size]
        second = [Candidate(curve.precision, max(others, key=curve.bound))] if others else []
        rivals = [one for one in self.curves.values() if one is not curve and not self.gates.get(one.precision)]
        return (*second, *(best for best in map(self.choice, rivals) if best is not None))

    def chosen(self) -> tuple[SizeCurve | None, Candidate | None]:
        """The winner and its best size."""
        curve = self.winner()
        return curve, None if curve is None else self.choice(curve)


def _corrected(measurements: Sequence[Measurement], contest: Mapping[Candidate, Measurement]) -> list[Measurement]:
    """The measurements with those of a contest in place of the contenders' own times from before it; other sizes that
    were timed earlier are scaled by what has changed for the contenders of their precision since."""
    ended = next(iter(contest.values())).taken_at
    drift: dict[str, list[float]] = {}
    for one in measurements:
        if one.pass_s and one.candidate in contest:
            ratio = median(contest[one.candidate].pass_s) / median(one.pass_s)
            drift.setdefault(one.candidate.precision, []).append(ratio)
    found = list(contest.values())
    for one in measurements:
        earlier = one.taken_at <= ended and one.candidate.precision in drift
        factor = geometric_mean(drift[one.candidate.precision]) if earlier else 1.0
        passes = () if one.candidate in contest else tuple(factor * seconds for seconds in one.pass_s)
        found.append(replace(one, pass_s=passes))  # without passes its memory still counts
    return found
