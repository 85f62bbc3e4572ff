"""Bench `moves`: the time of the step after a switch of placements."""

from __future__ import annotations

from jobs.bench.moves import _after_switches


def test_the_step_after_a_switch_is_compared_with_the_steps_around_it() -> None:
    times = [1.0] * 10 + [3.0] + [2.0] * 4
    assert _after_switches(times, [10, 15]) == [3.0], "step 11 against ten before and four after it; 15 was the last"
