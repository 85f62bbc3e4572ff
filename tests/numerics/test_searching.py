"""A whole search on a real session: it answers within its limits and leaves no trace (DESIGN 4.9)."""

from __future__ import annotations

from typing import Any

import pytest
from lab import digest, train
from test_gate import everything
from test_probe_is_neutral import moe, noisy

from raytrain.probe.gate import run_gate
from raytrain.search.batch import BatchDecision, BatchSpace, decide, next_proposals
from raytrain.search.measurement import Candidate, Measurement
from raytrain.search.precision import GateReport
from raytrain.search.space import sizes_dividing
from raytrain.session import Session


def searched(session: Session, space: BatchSpace) -> tuple[BatchDecision, list[Measurement]]:
    """As a plain loop does it."""
    measurements: list[Measurement] = []
    gates: list[GateReport] = []
    while proposals := next_proposals(space, measurements, gates=gates):
        wanted = proposals[0]
        if wanted.gate_steps:
            gates.append(run_gate(session, wanted.candidate, reference="fp32", steps=wanted.gate_steps))
            continue
        found = session.measure(
            wanted.candidate, budget_bytes=space.budget_bytes, passes=wanted.passes, with_memory=wanted.with_memory
        )
        measurements.append(found)
    return decide(space, measurements, gates), measurements


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
    # and the run that follows is the run without a search
    assert train(session)[0].losses == train(plain := build())[0].losses
    assert digest(session.trainable.module.state_dict()) == digest(plain.trainable.module.state_dict())
