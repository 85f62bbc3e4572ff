"""The method of all benches: alternation, intervals, verdicts, the gate, and the document."""

from __future__ import annotations

import json

import pytest

from jobs.bench.harness.measuring import (
    NO_DIFFERENCE,
    BenchMeasurement,
    Check,
    Goal,
    alternate,
    compare,
    equal_series,
    matrix_units,
    median_interval,
)


def test_arms_alternate_in_reversed_order_and_the_first_blocks_are_dropped() -> None:
    calls: list[str] = []

    def arm(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    values = alternate({name: (lambda name=name: arm(name)) for name in "abc"}, blocks=3, dropped=1)
    assert "".join(calls) == "abccbaabccba"
    assert values == {"a": [6.0, 7.0, 12.0], "b": [5.0, 8.0, 11.0], "c": [4.0, 9.0, 10.0]}


def test_an_interval_contains_the_median_is_reproducible_and_narrows_with_more_values() -> None:
    few, many = median_interval([1.0, 2.0, 3.0, 4.0, 5.0]), median_interval([1.0, 2.0, 3.0, 4.0, 5.0] * 40)
    assert few == median_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert few.low < few.median == 3.0 < few.high
    assert many.high - many.low < few.high - few.low
    assert median_interval([2.0]) == median_interval([2.0, 2.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        median_interval([])


@pytest.mark.parametrize(
    ("theirs", "verdict", "met"),
    [
        ([2.0, 2.1, 1.9, 2.0, 2.2], "ours is faster", True),
        ([0.5, 0.6, 0.5, 0.4, 0.5], "ours is slower", False),
        ([1.3, 0.7, 1.0, 1.2, 0.8], NO_DIFFERENCE, True),
    ],
)
def test_a_ratio_is_claimed_only_where_its_interval_excludes_one(theirs: list[float], verdict: str, met: bool) -> None:
    ratio = compare({"plain": theirs, "ours": [1.0] * 5}, of="plain", to="ours", name="r", goal=Goal(at_least=0.98))
    assert (ratio.verdict, ratio.met, ratio.values) == (verdict, met, theirs)
    assert (verdict == NO_DIFFERENCE) == (ratio.low <= 1 <= ratio.high)
    assert Goal(at_most=0.25).met(0.25) and not Goal(at_most=0.25).met(0.26)


def test_values_of_one_repetition_are_compared_so_that_drift_of_the_machine_cancels() -> None:
    drift = [1.0, 2.0, 4.0, 8.0, 16.0]
    ratio = compare({"a": [1.5 * d for d in drift], "b": drift}, of="a", to="b", name="r")
    assert (ratio.median, ratio.low, ratio.high) == (1.5, 1.5, 1.5)


def test_series_are_equal_bit_for_bit_or_within_a_tolerance() -> None:
    assert equal_series("s", [1.0, 0.5], [1.0, 0.5]).passed
    assert not equal_series("s", [1.0, 0.5], [1.0, 0.5000000000000001]).passed
    assert equal_series("s", [1.0, 0.5], [1.0, 0.50001], relative=1e-4).passed
    assert not equal_series("s", [1.0], [1.0, 0.5], relative=1e-4).passed
    assert not equal_series("s", [], []).passed
    assert not equal_series("s", [float("nan")], [float("nan")], relative=1.0).passed


def _measurement(*, passed: bool, quick: bool = False) -> BenchMeasurement:
    found = BenchMeasurement("loop", quick, {"blocks": 2})
    found.arms = {"plain": [2.0, 2.0], "ours": [1.0, 1.0]}
    found.ratios.append(compare(found.arms, of="plain", to="ours", name="plain / ours", goal=Goal(at_least=3.0)))
    found.claim("it is quick", True, "2.00")
    found.gate(Check("equal losses", passed, "2 losses"))
    return found


def test_the_document_holds_raw_values_the_machine_ratios_and_claims() -> None:
    document = json.loads(json.dumps(_measurement(passed=True).to_json()))
    assert {"schema", "bench", "quick", "settings", "environment", "gate", "block", "arms", "ratios", "claims"} <= set(
        document
    )
    assert document["arms"]["plain"]["values"] == [2.0, 2.0] and document["arms"]["plain"]["unit"] == "s"
    assert document["ratios"][0]["median"] == 2.0 and document["ratios"][0]["met"] is False
    assert document["claims"] == [{"effect": "it is quick", "verdict": "reproduced", "evidence": "2.00"}]
    machine = document["environment"]
    assert {"amx_bf16", "avx512_bf16"} <= set(machine["cpu_flags"])
    assert machine["versions"]["torch"] and machine["versions"]["ray"] and machine["command"].startswith("raytrain")
    assert machine["date"] and machine["cores"] >= 1 and "load_before" in machine and "threads" in machine


def test_a_failed_gate_leaves_no_ratio_and_no_claim() -> None:
    found = _measurement(passed=False)
    document = found.to_json()
    assert not document["gate"]["passed"] and document["ratios"] == [] and document["claims"] == []
    assert "nothing is compared" in found.lines()[-1] and not any("plain / ours" in line for line in found.lines())
    assert not BenchMeasurement("loop", False, {}).passed, "without a check nothing is shown"


def test_quick_sizes_claim_nothing() -> None:
    claim = _measurement(passed=True, quick=True).to_json()["claims"][0]
    assert claim["verdict"] == "not measurable here" and "--quick" in claim["evidence"]


def test_a_missed_goal_is_reported() -> None:
    lines = _measurement(passed=True).lines()
    assert any("ours is faster" in line and "at least 3.0: MISSED" in line for line in lines)


def test_the_matrix_units_of_a_cpu_are_named() -> None:
    assert matrix_units({"amx_bf16": True, "avx512_bf16": True}) == "AMX"
    assert matrix_units({"amx_bf16": False, "avx512_bf16": True}) == "AVX512-bf16"
    assert matrix_units({"amx_bf16": False, "avx512_bf16": False}) == "neither"
