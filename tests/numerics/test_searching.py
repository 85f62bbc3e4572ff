"""A whole search on a real session: it answers within its limits and leaves no trace (ARCHITECTURE.md, 9)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from lab import class_rows, digest, make_session, train
from test_probe_is_neutral import moe, noisy, state_of
from torch import Tensor, nn

from raytrain import accelerator
from raytrain.autotune.batch_search import BatchDecision, SearchResults, decide, next_proposals
from raytrain.autotune.measurement import Candidate
from raytrain.autotune.size_curve import MOST_SIZES, BatchSpace, sizes_dividing
from raytrain.autotune.startup import measure_precision
from raytrain.autotune.step_probe import StepProbe
from raytrain.report.plots import figure
from raytrain.report.sweep import batch_spec
from raytrain.train.session import Session


def searched(session: Session, space: BatchSpace) -> tuple[BatchDecision, SearchResults]:
    """The search as a plain loop."""
    probe = StepProbe(session)
    results = SearchResults()
    while proposals := next_proposals(space, results):
        results.add(probe.run_proposal(proposals[0], budget=space.budget_bytes))
    return decide(space, results), results


@pytest.mark.parametrize("build", [noisy, moe])
def test_a_search_changes_nothing(build: Any) -> None:
    session = build()
    before = state_of(session)
    decision, results = searched(session, space := BatchSpace(("fp32", "bf16"), sizes_dividing(16, 1), 16, 1 << 40))
    assert state_of(session) == before
    assert decision.complete and decision.candidate.micro_batch_size in space.sizes
    assert decision.chosen.measured_peak is not None and all(one.outcome == "ok" for one in results.measurements)
    assert results.comparisons, "the winner was measured in turn with others"
    assert results.comparisons[-1][0].peak_bytes == decision.chosen.measured_peak, "it was read before"
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
    """Takes 6 ms a pass and 4 ms a row, under autocast a share of that; there its loss is `off` from what it was, or no
    loss at all where `off` is None.

    Args:
        off: by the format of autocast. shares: likewise.
    """

    def __init__(self, off: dict[torch.dtype, float | None], shares: dict[torch.dtype, float]) -> None:
        super().__init__()
        self.inner, self.off, self.shares = nn.Linear(12, 4), off, shares

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        CLOCK.now += (0.006 + 0.004 * len(x)) * self.shares.get(half, 1.0)
        off = self.off.get(half, 0.0)
        if off is None:
            raise RuntimeError(f"no kernel for {half}")
        return {"loss": nn.functional.cross_entropy(self.inner(x), labels) * (1 + off)}


def paced(off: dict[torch.dtype, float | None], shares: dict[torch.dtype, float]) -> Session:
    torch.manual_seed(3)
    data = {"train": class_rows(160), "eval_fraction": 0.0}
    loop = {"global_batch_size": 128, "micro_batch_size": 8, "max_steps": 4}
    return make_session({"module": Paced(off, shares)}, data, loop=loop)


@pytest.mark.covers("TUNE-05", "TUNE-06", "BP-11")
@pytest.mark.parametrize(("off", "taken"), [(0.0, "bf16"), (0.05, "fp32")])
def test_the_fastest_whose_loss_agrees_wins_at_the_knee_and_was_timed_five_times(
    off: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 to 128 rows in fp32 and bf16: 64 rows have 0.99 of the throughput of 128, 32 have 0.967, 16 have 0.93."""
    monkeypatch.setattr(accelerator, "time", CLOCK)
    session = paced({torch.bfloat16: off}, {torch.bfloat16: 0.5})
    space = BatchSpace(("bf16", "fp32"), (8, 16, 32, 64, 128), 128, 1 << 40)
    decision, results = searched(session, space)
    assert decision.candidate == Candidate(taken, 64) and decision.complete
    points = [one.candidate for one in results.measurements]
    sizes = [{one for one in points if one.precision == name} for name in space.precisions]
    assert results.comparisons and max(map(len, sizes)) <= MOST_SIZES
    rows = {Candidate(row.precision, row.micro_batch_size): row for row in decision.table}
    for one in results.comparisons[-1]:
        row = rows[one.candidate]
        most = 500 if row.precision == "bf16" else 250
        assert row.passes >= 5 and row.rows_per_s is not None and 0.5 * most < row.rows_per_s < most
    if off:
        assert "but refused: the loss is" in decision.refusals["bf16"]
    else:
        assert "loss and gradient norm agree" in decision.precision.reason
        assert "measured in turn" in decision.precision.reason


