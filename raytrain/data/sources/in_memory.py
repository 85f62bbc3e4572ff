"""Turn objects in memory into splits: dicts of tensors, Arrow tables, map-style datasets and opened table files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from raytrain.data.rows.collate import UsersCollate
from raytrain.data.rows.contract import RowSplit, Source, facts_of, split_off
from raytrain.data.rows.map_style import DatasetSplit, MaskedColumns, generators_kept, mixed_labels
from raytrain.data.rows.residency import full_tensor
from raytrain.data.rows.splits import (
    Ragged,
    RaggedSplit,
    TensorSplit,
    check_finite,
    columns_split,
    host_tensor,
    is_integer,
)
from raytrain.data.sources.ray_dataset import is_ray_dataset
from raytrain.data.sources.sections import is_table, refuse_class
from raytrain.data.sources.tables import (
    TableColumns,
    check_classes,
    check_present,
    choose_columns,
    class_names,
    convert,
    is_text,
)
from raytrain.errors import InputError

KINDS = "a dict of tensors, a map-style dataset (len and [i]), or a pyarrow Table"


def table_pair(
    train: Any,
    evaluation: Any | None,
    *,
    features: Sequence[str] | None = None,
    label: str | None = None,
    fraction: float,
    keys: tuple[str, str] = ("data.path", "data.eval_path"),
    origin: str,
) -> Source:
    """Return a source of one or two pyarrow Tables; without the second, the part `fraction` of the first is held out.
    `keys`: what errors name, one per table. `origin`: what the tables are, for messages. Raises InputError: columns
    that are missing, not numeric, have missing values, or differ between the tables."""
    choice = choose_columns(train.schema, features=features, label=label, key=keys[0], table=train)
    tables = [train] if evaluation is None else [train, evaluation]
    label = choice.label
    names = class_names(tables, label)
    converted = [convert(train, choice, classes=names, key=keys[0])]
    if evaluation is not None:
        missing = [n for n in (*choice.stacked, *choice.named, label) if n and n not in evaluation.column_names]
        if missing:
            raise InputError(keys[1], got=f"no column '{missing[0]}'", expected=f"the columns of {keys[0]}")
        converted.append(convert(evaluation, choice, classes=names, key=keys[1]))
        for name in [*converted[0].dense, *converted[0].ragged]:
            expected, seen = (_column_type(columns, name) for columns in converted)
            if seen != expected:
                raise InputError(keys[1], got=f"'{name}' as {seen}", expected=f"{expected} as in the training data")
    splits = [table_split(columns) for columns in converted]
    train_split, eval_split = splits if len(splits) == 2 else split_off(splits[0], fraction)
    classes = len(names) if names else class_count(splits)
    made = _source(train_split, eval_split, origin=origin, classes=classes, class_names=names)
    return replace(made, reads=choice.reads())


def _column_type(columns: TableColumns, name: str) -> str:
    if name in columns.ragged:
        return f"lists of {columns.ragged[name][0].dtype}"
    values = columns.dense[name]
    return f"{values.dtype} of {values.shape[1:]}" if values.ndim > 1 else str(values.dtype)


def table_split(
    columns: TableColumns, *, tokens_per_row: int | None = None, fills: Mapping[str, int] | None = None
) -> RowSplit:
    """Return arrays as a split that shares their memory; see `columns_split`."""
    dense = {name: host_tensor(values) for name, values in columns.dense.items()}
    ragged = {name: Ragged(host_tensor(values), offsets) for name, (values, offsets) in columns.ragged.items()}
    return columns_split(dense, ragged, tokens_per_row=tokens_per_row, fills=fills)


def class_count(splits: Sequence[Any]) -> int | None:
    """Return the number of classes: the largest class number plus one; None unless labels are one integer per row."""
    highest = []
    for split in splits:
        columns = getattr(split, "dense", split)
        labels = getattr(columns, "columns", {}).get("labels")
        if labels is None or labels.ndim != 1 or not is_integer(labels) or not len(labels):
            return None
        highest.append(int(labels.max()))
    return max(highest) + 1 if max(highest) >= 0 else None


def object_split(data: Any, *, key: str, collate: UsersCollate | None = None) -> RowSplit:
    """Return one object as a split: a dict of tensors, arrays or lists; a map-style dataset of dicts or (x, y) pairs,
    with `collate` of any items; a pyarrow Table or pandas DataFrame, whose columns keep their names. Raises InputError:
    an unsupported object, no rows, different row counts, NaN or infinity in a float column."""
    if isinstance(data, Mapping):
        dense, ragged, rows = {}, {}, {}
        for name, values in data.items():
            column = _column(str(name), values, key=key)
            if isinstance(column, Ragged):
                ragged[str(name)] = column
                check_finite(name, full_tensor(column.values), key=key, rows=column.offsets)
                rows[str(name)] = len(column.offsets) - 1
            else:
                dense[str(name)] = column
                rows[str(name)] = column.shape[0]
                check_finite(name, column, key=key)
        if not rows or not max(rows.values()):
            raise InputError(key, got="0 rows", expected="at least one row")
        if len(set(rows.values())) > 1:
            seen = ", ".join(f"{count} in '{name}'" for name, count in rows.items())
            raise InputError(key, got=f"different numbers of rows: {seen}", expected="the same number in every column")
        labels = dense.get("labels")
        if labels is not None and labels.ndim == 1 and is_integer(labels):
            check_classes(labels.numpy(), name="labels", key=key)
        return columns_split(dense, ragged)
    if is_table(data):
        table = as_table(data, key=key)
        choice = choose_columns(table.schema, features=None, label=None, key=key)
        return table_split(convert(table, choice, classes=None, key=key))
    refuse_class(data, key=key)
    if is_ray_dataset(data):
        raise InputError(key, got="a Ray Dataset", expected=KINDS, remedy="pass its rows as a pyarrow Table")
    check_kind(data, key=key)
    if not len(data):
        raise InputError(key, got=f"0 rows in the {type(data).__name__}", expected="at least one row")
    split = DatasetSplit(data, key=key, collate=collate)
    split.read(np.zeros(1, np.int64))  # raises InputError for an item that is no row
    return split


def check_kind(data: Any, *, key: str) -> None:
    """Raise InputError for an object, no table and no dict of columns, that has no rows by number; it says what to pass
    instead, where that is known."""
    if isinstance(data, torch.utils.data.DataLoader):
        remedy = "pass loader.dataset; batches are made here"
    elif isinstance(data, (torch.utils.data.IterableDataset, Iterator)):
        remedy = "pass a list of what it yields: list(...)"
    elif isinstance(data, (torch.Tensor, np.ndarray, str, tuple)) or not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ):
        remedy = ""
    else:
        return
    raise InputError(key, got=f"a {type(data).__name__}", expected=KINDS, remedy=remedy)


def as_table(data: Any, *, key: str) -> Any:
    """Return a Table or DataFrame as a pyarrow Table. Raises InputError if it has no rows."""
    import pyarrow as pa

    table = data if isinstance(data, pa.Table) else pa.Table.from_pandas(data, preserve_index=False)
    if not table.num_rows:
        raise InputError(key, got="a table of 0 rows", expected="at least one row")
    return table


def _column(name: str, values: Any, *, key: str) -> torch.Tensor | Ragged:
    """Return a tensor (rows, ...), or a ragged column from a list of arrays or lists of different lengths."""
    why = ""
    try:
        tensor = host_tensor(values)
    except (TypeError, ValueError) as error:
        tensor, why = None, f" ({error})" if isinstance(values, np.ndarray) else ""
    if tensor is not None and tensor.ndim:
        return tensor
    if tensor is None and isinstance(values, (list, tuple)):
        try:
            parts = [host_tensor(part) for part in values]
        except (TypeError, ValueError):
            parts = []
        if parts and all(part.ndim and part.shape[1:] == parts[0].shape[1:] for part in parts):
            offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
            return Ragged(torch.cat([part for part in parts if len(part)] or parts), offsets)
    what = (
        "a single number" if tensor is not None else f"a {type(values).__name__} that is not a column of numbers{why}"
    )
    raise InputError(key, got=f"'{name}' is {what}", expected="tensors or arrays (rows, ...)")


def memory_source(
    train: Any,
    evaluation: Any | None,
    *,
    fraction: float,
    keys: tuple[str, str] = ("data.train", "data.eval"),
    origin: str = "data in memory",
    collate: UsersCollate | None = None,
) -> Source:
    """Return a source of one or two objects (`object_split`); without the second, part of the first is held out."""
    given, names = _numbered([train] if evaluation is None else [train, evaluation], keys)
    train_split, *others = [object_split(one, key=key, collate=collate) for one, key in zip(given, keys, strict=False)]
    names = names or _name_classes([train_split, *others])
    classes = len(names) if names else class_count([train_split, *others])
    if not others:
        return _source(*split_off(train_split, fraction), origin=origin, classes=classes, class_names=names)
    (eval_split,) = others
    if isinstance(train_split, DatasetSplit) and isinstance(eval_split, DatasetSplit):
        train_split.masked = eval_split.masked = MaskedColumns(train_split, eval_split)
    ragged = {name for split in (train_split, eval_split) if isinstance(split, RaggedSplit) for name in split.ragged}
    splits = [_with_ragged(split, ragged) for split in (train_split, eval_split)]
    return _source(*splits, origin=origin, classes=classes, class_names=names)


def _numbered(given: Sequence[Any], keys: Sequence[str]) -> tuple[list[Any], tuple[str, ...] | None]:
    """The objects with string labels in columns replaced by numbers, and the names of these, sorted."""
    given = [as_table(one, key=key) if is_table(one) else one for one, key in zip(given, keys, strict=False)]
    columns = [(key, _label_column(one, key)) for one, key in zip(given, keys, strict=False)]
    if not _hold_names([(key, column) for key, column in columns if column is not None]):
        return given, None
    import pyarrow as pa

    names = sorted({str(name) for _, column in columns if column is not None for name in column})
    for place, (_, column) in enumerate(columns):
        if column is None:
            continue
        one, numbers = given[place], np.searchsorted(names, column)
        if isinstance(one, Mapping):
            given[place] = {**one, "labels": numbers}
        else:
            given[place] = one.set_column(one.column_names.index("labels"), "labels", pa.array(numbers))
    return given, tuple(names)


def _label_column(one: Any, key: str) -> Any | None:
    """The labels of an object of columns; None for other objects and without labels."""
    if not is_table(one):
        return one.get("labels") if isinstance(one, Mapping) else None
    if "labels" not in one.column_names:
        return None
    if not is_text(one["labels"].type):
        return one["labels"]
    check_present(one["labels"], "labels", key=key)
    return one["labels"].to_pylist()


def _hold_names(columns: Sequence[tuple[str, Any]]) -> bool:
    """Whether label columns, each with the key that errors name, hold names. Errors: InputError for names and numbers
    together."""
    first = list[Any]()
    for key, column in columns:
        may_differ = isinstance(column, list | tuple) or str(getattr(column, "dtype", "")) == "object"
        for row, value in enumerate(column if may_differ else column[:1] if np.ndim(column) else ()):
            first = first or [value]
            if isinstance(value, str) != isinstance(first[0], str):
                raise mixed_labels(key, value, row=row, names=isinstance(first[0], str))
    return bool(first) and isinstance(first[0], str)


def _name_classes(splits: Sequence[RowSplit]) -> tuple[str, ...] | None:
    """The sorted names of the string labels of datasets, for which each item is read once; they become numbers in the
    splits. None for other labels."""
    own = [split for split in splits if isinstance(split, DatasetSplit) and split.collate is None]
    with generators_kept():
        first = _label(own[0], 0) if own else None
        if not isinstance(first, str | torch.Tensor):
            return None
        names = set[str]()
        for split in own if isinstance(first, str) else ():
            for row in range(len(split)):
                if not isinstance(label := _label(split, row), str):
                    raise mixed_labels(split.key, label, row=row, names=True)
                names.add(str(label))
    for split in own:
        split.classes = {name: number for number, name in enumerate(sorted(names))}
    return tuple(sorted(names)) or None


def _label(split: DatasetSplit, row: int) -> Any:
    return split.read(np.array([row]))[0].get("labels")


def _with_ragged(split: RowSplit, names: set[str]) -> RowSplit:
    """The split with these columns stored as rows of different lengths, even if its own rows have equal lengths: both
    splits of a source have a mask, or neither."""
    dense = split if isinstance(split, TensorSplit) else split.dense if isinstance(split, RaggedSplit) else None
    if dense is None or not names & dense.columns.keys():
        return split
    ragged = dict(split.ragged) if isinstance(split, RaggedSplit) else {}
    columns = {name: full_tensor(column) for name, column in dense.columns.items()}
    for name in names & columns.keys():
        column = columns.pop(name)
        if column.ndim < 2:
            return split
        ragged[name] = Ragged(column.flatten(0, 1), np.arange(len(column) + 1) * column.shape[1])
    return RaggedSplit(ragged, dense=TensorSplit(columns) if columns else None)


def _source(
    train: RowSplit,
    evaluation: RowSplit | None,
    *,
    origin: str,
    classes: int | None,
    class_names: tuple[str, ...] | None = None,
) -> Source:
    held = 0 if evaluation is None else len(evaluation)
    reason = f"{origin}: {len(train):,} rows to train on, {held:,} for evaluation"
    kind = "items" if isinstance(train, DatasetSplit) else "memory"
    return Source(
        train=train,
        eval=evaluation,
        facts=replace(facts_of(train, evaluation, reason=reason), kind=kind),
        describe=reason,
        classes=classes,
        class_names=class_names,
    )
