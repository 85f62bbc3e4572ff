"""How many values the rows of list columns have, and how many a model takes.

Rows are padded only for a model that takes an `attention_mask`. For any other one, zeros at the end of a row would be
values like all others, so that the answer would be that of another row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from cluster.wording import counted
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
        if list_lengths(table, [name]).size:
            lengths = compute.call_function("list_value_length", [table[name]]).fill_null(wanted).to_numpy()
            found |= {int(row): mismatch(name, int(lengths[row]), wanted) for row in np.flatnonzero(lengths != wanted)}
    return dict(sorted(found.items()))


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
        if size not in (None, wanted):
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
