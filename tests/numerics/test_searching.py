"""A whole search on a real session: it answers within its limits and leaves no trace (DESIGN 4.9)."""

from __future__ import annotations

from typing import Any

import pytest
from lab import digest, train
from test_gate import everything
from test_probe_is_neutral import moe, noisy

from raytrain.probe.carried_out import carry_out
from raytrain.probe.gate import run_gate
from raytrain.search.batch import BatchDecision, BatchSpace, decide, next_proposals
from raytrain.search.contest import Contest
from raytrain.search.measurement import Candidate, Measurement
from raytrain.search.precision import GateReport
from raytrain.search.space import sizes_dividing
from raytrain.session import Session


def searched(session: Session, space: BatchSpace) -> tuple[BatchDecision, list[Measurement]]:
    """As a plain loop does it."""
    measurements: list[Measurement] = []
    gates: list[GateReport] = []
    contests: list[Contest] = []
    while proposals := next_proposals(space, measurements, (), gates, contests):
        taken = carry_out(session, proposals[0], reference="fp32", budget=space.budget_bytes)
        measurements += [taken.measurement] if taken.measurement else []
        gates += [taken.gate] if taken.gate else []
        contests += [taken.contest] if taken.contest else []
    return decide(space, measurements, gates, contests), measurements


@pytest.mark.parametrize("build", [noisy, moe])
def test_a_search_leaves_everything_as_it_was(build: Any) -> None:
    session = build()
    before = everything(session)
    space = BatchSpace(("fp32", "bf16"), sizes_dividing(16, 1), 16, 1 << 40, gate_steps=3)
    decision, measurements = searched(session, space)
    run_gate(session, Candidate("bf16", 4), reference="fp32", steps=3)  # asked for or not
    assert everything(session) == before
    assert decision.complete and decision.candidate.micro_batch_size in space.sizes
    assert decision.measured_peak is not None and all(one.outcome == "ok" for one in measurements)
    assert decision.contest is not None, "steps were left to measure the winner in turn with others"
    # and the run that follows is the run without a search
    assert train(session)[0].losses == train(plain := build())[0].losses
    assert digest(session.trainable.module.state_dict()) == digest(plain.trainable.module.state_dict())