@pytest.mark.parametrize(("rows", "passes"), [(64, 2), (8, 3)])
def test_two_passes_that_take_equally_long_are_enough_unless_they_are_short(
    rows: int, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst of other work may hold several passes of a few milliseconds."""
    monkeypatch.setattr(accelerator, "time", CLOCK)
    probe = StepProbe(paced({}, {}))
    measured = probe.measure(Candidate("fp32", rows), budget=None, passes=3, least=2, with_memory=False)
    assert measured.pass_s == pytest.approx([0.006 + 0.004 * rows] * passes)
    assert len(probe.measure(Candidate("fp32", rows), budget=None, passes=3, with_memory=False).pass_s) == 3


@pytest.mark.covers("PERF-08")
def test_the_curve_rises_with_the_micro_batch_and_the_picture_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass costs 6 ms whatever its size, so that a larger one computes more rows per second, up to the knee."""
    monkeypatch.setattr(accelerator, "time", CLOCK)
    sizes = (8, 16, 32, 64, 128)
    space = BatchSpace(("fp32",), sizes, 128, 1 << 40)
    decision, _ = searched(paced({}, {}), space)
    rates = {row.micro_batch_size: row.rows_per_s for row in decision.table if row.rows_per_s is not None}
    assert len(rates) >= 3 and rates == pytest.approx({size: size / (0.006 + 0.004 * size) for size in rates}, rel=1e-6)
    curve = [rates[size] for size in sorted(rates)]
    assert curve == sorted(curve) and curve[-1] > 1.1 * curve[0]
    table = [asdict(row) for row in decision.table]
    chosen = (decision.candidate.precision, decision.candidate.micro_batch_size)
    spec = batch_spec(table, sizes=sizes, chosen=chosen, budget=None, name="job")
    (line,) = [line for line in figure(spec).axes[0].lines if line.get_label() == "fp32"]
    drawn = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert {size: rate for size, rate in drawn.items() if rate} == rates, "without sizes nobody measured"
    assert [(mark["x"], mark["y"]) for mark in spec["panels"][0]["marks"]] == [(chosen[1], rates[chosen[1]])]


BF16, FP16 = torch.bfloat16, torch.float16
SHARES = {"fp32": 1.0, "bf16": 0.5, "fp16": 0.7}
"""Of the time that fp32 takes."""


@pytest.mark.parametrize(
    ("off", "taken", "refused", "why", "after_steps"),
    [
        ({BF16: 0.05}, "fp16", "bf16", "the loss is", "but refused: the loss is"),
        ({BF16: None}, "fp16", "bf16", "no kernel for torch.bfloat16", "refused: no kernel for torch.bfloat16"),
        ({FP16: 0.05}, "bf16", "fp16", "the loss is", "as fast as fp32"),  # slower than bf16, so that no step is taken
        ({FP16: None}, "bf16", "fp16", "no kernel for torch.float16", "refused: no kernel for torch.float16"),
        ({BF16: 0.05, FP16: None}, "fp32", "bf16", "the loss is", "but refused: the loss is"),
    ],
)
def test_of_three_precisions_one_is_refused_and_the_others_still_compete(
    off: dict[torch.dtype, float | None], taken: str, refused: str, why: str, after_steps: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In a search, and as the start of a run chooses."""
    monkeypatch.setattr(accelerator, "time", CLOCK)
    shares = {BF16: SHARES["bf16"], FP16: SHARES["fp16"]}
    names = ("bf16", "fp16", "fp32")
    others = tuple(name for name in names if name != refused)
    decision, without = (
        searched(paced(off, shares), BatchSpace(each, (8, 16, 32, 64, 128), 128, 1 << 40))[0]
        for each in (names, others)
    )
    assert decision.candidate.precision == taken and decision.complete
    assert after_steps in decision.refusals[refused] and after_steps in decision.precision.reason
    assert decision.candidate == without.candidate
    rates, expected = (
        {(row.precision, row.micro_batch_size): rate for row in one.table if (rate := row.rows_per_s) is not None}
        for one in (decision, without)
    )
    rates = {point: rate for point, rate in rates.items() if point[0] != refused}
    assert rates == pytest.approx(expected, rel=1e-6), "as if the refused one had not been there"
    assert len([size for precision, size in rates if precision == taken]) >= 2

    chosen, trials = measure_precision(StepProbe(paced(off, shares)), ["fp32", "bf16", "fp16"])
    assert chosen.value == taken and [trial["candidate"]["precision"] for trial in trials] == ["fp32", "bf16", "fp16"]
    assert refused in chosen.reason and "refused: " in chosen.reason and why in chosen.reason, chosen.reason
    if taken != "fp32":
        assert f"measured in turn {1 / SHARES[taken]:.2f} [" in chosen.reason
        assert "loss and gradient norm agree" in chosen.reason
