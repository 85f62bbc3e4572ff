"""The prediction of a step's time from stated rates: each part alone, and the right order of layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain.models.sizes import model_facts
from raytrain.plan.facts import ModelFacts, PassFacts
from raytrain.plan.rules.rates import ProcessRates
from raytrain.plan.rules.step_time import (
    EXCHANGED_COPIES,
    NORM_BYTES,
    STACK_BYTES,
    STEP_S,
    TRIPS_PER_EXCHANGE,
    UPDATE_BYTES,
    StepWork,
    layout_seconds,
    work_of,
)

ENDLESS = 1e30
QUICK = ProcessRates(ENDLESS, ENDLESS, ENDLESS, 0.0, 0.0, ENDLESS, 4.0, "")
NOTHING = StepWork(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0, 1, 128)


def spent(work: StepWork, rates: ProcessRates, *, workers: int = 1, hosts: int = 0, shared: bool = False) -> float:
    return layout_seconds(work, rates, workers=workers, hosts=hosts, shared=shared) - STEP_S


def test_each_part_of_the_work_takes_its_time() -> None:
    assert spent(replace(NOTHING, trunk_flops=6e9), replace(QUICK, flops=2e9)) == pytest.approx(3.0)
    assert spent(replace(NOTHING, trunk_moved=6e9), replace(QUICK, elementwise=2e9)) == pytest.approx(3.0)
    assert spent(replace(NOTHING, operations=100, passes=2), replace(QUICK, operation_s=1e-3)) == pytest.approx(0.2)
    update = replace(NOTHING, trunk_parameters=1000)
    assert spent(update, replace(QUICK, memory=1e3)) == pytest.approx(UPDATE_BYTES + NORM_BYTES)
    experts = replace(NOTHING, expert_parameters=1000)
    assert spent(experts, replace(QUICK, memory=1e3)) == pytest.approx(UPDATE_BYTES + NORM_BYTES + STACK_BYTES)


def test_workers_divide_the_work_as_far_as_there_are_cores() -> None:
    work, rates = replace(NOTHING, trunk_flops=8e9), replace(QUICK, flops=1e9)
    assert [spent(work, rates, workers=number) for number in (1, 2, 4, 8)] == pytest.approx([8.0, 4.0, 2.0, 2.0])
    reduced = replace(NOTHING, trunk_parameters=1000)
    assert spent(reduced, replace(QUICK, wire=1e3), workers=2) == pytest.approx(4.0), "each sends and gets half, twice"


def test_hosts_divide_the_experts_and_pay_for_the_exchange() -> None:
    work, rates = replace(NOTHING, trunk_flops=2e9, expert_flops=8e9), replace(QUICK, flops=1e9)
    assert spent(work, rates) == pytest.approx(10.0)
    assert spent(work, rates, hosts=2, shared=True) == pytest.approx(2.0 + 4.0)
    sent = replace(NOTHING, exchanged_bytes=3e9, exchanges=5)
    assert spent(sent, replace(QUICK, wire=1e9), hosts=2, shared=True) == pytest.approx(3.0)
    assert spent(sent, replace(QUICK, memory=1e9), hosts=2, shared=True) == pytest.approx(3.0 * EXCHANGED_COPIES)
    trips = replace(QUICK, trip_s=1.0)
    assert spent(sent, trips, hosts=2, shared=True) == pytest.approx((5 + 2) * TRIPS_PER_EXCHANGE), "and for the vote"
    assert spent(sent, trips) == 0.0, "experts in every worker send nothing"


def facts(**changes: object) -> ModelFacts:
    passes = PassFacts(1000, 600, 500, 300, 4000.0, 300, 64)
    return replace(ModelFacts(10_000, 40_000, 1000, 6e6, "a test", passes=passes), **changes)


def test_the_work_of_a_step_follows_rows_format_and_recomputation() -> None:
    one = work_of(facts(), rows=8, passes=2, dtype="fp32", recomputed=False)
    assert (one.trunk_flops, one.trunk_moved, one.operations, one.passes) == (48e6, 32_000.0, 300, 2)
    assert work_of(facts(), rows=8, passes=2, dtype="fp64", recomputed=False).trunk_moved == 64_000.0
    again = work_of(facts(), rows=8, passes=2, dtype="fp32", recomputed=True)
    assert again.trunk_flops == pytest.approx(60e6) and again.trunk_moved == pytest.approx(40_000)
    with_it = facts(passes=PassFacts(500, 300, 500, 300, 5000.0, 400, 64))
    assert work_of(with_it, rows=8, passes=2, dtype="fp32", recomputed=True).trunk_moved == 40_000, "as traced"
    unknown = work_of(facts(passes=None), rows=8, passes=2, dtype="fp32", recomputed=False)
    assert unknown.trunk_moved == 32_000.0, "four times what is kept"


@pytest.mark.parametrize(("rows", "measured_s"), [(12, 0.047), (48, 0.19)])
def test_a_measured_step_is_predicted_within_a_factor_of_two(rows: int, measured_s: float) -> None:
    """The recipe gpt_text, one thread of an Intel Xeon in fp32, with the rates that its calibration found."""
    keys = {"layers": 4, "heads": 4, "width": 128, "context": 64}
    known = model_facts("raytrain.models.gpt:gpt", keys, {"vocab_size": 65})
    assert known is not None
    rates = ProcessRates(131e9, 9.4e9, 5.5e9, 2.4e-6, 3.2e-5, 1e9, 2.0, "")
    work = work_of(known, rows=rows, passes=1, dtype="fp32", recomputed=False)
    assert measured_s / 2 <= layout_seconds(work, rates, workers=1, hosts=0, shared=False) <= 2 * measured_s
