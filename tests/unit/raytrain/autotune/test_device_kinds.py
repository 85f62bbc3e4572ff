"""One answer for devices of several kinds."""

from __future__ import annotations

import pytest

from raytrain.autotune.batch_decision import BatchDecision, TableRow, choose_for_all
from raytrain.autotune.measurement import Candidate
from raytrain.errors import RunError
from raytrain.plan.choice import Resolved


def decided(taken: str, **best: tuple[int, float]) -> BatchDecision:
    """What a kind's own search says: precision -> (its best size, rows/s there)."""
    table = tuple(TableRow(name, size, 3, speed, speed, speed, None, None) for name, (size, speed) in best.items())
    size, speed = best[taken]
    return BatchDecision(
        Candidate(taken, size), Resolved(taken, "own reason"), Resolved(size, "own reason"), speed, None, None, table,
        {}, {name: size for name, (size, _) in best.items()}, complete=True,
    )  # fmt: skip


def test_a_single_kind_keeps_its_decision_and_reasons() -> None:
    only = decided("bf16", bf16=(8, 100.0), fp32=(4, 10.0))
    chosen = choose_for_all({"": only}, workers={"": 4}, reference="fp32")
    assert (chosen.candidate, chosen.binding, chosen.rows_per_s) == (Candidate("bf16", 8), "", 400.0)
    assert chosen.precision.reason == "own reason"


def test_all_workers_together_choose_the_precision_and_the_smallest_kind_the_size() -> None:
    large, small = decided("bf16", bf16=(64, 900.0), fp32=(32, 300.0)), decided("fp32", bf16=(8, 40.0), fp32=(4, 50.0))
    chosen = choose_for_all({"H100": large, "T4": small}, workers={"H100": 1, "T4": 2}, reference="fp32")
    assert (chosen.candidate, chosen.binding) == (Candidate("bf16", 8), "T4")
    assert "H100 64, T4 8" in chosen.micro_batch_size.reason and chosen.rows_per_s == 980.0
    crowd = choose_for_all({"H100": large, "T4": small}, workers={"H100": 1, "T4": 200}, reference="fp32")
    assert crowd.candidate == Candidate("fp32", 4)


def test_a_precision_that_fails_the_gate_on_one_kind_is_chosen_for_none() -> None:
    large, small = decided("bf16", bf16=(64, 900.0), fp32=(32, 300.0)), decided("fp32", bf16=(8, 40.0), fp32=(4, 50.0))
    kinds, workers = {"H100": large, "T4": small}, {"H100": 1, "T4": 2}
    chosen = choose_for_all(kinds, workers=workers, reference="fp32", refused={"bf16"})
    assert chosen.candidate == Candidate("fp32", 4)


def test_where_no_precision_runs_everywhere_the_kinds_are_named() -> None:
    with pytest.raises(RunError, match=r"H100: bf16; T4: fp32.*scale.accelerator"):
        choose_for_all({"H100": decided("bf16", bf16=(8, 1.0)), "T4": decided("fp32", fp32=(8, 1.0))},
                       workers={"H100": 1, "T4": 1}, reference="fp32")  # fmt: skip
