"""Whether the ids of an input are unique, for inputs larger than memory. Torch-free."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from raytrain.errors import InputError
from raytrain.infer.input.rows import InputRows

#: Rows whose hashes are sorted in memory at a time, 16 bytes each.
ROWS_AT_ONCE = 4 << 20
_PAIR = np.dtype([("hash", np.int64), ("row", np.int64)])


def duplicate_id(rows: InputRows, column: str, *, at_once: int = ROWS_AT_ONCE) -> tuple[Any, Sequence[int]] | None:
    """A value of a column that occurs twice or is missing, and the rows where; None if all values are unique.

    The column is read once. Hashes of its values are sorted: of more than `at_once` rows in parts, which wait in a
    temporary folder, 16 bytes a row. Values of equal hashes are compared.

    Raises:
        InputError: its values cannot be ids, such as lists.
    """
    parts = -(-rows.rows // at_once)
    if parts <= 1:
        pairs = []
        for part, missing in _hashed(rows, column):
            if missing is not None:
                return None, (missing,)
            pairs.append(part)
        return _twice(np.concatenate(pairs), rows, column)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rt-ids-"))
        files = [stack.enter_context(open(os.path.join(folder, str(number)), "w+b")) for number in range(parts)]
        for part, missing in _hashed(rows, column):
            if missing is not None:
                return None, (missing,)
            home = part["hash"] % parts
            for number, file in enumerate(files):
                file.write(part[home == number].tobytes())
        for file in files:
            file.seek(0)
            found = _twice(np.frombuffer(file.read(), _PAIR), rows, column)
            if found is not None:
                return found
    return None


def _hashed(rows: InputRows, column: str) -> Iterator[tuple[Any, int | None]]:
    """(hash, row) of the values in input order, a part at a time; with the first row without a value, else None."""
    start = 0
    for values in rows.column(column):
        missing = None
        if values.null_count:
            missing = start + int(np.argmax(values.is_null().to_numpy(zero_copy_only=False)))
        pairs = np.empty(len(values), _PAIR)
        try:
            pairs["hash"] = np.fromiter(map(hash, values.to_pylist()), np.int64, len(values))
        except TypeError as error:
            expected = "a column of numbers or texts"
            raise InputError("infer.id_column", got=f"{column} of type {values.type}", expected=expected) from error
        pairs["row"] = np.arange(start, start + len(values))
        start += len(values)
        yield pairs, missing


def _twice(pairs: Any, rows: InputRows, column: str) -> tuple[Any, Sequence[int]] | None:
    """The value of an equal hash that is equal itself, with its first two rows; of several, that of the first row."""
    order = np.argsort(pairs["hash"], kind="stable")  # so that equal hashes stay in input order
    ordered = pairs[order]
    same = np.flatnonzero(ordered["hash"][1:] == ordered["hash"][:-1])
    for at in sorted(same.tolist(), key=lambda at: ordered["row"][at + 1]):
        known: dict[Any, int] = {}
        at = int(np.searchsorted(ordered["hash"], ordered["hash"][at]))  # the first of these hashes
        for row in ordered["row"][at:].tolist():
            value = rows.read(row, 1, [column])[column][0].as_py()
            if hash(value) != ordered["hash"][at]:
                break
            if value in known:
                return value, (known[value], row)
            known[value] = row
    return None
