from __future__ import annotations

from dataclasses import replace

import pytest

from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.memory_line import fit, points

FITTED = Measurement(Candidate("fp32", 4), "ok", peak_bytes=140, floor_bytes=100)


def test_a_line_through_two_sizes_predicts_the_others() -> None:
    line = fit([(4, 140), (8, 180)])
    assert (line.floor, line.per_row) == (100, 10)
    assert line.predict(64) == 740


def test_more_sizes_are_fitted_by_least_squares() -> None:
    line = fit([(1, 11), (2, 19), (3, 31)])  # by hand: slope 10, through the means (2, 61 / 3)
    assert line.per_row == pytest.approx(10) and line.floor == pytest.approx(61 / 3 - 20)


def test_the_largest_size_within_a_budget() -> None:
    line = fit([(4, 140), (8, 180)])
    assert line.largest(260, (1, 2, 4, 8, 16, 32)) == 16
    assert line.largest(259, (1, 2, 4, 8, 16, 32)) == 8
    assert line.largest(100, (1, 2)) is None


def test_a_line_never_falls_and_one_size_charges_its_rows() -> None:
    assert fit([(4, 180), (8, 140)]).per_row == 0
    assert fit([(4, 180), (4, 200)]).predict(8) == 400
    with pytest.raises(ValueError, match="at least one"):
        fit([])


def test_points_stand_on_the_highest_floor_and_leave_out_what_the_allocator_refused() -> None:
    second = replace(FITTED, candidate=Candidate("fp32", 8), peak_bytes=192, floor_bytes=112)
    refused = replace(second, candidate=Candidate("fp32", 16), outcome="out_of_memory", peak_bytes=None)
    assert points([FITTED, second, refused]) == [(4, 152), (8, 192)]
