"""What a search proposes, done on a session: one measurement, the numeric gate, or the last contenders in turn."""

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
    """What came of a proposal; of a contest whose winner does not fit only the measurement that says so."""

    measurement: Measurement | None = None
    gate: GateReport | None = None
    contest: HeadToHead | None = None


def run_proposal(probe: StepProbe, wanted: Proposal, *, reference: str, budget: int | None) -> ProposalResult:
    """Measure what is wanted; changes nothing that it measures. Collective over the probe's workers.

    Args:
        reference: the precision that a gate compares with.
        budget: bytes above which a peak counts as out of memory; None: memory is not judged.
    """
    one = wanted.candidate
    if wanted.gate_steps:
        return ProposalResult(
            gate=run_gate(probe.session, one, reference=reference, steps=wanted.gate_steps, budget=budget)
        )
    passes = 0 if wanted.against else wanted.passes
    alone = None
    if passes or wanted.with_memory:
        alone = probe.measure(one, budget=budget, passes=passes, least=LEAST_PASSES, with_memory=wanted.with_memory)
    if not wanted.against or (alone is not None and alone.outcome != "ok"):
        return ProposalResult(measurement=alone)
    rounds = probe.measure_in_turn((one, *wanted.against), budget=budget, rounds=wanted.passes)
    return ProposalResult(measurement=alone, contest=HeadToHead(rounds))
