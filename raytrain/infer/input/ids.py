"""Whether the ids of an input are unique. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raytrain.errors import InputError
from raytrain.infer.input.rows import InputRows


def duplicate_id(rows: InputRows, column: str) -> tuple[Any, Sequence[int]] | None:
    """A value of a column that occurs twice or is missing, and the rows where; None if all values are unique.

    Only hashes of the values are kept, 8 bytes a row; the column is read again where two of them are equal.

    Raises:
        InputError: its values cannot be ids, such as lists.
    """
    hashes = list[Any]()
    for values in rows.column(column):
        if values.null_count:
            missing = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
            return None, (sum(map(len, hashes)) + missing,)
        try:
            hashes.append(np.fromiter(map(hash, values.to_pylist()), np.int64, len(values)))
        except TypeError as error:
            expected = "a column of numbers or texts"
            raise InputError("infer.id_column", got=f"{column} of type {values.type}", expected=expected) from error
    ordered = np.sort(np.concatenate(hashes))
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    known, start = dict[Any, int](), 0
    for values, own in zip(rows.column(column), hashes, strict=True) if len(twice) else ():
        for place in np.flatnonzero(np.isin(own, twice)).tolist():
            value, row = values[place].as_py(), start + place
            if value in known:
                return value, (known[value], row)
            known[value] = row
        start += len(values)
    return None
