"""How many values the rows of list columns have, and how many a model takes.

Rows are padded only for a model that takes an `attention_mask`. For any other one, zeros at the end of a row would be
values like all others, so that the answer would be that of another row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from cluster.wording import counted
from raytrain.data.sources.tables import ColumnChoice, column_kind, csv_kinds, is_list, is_nested, is_text, typed
from raytrain.data.sources.tables import number_in as number_in
from raytrain.errors import InputError
from raytrain.infer.input.files import KEY


def list_lengths(table: Any, names: Sequence[str]) -> np.ndarray:
    """Values of each row in those of the columns that are lists of any length, (rows, such columns); 0 for null."""
    from pyarrow import compute, types

    kinds = {name: table.schema.field(name).type for name in names}
    lists = [name for name, kind in kinds.items() if types.is_list(kind) or types.is_large_list(kind)]
    found = [compute.call_function("list_value_length", [table[name]]).fill_null(0).to_numpy() for name in lists]
    return np.stack(found, axis=1) if found else np.zeros((table.num_rows, 0), np.int64)


def rows_of_equal_lengths(table: Any, names: Sequence[str]) -> list[np.ndarray]:
    """The rows of a table, in groups whose list columns have equal lengths."""
    lengths = list_lengths(table, names)
    if not lengths.size or (lengths == lengths[0]).all():
        return [np.arange(table.num_rows)]
    _, group = np.unique(lengths, axis=0, return_inverse=True)
    return [np.flatnonzero(group.reshape(-1) == number) for number in range(group.max() + 1)]


def wrong_rows(table: Any, takes: Mapping[str, int]) -> dict[int, str]:
    """Row -> why it cannot be answered, of rows with another number of values than the model takes.

    Args:
        takes: column -> its values in a row.
    """
    from pyarrow import compute

    found = dict[int, str]()
    for name, wanted in takes.items():
        if list_lengths(table, [name]).size and not is_nested(table.schema.field(name).type):
            lengths = compute.call_function("list_value_length", [table[name]]).fill_null(wanted).to_numpy()
            found |= {int(row): mismatch(name, int(lengths[row]), wanted) for row in np.flatnonzero(lengths != wanted)}
    return dict(sorted(found.items()))


def wrong_values(table: Any, choice: ColumnChoice) -> dict[int, str]:
    """Row -> why it cannot be answered, of rows in which a number is missing, not finite, or no number."""
    found = dict[int, str]()
    for name in (*choice.stacked, *choice.named):
        column = table[name]
        for row in np.flatnonzero(column.is_null().to_numpy()).tolist():
            found.setdefault(row, f"column '{name}' has no value")
        if column_kind(column.type) == "number" or is_text(column.type):
            wrong = np.flatnonzero(~np.isfinite(numbers_of(column)))
            rows, cells = wrong, [column[int(row)].as_py() for row in wrong]
        elif is_list(column.type) and not is_nested(column.type):
            rows, cells = _wrong_in_lists(column)
        else:
            continue
        for row, cell in zip(rows.tolist(), cells, strict=True):
            found.setdefault(row, f"column '{name}' has no finite number: {cell!r}")
    return dict(sorted(found.items()))


def _wrong_in_lists(column: Any) -> tuple[np.ndarray, list[Any]]:
    """(rows, values) of what is missing or not finite in lists of numbers."""
    from pyarrow import compute

    flat = compute.call_function("list_flatten", [column])
    lengths = compute.call_function("list_value_length", [column]).fill_null(0).to_numpy()
    wrong = np.flatnonzero(~np.isfinite(numbers_of(flat)))
    return np.repeat(np.arange(len(column)), lengths)[wrong], [flat[int(at)].as_py() for at in wrong]


def numbers_of(column: Any) -> np.ndarray:
    """A column of numbers, or of texts that are numbers, as float64; NaN for what is none."""
    if is_text(column.type):
        column = typed(column, csv_kinds(column)[0])
    if is_text(column.type):
        cells = (number_in(cell) for cell in column.to_pylist())
        return np.array([math.nan if cell is None else cell for cell in cells], dtype=np.float64)
    return column.cast("float64", safe=False).to_numpy()  # whole numbers above 2**53 are rounded


def with_numbers(table: Any, choice: ColumnChoice) -> Any:
    """The table with texts as numbers: one value of a CSV file that is no number makes its whole column text, and so
    does keeping it in the answers."""
    for name in (*choice.stacked, *choice.named):
        if is_text(table.schema.field(name).type):
            column = typed(table[name], csv_kinds(table[name])[0])
            table = table.set_column(table.schema.get_field_index(name), name, column)
    return table


def check_numbers(schema: Any, choice: ColumnChoice) -> None:
    """Raise InputError for a column that holds no numbers, by its type."""
    for name in (*choice.stacked, *choice.named):
        kind = schema.field(name).type
        if column_kind(kind) == "other" and not is_text(kind):
            raise InputError(KEY, got=f"column '{name}' of type {kind}", expected="numbers or lists of numbers")


def mismatch(name: str, given: int, wanted: int) -> str:
    """The sentence about a row with another number of values than the model takes."""
    return f"{name} has {counted(given, 'value')}, the model takes {wanted}"


def check_list_sizes(schema: Any, takes: Mapping[str, int]) -> None:
    """Raise InputError if the schema says that all rows have another number of values than the model takes."""
    from pyarrow import types

    for name, wanted in takes.items():
        kind = schema.field(name).type if name in schema.names else None
        size = kind.list_size if kind is not None and types.is_fixed_size_list(kind) else None
        if kind is not None and (types.is_integer(kind) or types.is_floating(kind)):
            size = 1
        if size not in (None, wanted) and not is_nested(kind):
            seen = f"the column {name} with {counted(size, 'value')} in each row"
            raise InputError(KEY, got=seen, expected=f"{wanted}, as the model takes")


def layer_mismatch(error: BaseException) -> tuple[int, int] | None:
    """(values that reached a linear layer, values that it takes) if an error was raised inside one that got another
    number of values; None for any other error."""
    trace = error.__traceback__
    while trace is not None:
        layer, given = trace.tb_frame.f_locals.get("self"), trace.tb_frame.f_locals.get("input")
        if isinstance(layer, nn.Linear) and isinstance(given, Tensor) and given.shape[-1:] != (layer.in_features,):
            return (int(given.shape[-1]) if given.ndim else 1), layer.in_features
        trace = trace.tb_next
    return None
