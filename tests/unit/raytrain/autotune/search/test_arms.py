"""Choosing between two timed ways to compute."""

from __future__ import annotations

import pytest

from raytrain.autotune.search.arms import choose_inflight, choose_overlap


@pytest.mark.parametrize(
    ("seconds", "chosen", "words"),
    [({1: 1.0, 2: 0.8}, 2, "1.25 times"), ({1: 1.0, 2: 0.98}, 1, "1.02 times"), ({1: 1.0, 2: 2.0}, 1, "0.50 times")],
)
def test_two_micro_batches_in_flight_must_be_faster_by_more_than_noise(
    seconds: dict[int, float], chosen: int, words: str
) -> None:
    made = choose_inflight(seconds)
    assert made.value == chosen and words in made.reason


def test_one_is_in_flight_where_two_have_no_room() -> None:
    made = choose_inflight({}, {2: "no memory"})
    assert (made.value, made.reason) == (1, "2 in flight failed while measured: no memory")


@pytest.mark.parametrize(
    ("after", "during", "chosen", "words"),
    [
        ([1.0] * 5, [0.8] * 5, True, "1.25 times as fast as after it, faster in 5 of 5 rounds"),
        ([1.0] * 5, [0.98] * 5, False, "1.02 times"),
        ([1.0] * 5, [0.7, 0.7, 0.7, 0.7, 1.1], False, "4 of 5"),
        ([1.0] * 8, [0.9] * 7 + [1.1], True, "7 of 8"),
        ([1.0] * 4, [0.5] * 4, False, "4 of 4"),
        ([1.0, 1.0], [1.2, 2.0], False, "0 of 2"),
    ],
)
def test_overlap_must_be_faster_in_more_rounds_than_chance_gives(
    after: list[float], during: list[float], chosen: bool, words: str
) -> None:
    made = choose_overlap({"after": after, "during": during})
    assert made.value is chosen and words in made.reason
