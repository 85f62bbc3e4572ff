"""Bench `moves`: the time of the step after a switch of placements."""

from __future__ import annotations

from jobs.bench.moves import over_around


def test_the_step_after_a_switch_is_compared_with_the_steps_around_it() -> None:
    times = [1.0] * 10 + [3.0] + [2.0] * 4
    found = over_around(times, [(10, 11), (15, 16)])
    assert found == [3.0], "step 11 against ten before and four after it; 15 was the last"


def test_the_larger_of_the_step_of_a_change_and_the_next_is_compared_with_the_steps_around_both() -> None:
    times = [9.0] * 2 + [1.0] * 10 + [3.0, 4.0] + [2.0] * 14
    assert over_around(times, [(12, 14)]) == [4.0 / 1.5], "step 13 and 14 against ten before and ten after"
    assert over_around([1.0] * 15 + [3.0], [(14, 16), (15, 17)]) == [3.0, 3.0], "also where there is no next one"
