"""Columns of Arrow tables as arrays: every number there and finite, labels as classes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytrain.data.rows.contract import IGNORED_LABEL, nonfinite
from raytrain.data.sources.tables import Choice, column_kind, no_label
from raytrain.errors import InputError


@dataclass(frozen=True)
class TableColumns:
    """Columns as arrays: `dense` (rows, ...), `ragged` as (values, offsets)."""

    dense: dict[str, np.ndarray] = field(default_factory=dict)
    ragged: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def convert(table: Any, choice: Choice, *, classes: tuple[str, ...] | None, key: str) -> TableColumns:
    """The chosen columns as arrays: x float32, labels int64 (classes) or float32, lists as they are.

    Raises:
        InputError: a missing value, NaN or infinity, naming column and row.
    """
    columns = TableColumns()
    for name in (*choice.stacked, *choice.named):
        if column_kind(table.schema.field(name).type) == "other":
            seen = f"column '{name}' of type {table.schema.field(name).type}"
            raise InputError(key, seen=seen, expected="numbers or lists of numbers")
    if choice.stacked:
        parts = [_numbers(table, name, key=key).astype(np.float32) for name in choice.stacked]
        columns.dense["x"] = np.stack(parts, axis=1)
        for number, name in enumerate(choice.stacked):
            _check_finite(columns.dense["x"][:, number], name, key=key)
    for name in choice.named:
        if column_kind(table.schema.field(name).type) == "number":
            columns.dense[name] = _numbers(table, name, key=key)
        else:
            _lists(table, name, columns, key=key)
    if choice.label is not None:
        columns.dense["labels"] = _labels(table, choice.label, classes=classes, key=key)
    return columns


def _numbers(table: Any, name: str, *, key: str) -> np.ndarray:
    """A column of numbers: int64 or float32, every value there and finite."""
    column = table[name]
    check_present(column, name, key=key)
    values = _values(column)
    _check_finite(values, name, key=key)
    return values


def _values(column: Any) -> np.ndarray:
    import pyarrow as pa

    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    values = column.to_numpy()
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is then refused by name
        return values.astype(np.int64 if values.dtype.kind in "biu" else np.float32)


def _row_of(at: int, offsets: np.ndarray | None) -> int:
    return at if offsets is None else int(np.searchsorted(offsets, at, side="right")) - 1


def check_present(column: Any, name: str, *, key: str, offsets: np.ndarray | None = None) -> None:
    """Raises InputError where a value of a column is missing, by its row."""
    if column.null_count:
        row = _row_of(int(np.argmax(column.is_null().to_numpy())), offsets)
        raise InputError(
            key,
            seen=f"a missing value in column '{name}' row {row}",
            expected="finite numbers",
            remedy="rows count from 0; fill these values or leave the rows out",
        )


def _check_finite(values: np.ndarray, name: str, *, key: str, offsets: np.ndarray | None = None) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        at = int(np.argmax(~np.isfinite(values)))
        raise nonfinite(key, value=float(values[at]), column=name, row=_row_of(at, offsets))


def _lists(table: Any, name: str, columns: TableColumns, *, key: str) -> None:
    """A column of lists: (rows, L) where the type fixes the length, else values and offsets."""
    from pyarrow import compute, types

    column = table[name]
    check_present(column, name, key=key)
    flat = compute.call_function("list_flatten", [column])  # by name: pyarrow makes its functions at import
    lengths = compute.call_function("list_value_length", [column]).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    check_present(flat, name, key=key, offsets=offsets)
    values = _values(flat)
    _check_finite(values, name, key=key, offsets=offsets)
    if types.is_fixed_size_list(column.type):
        columns.dense[name] = values.reshape(table.num_rows, -1)
    else:
        columns.ragged[name] = (values, offsets)


def _labels(table: Any, name: str, *, classes: tuple[str, ...] | None, key: str) -> np.ndarray:
    """Class numbers int64 (strings by their place in `classes`), or float32 for a column of fractions."""
    import pyarrow as pa

    column = table[name]
    check_present(column, name, key=key)
    if classes is not None:
        numbers = {text: number for number, text in enumerate(classes)}
        return np.array([numbers[text] for text in column.to_pylist()], dtype=np.int64)
    if column_kind(column.type) != "number":
        raise no_label(name, column.type)
    values = _values(column)
    _check_finite(values, name, key=key)
    if not (pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)):
        check_classes(values, name=name, key="data.label")
    return values


def check_classes(labels: np.ndarray, *, name: str, key: str) -> None:
    """Class numbers begin at 0; -100 stands for "no label". Raises InputError for any other below 0."""
    wrong = (labels < 0) & (labels != IGNORED_LABEL)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(
            key,
            seen=f"the class {labels[row]} in column '{name}' row {row}",
            expected=f"class numbers from 0 up, or {IGNORED_LABEL} for rows without a label",
        )
