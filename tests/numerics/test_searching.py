"""A whole search on a real session: it answers within its limits and leaves no trace (DESIGN 4.9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lab import class_rows, digest, make_session, train
from test_gate import everything
from test_probe_is_neutral import moe, noisy
from torch import Tensor, nn

from raytrain.autotune.probe.numeric_gate import run_gate
from raytrain.autotune.probe.run_proposal import run_proposal
from raytrain.autotune.probe.step import StepProbe
from raytrain.autotune.search.batch_size import BatchDecision, decide, next_proposals
from raytrain.autotune.search.head_to_head import HeadToHead
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.precision import GateReport
from raytrain.autotune.search.space import MOST_STEPS, BatchSpace, sizes_dividing
from raytrain.train import device
from raytrain.train.session import Session


def searched(session: Session, space: BatchSpace) -> tuple[BatchDecision, list[Measurement]]:
    """The search as a plain loop."""
    probe = StepProbe(session)
    measurements: list[Measurement] = []
    gates: list[GateReport] = []
    contests: list[HeadToHead] = []
    while proposals := next_proposals(space, measurements, (), gates, contests):
        taken = run_proposal(probe, proposals[0], reference="fp32", budget=space.budget_bytes)
        measurements += [taken.measurement] if taken.measurement else []
        gates += [taken.gate] if taken.gate else []
        contests += [taken.contest] if taken.contest else []
    return decide(space, measurements, gates, contests), measurements


@pytest.mark.parametrize("build", [noisy, moe])
def test_a_search_changes_nothing(build: Any) -> None:
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


class Clock:
    """Replaces `time` for the probe: the model advances it, so that the load of the machine does not matter."""

    def __init__(self) -> None:
        self.now = 1.0

    def perf_counter(self) -> float:
        return self.now

    time = perf_counter


CLOCK = Clock()


class Paced(nn.Module):
    """Takes 6 ms a pass and 4 ms a row, half of that under autocast; there its loss is `off` from what it was."""

    def __init__(self, off: float) -> None:
        super().__init__()
        self.inner, self.off = nn.Linear(12, 4), off

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        half = torch.is_autocast_enabled("cpu")
        CLOCK.now += (0.006 + 0.004 * len(x)) * (0.5 if half else 1.0)
        return {"loss": nn.functional.cross_entropy(self.inner(x), labels) * (1 + self.off * half)}


@pytest.mark.covers("TUNE-05", "TUNE-06", "BP-11")
@pytest.mark.parametrize(("off", "taken"), [(0.0, "bf16"), (0.05, "fp32")])
def test_the_fastest_whose_loss_agrees_wins_at_the_knee_and_was_timed_five_times(
    off: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 to 128 rows in fp32 and bf16: 64 rows have 0.99 of the throughput of 128, 32 have 0.967, 16 have 0.93."""
    monkeypatch.setattr(device, "time", CLOCK)
    torch.manual_seed(3)
    data = {"train": class_rows(160), "eval_fraction": 0.0}
    loop = {"global_batch_size": 128, "micro_batch_size": 8, "max_steps": 4}
    session = make_session({"module": Paced(off)}, data, loop=loop)
    space = BatchSpace(("bf16", "fp32"), (8, 16, 32, 64, 128), 128, 1 << 40)
    decision, _ = searched(session, space)
    assert decision.candidate == Candidate(taken, 64) and decision.complete
    assert decision.contest is not None and max(decision.steps.values()) <= MOST_STEPS
    rows = {(row.precision, row.micro_batch_size): row for row in decision.table}
    for one in decision.contest["contenders"]:
        row = rows[one["precision"], one["micro_batch_size"]]
        most = 500 if row.precision == "bf16" else 250
        assert row.passes >= 5 and row.rows_per_s is not None and 0.5 * most < row.rows_per_s < most
    if off:
        assert "is not the reference's" in decision.refusals["bf16"]
    else:
        assert "loss and gradient norm agree" in decision.precision.reason
        assert "measured in turn" in decision.precision.reason
