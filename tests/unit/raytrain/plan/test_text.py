"""Durations and numbers as text."""

from __future__ import annotations

import pytest

from cluster.wording import seconds
from raytrain.plan.choice import digits_text, seconds_text


@pytest.mark.parametrize(
    ("spent", "two", "three"),
    [
        (0.0000004, "0.0004 ms", "0.0004 ms"),
        (0.00000000004, "0 ms", "0 ms"),
        (0.0342, "34 ms", "34.2 ms"),
        (0.0994, "99 ms", "99.4 ms"),
        (0.0996, "0.1 s", "99.6 ms"),  # not 1e+02 ms
        (0.09997, "0.1 s", "0.1 s"),
        (0.124, "0.12 s", "0.124 s"),
        (99.4, "99 s", "99.4 s"),
        (99.7, "100 s", "99.7 s"),
        (4321.0, "4,321 s", "4,321 s"),
        (0.0, "0 ms", "0 ms"),
    ],
)
def test_a_duration_has_few_digits_and_no_exponent(spent: float, two: str, three: str) -> None:
    assert (seconds_text(spent), seconds_text(spent, digits=3)) == (two, three)


def test_no_duration_has_an_exponent() -> None:
    for power in range(-12, 9):
        for digit in (1.0, 1.5, 9.4, 9.951, 9.9951, 9.99951):
            spent = digit * 10.0**power
            texts = [seconds_text(spent), seconds_text(spent, digits=3), digits_text(spent, 4)]
            if power >= -4:  # the report's durations are of steps and runs
                texts.append(seconds(spent))
            assert not any("e" in text for text in texts), texts
