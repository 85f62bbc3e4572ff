"""Units and batches: every row once, the same for any number of workers, and no row alone."""

from __future__ import annotations

import random

import pytest

from raytrain.infer.input import batches_of, unit_size, units_of


@pytest.mark.covers("INF-04")
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 103, 1009, 5_000_000])
@pytest.mark.parametrize("size", [1, 4, 100, 4096])
def test_units_hold_every_row_once_and_in_order(rows: int, size: int) -> None:
    if rows == 5_000_000 and size < 100:
        size = 100
    units = units_of(rows, size)
    assert sum(unit.rows for unit in units) == rows
    assert [unit.number for unit in units] == list(range(len(units)))
    at = 0
    for unit in units:
        assert unit.start == at and 0 < unit.rows <= size
        at += unit.rows


def test_the_size_of_a_unit_is_bounded() -> None:
    assert [unit_size(rows, generates=True) for rows in (1, 1009, 64_000, 10**9)] == [16, 16, 1000, 4096]
    assert [unit_size(rows, generates=False) for rows in (1, 1009, 64_000, 10**9)] == [512, 512, 1000, 4096]


def test_batches_hold_rows_of_like_lengths_and_no_row_alone() -> None:
    draw = random.Random(0)
    for rows in (1, 2, 5, 16, 17, 33, 100):
        lengths = [draw.randrange(1, 50) for _ in range(rows)]
        for size in (1, 2, 3, 4, 16):
            batches = batches_of(lengths, size)
            assert sorted(row for batch in batches for row in batch) == list(range(rows))
            assert max(map(len, batches)) <= size
            if size > 2 and rows > 1:
                assert min(map(len, batches)) > 1
            ordered = [lengths[row] for batch in batches for row in batch]
            assert ordered == sorted(lengths, reverse=True)


def test_equal_rows_stay_in_input_order() -> None:
    assert batches_of([3, 3, 3, 3, 3], 4) == [[0, 1, 2], [3, 4]]
    assert batches_of([1, 9, 1, 9], 2) == [[1, 3], [0, 2]]
