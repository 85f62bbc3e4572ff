"""Ids of a column are unique, or a value and its rows are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from raytrain.errors import InputError
from raytrain.infer.input import InputRows, duplicate_id


def rows_of(folder: Path, values: Any, *, limit: int | None = None) -> InputRows:
    """The values as the column `key` of two files."""
    values = pa.array(values)
    for name, part in (("a", values[:50]), ("b", values[50:])):
        parquet.write_table(pa.table({"other": range(len(part)), "key": part}), folder / f"{name}.parquet")
    return InputRows.at([str(folder / "a.parquet"), str(folder / "b.parquet")], limit=limit)


def test_a_value_that_occurs_twice_is_found_with_its_rows(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).permutation(103)
    for values in (numbers - 51, [f"q{number}" for number in numbers], [(-1) ** number * number for number in numbers]):
        assert duplicate_id(rows_of(tmp_path, values), "key") is None
        twice = [*values[:90], values[7], *values[91:]]
        assert duplicate_id(rows_of(tmp_path, twice), "key") == (values[7], (7, 90))
        assert duplicate_id(rows_of(tmp_path, twice, limit=90), "key") is None
    between = [-1, -2, -1, *range(100)]  # the first two have the same hash
    assert duplicate_id(rows_of(tmp_path, between), "key") == (-1, (0, 2))


def test_a_row_without_an_id_is_named(tmp_path: Path) -> None:
    values = [None if row in (60, 80) else row for row in range(103)]
    assert duplicate_id(rows_of(tmp_path, values), "key") == (None, (60,))


def test_values_that_cannot_be_ids_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"infer.id_column: got key of type list.*expected a column of numbers or text"
    ):
        duplicate_id(rows_of(tmp_path, [[row] for row in range(103)]), "key")
