"""Bench `claims`: the seconds of its parts, and modes of torch.compile that do not compile."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jobs.bench import claims_steps
from jobs.bench.claims import ClaimsOptions
from jobs.bench.claims_data import PARTS, Annotations, Perceptron, clone_and_copy, order_of, resident
from jobs.bench.harness.measuring import BenchMeasurement


@pytest.mark.covers("PERF-19")
def test_the_total_of_an_arm_is_the_sum_of_its_parts_and_rows_are_converted_once() -> None:
    data, order = Annotations(30, 8, seed=1), order_of(30, 8, 4, seed=1)
    model = Perceptron(8, 4, seed=0)
    old = clone_and_copy(data, order, model)
    assert data.converted == 30 * 4 and len(model.losses) == 16 and old.parts.shape == (4, len(PARTS))
    other = Perceptron(8, 4, seed=0)
    data.converted = 0
    new = resident(data, other, batch=8, epochs=4, seed=1)
    assert 30 <= data.converted < 40 and model.losses == other.losses
    for seconds in (old, new):
        assert seconds.total == pytest.approx(seconds.preparation + seconds.parts.sum())
        assert seconds.parts.sum(axis=1).min() > 0
    assert new.preparation > 0 == old.preparation


@pytest.mark.covers("TRB-32")
def test_a_mode_that_does_not_compile_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Arm:
        """Instead of a session, whose parts are compiled or not."""

        losses = (1.0, 0.5)

        def __init__(self, mode: str) -> None:
            works = {"parts": [{}], "achieved": "1 of 1 parts", "reasons": [], "seconds": 3.0}
            fails = {**works, "achieved": "0 of 1 parts", "reasons": ["no such kernel"]}
            status = {**(fails if mode == "max-autotune" else works), "graph_breaks": 0, "recompiles": 0}
            compiled = None if mode == "off" else SimpleNamespace(status=lambda: status)
            self.session = SimpleNamespace(switches=SimpleNamespace(compiled=compiled))
            self.seconds = {"off": 2.0}.get(mode, 1.0)

        def run(self, steps: int) -> float:
            return self.seconds * steps

    monkeypatch.setattr(claims_steps, "gpt_arm", lambda options, compile="off", **_: Arm(compile))
    found = BenchMeasurement("claims", False, {})
    claims_steps._compare_modes(ClaimsOptions.model_validate({}), found)
    assert found.passed and set(found.arms) == {"eager", "default", "reduce-overhead"}
    assert found.values["skipped"] == {"max-autotune": "no such kernel"}
    (skipped,) = [claim for claim in found.claims if "max-autotune" in claim.effect]
    assert skipped.verdict == "not measurable here" and "skipped" in skipped.evidence
    assert found.values["default"]["pays_from_step"] == 3
    assert "2.000 [2.000, 2.000]" in found.lines()[-2] and "break-even at step 3" in found.lines()[-2]
