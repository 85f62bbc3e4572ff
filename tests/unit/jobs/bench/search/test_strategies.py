"""How bench `strategies` compares the predicted order with the measured one, with stated times."""

from __future__ import annotations

import pytest

from cluster.devices.calibration import CalibrationFile, MachineRates, RatesAtThreads
from jobs.bench.harness.measuring import BenchMeasurement
from jobs.bench.harness.options import find_benches
from jobs.bench.search.strategies import GOAL, StrategiesOptions, judge, measured_rates, run, summary, table
from raytrain.config.decode import decode
from raytrain.errors import InputError
from raytrain.plan.strategies import UNDER_LOAD, Strategy
from raytrain.train.compute import calibrate


def strategy(name: str, seconds: float, *, chosen: bool = False) -> Strategy:
    return Strategy(name, 1, 0, False, 1, seconds, 2**20, None, True, True, {}, chosen)


def around(median: float) -> list[float]:
    """Ten blocks within 2 % of a median."""
    return [median * (1 + 0.004 * step) for step in (-5, -4, -3, -2, -1, 1, 2, 3, 4, 5)]


def test_the_order_is_judged_by_pairs_that_differ_and_by_kendalls_tau() -> None:
    predicted = [strategy("a", 1.0, chosen=True), strategy("b", 2.0), strategy("c", 3.0), strategy("d", 4.0)]
    noisy = [3.4, 2.6, 3.3, 2.7, 3.2, 2.8, 3.1, 2.9, 3.5, 2.5]
    found = summary(predicted, {"a": around(2.0), "b": around(1.0), "c": around(3.0), "d": noisy})
    assert (found["predicted_best"], found["fastest"]) == ("a", "b")
    assert found["clear_pairs"] == 5, "c and d do not differ"
    assert found["clear_pairs_right"] == 4 and found["wrong"] == [["a", "b"]]
    medians = {row["name"]: row["measured_s"] for row in found["strategies"]}
    reversed_pairs = 1 + (medians["c"] > medians["d"])
    assert found["kendall_tau"] == pytest.approx((6 - 2 * reversed_pairs - (medians["c"] == medians["d"])) / 6)
    right = summary(predicted, {one.name: around(one.seconds or 0.0) for one in predicted})
    assert right["kendall_tau"] == 1.0 and right["wrong"] == [] and right["clear_pairs_right"] == 6
    lines = table({"job": right})
    assert "| job | a (auto) | 1000.0 ms | 1000.0 [" in lines[2] and lines[2].endswith("| 1.00 |")
    assert [line.split(" | ")[1] for line in lines[3:]] == ["b", "c", "d"]


def test_nothing_is_claimed_from_rates_of_a_busy_machine() -> None:
    one = RatesAtThreads(1, {"fp32": ((64, 1e9),)}, 1e9, 1e9, 1e-6)
    times = {"job: a": around(2.0), "job: b": around(1.0)}
    row = summary([strategy("a", 1.0), strategy("b", 2.0)], {"a": times["job: a"], "b": times["job: b"]})
    verdicts = []
    for busy in (False, True):
        found = BenchMeasurement("strategies", False, {}, "a step", values={"jobs": {"job": row}})
        found.compare(times, of="job: a", to="job: b", goal=GOAL)
        judge(found, MachineRates("cpu", (one,), 1e-4, 1e9, busy=busy))
        (claim,) = found.claims
        assert (
            "predicted a, measured b; 0 of 1 pairs that differ" in claim.evidence
            and "not a against b" in claim.evidence
        )
        assert (UNDER_LOAD in claim.evidence) is busy and found.advice == table({"job": row})
        verdicts.append(claim.verdict)
    assert verdicts == ["not reproduced", "not measurable here"]


def test_unknown_jobs_are_refused_and_the_bench_is_listed() -> None:
    assert find_benches()["strategies"].options is StrategiesOptions
    with pytest.raises(InputError, match="small dense"):
        run(decode(StrategiesOptions, {"jobs": ["no such job"]}), quick=True, say=lambda _: None)


def test_rates_are_measured_again_until_the_machine_is_idle(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr("jobs.bench.search.strategies.AGAIN_S", 0.0)
    one = RatesAtThreads(1, {"fp32": ((64, 1e9),)}, 1e9, 1e9, 1e-6)
    states = [True, True, False]
    monkeypatch.setattr(
        calibrate, "calibrate", lambda _device: MachineRates("cpu", (one,), 1e-4, 1e9, busy=states.pop(0))
    )
    said: list[str] = []
    assert not measured_rates(decode(StrategiesOptions, {"settle_s": 1000}), said.append).busy
    assert len(said) == 2 and not states
    kept = CalibrationFile.of_this_machine("cpu").read()
    assert kept is not None and not kept.busy
    states[:] = [True]
    assert measured_rates(decode(StrategiesOptions, {"settle_s": 0}), said.append).busy and len(said) == 2
