"""Runs what a search proposes: one measurement, the numeric gate, or the final comparison in alternating rounds."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain.autotune.probe.numeric_gate import run_gate
from raytrain.autotune.probe.step import StepProbe
from raytrain.autotune.search.head_to_head import HeadToHead
from raytrain.autotune.search.measurement import Measurement
from raytrain.autotune.search.precision import GateReport
from raytrain.autotune.search.space import LEAST_PASSES, Proposal


@dataclass(frozen=True)
class ProposalResult:
    """The results of a proposal; if the leader of a contest does not fit, only the measurement that shows it."""

    measurement: Measurement | None = None
    gate: GateReport | None = None
    contest: HeadToHead | None = None


def run_proposal(probe: StepProbe, proposal: Proposal, *, reference: str, budget: int | None) -> ProposalResult:
    """Measure what is proposed; changes nothing that it measures. Collective.

    Args:
        reference: the precision that the numeric gate compares with.
        budget: bytes above which a peak counts as out of memory; None: no limit.
    """
    one = proposal.candidate
    if proposal.gate_steps:
        return ProposalResult(
            gate=run_gate(probe.session, one, reference=reference, steps=proposal.gate_steps, budget=budget)
        )
    passes = 0 if proposal.against else proposal.passes
    alone = None
    if passes or proposal.with_memory:
        alone = probe.measure(one, budget=budget, passes=passes, least=LEAST_PASSES, with_memory=proposal.with_memory)
    if not proposal.against or (alone is not None and alone.outcome != "ok"):
        return ProposalResult(measurement=alone)
    rounds = probe.measure_in_turn((one, *proposal.against), budget=budget, rounds=proposal.passes)
    return ProposalResult(measurement=alone, contest=HeadToHead(rounds))
