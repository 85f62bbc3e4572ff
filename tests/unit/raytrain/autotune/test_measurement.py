"""The line of memory through measured sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain.autotune.measurement import Candidate, Measurement, line_of

FITTED = Measurement(Candidate("fp32", 4), "ok", peak_bytes=140, floor_bytes=100)


def read(*peaks: tuple[int, int], floor: int = 0) -> list[Measurement]:
    """(rows, peak) of measurements."""
    return [Measurement(Candidate("fp32", n), "ok", peak_bytes=peak, floor_bytes=floor) for n, peak in peaks]


def test_a_line_through_two_sizes_predicts_the_others() -> None:
    line = line_of(read((4, 140), (8, 180)))
    assert (line.floor, line.per_row) == (100, 10)
    assert line.predict(64) == 740


def test_more_sizes_are_fitted_by_least_squares() -> None:
    line = line_of(read((1, 11), (2, 19), (3, 31)))  # by hand: slope 10, through the means (2, 61 / 3)
    assert line.per_row == pytest.approx(10) and line.floor == pytest.approx(61 / 3 - 20)


def test_a_line_never_falls_and_one_size_charges_its_rows() -> None:
    assert line_of(read((4, 180), (8, 140))).per_row == 0
    assert line_of(read((4, 200))).predict(8) == 400
    assert line_of([FITTED]).predict(8) == 180, "through its floor, if that is known"


def test_peaks_stand_on_the_highest_floor_without_what_the_allocator_refused() -> None:
    second = replace(FITTED, candidate=Candidate("fp32", 8), peak_bytes=192, floor_bytes=112)
    refused = replace(second, candidate=Candidate("fp32", 16), outcome="out_of_memory", peak_bytes=None)
    line = line_of([FITTED, second, refused])
    assert (line.predict(4), line.predict(8)) == (152, 192)
