"""Read texts from JSON lines: each line is a document, a prompt with its completion, or a text with its class."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raytrain.config.messages import suggestion
from raytrain.data.sources.tables import check_classes
from raytrain.errors import InputError
from raytrain.models.huggingface.class_names import check_names
from raytrain.runs.storage import read_bytes


def read_fields(paths: Sequence[str], *, fields: Mapping[str, str], key: str) -> dict[str, list[Any]]:
    """Return the columns of the files, by key of the `data` section.

    Args:
        fields: key of the section ("text_field", ...) -> the field name in each line.
        key: the config key that errors about files name.
    Raises:
        InputError: no lines, or a line that is not a JSON object, lacks a field, or has a value of the wrong type.
    """
    columns: dict[str, list[Any]] = {name: [] for name in fields}
    for path in paths:
        for number, row in _lines(path, key=key):
            for name, field in fields.items():
                columns[name].append(_value(row, name, field, where=f"line {number} of {path}"))
    if not next(iter(columns.values())):
        raise InputError(key, got=f"0 rows in {', '.join(paths)}", expected="at least one row")
    return columns


def _lines(path: str, *, key: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_bytes(path, key=key, unpack=True).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            seen = f"line {number} of {path}, which is not valid JSON ({error})"
            raise InputError(key, got=seen, expected="one JSON object per line") from error
        if not isinstance(row, dict):
            raise InputError(key, got=f"line {number} of {path} is a {type(row).__name__}", expected="a JSON object")
        yield number, row


def _value(row: Mapping[str, Any], name: str, field: str, *, where: str) -> Any:
    if field not in row:
        raise InputError(
            f"data.{name}",
            got=f"'{field}', which is missing in {where}",
            expected=f"one of {', '.join(row) or 'some fields'}",
            remedy=suggestion(field, row),
        )
    value = row[field]
    if name == "label_field":
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        expected = "a class, as a whole number or a string"
    elif isinstance(value, str):
        return value
    else:
        expected = "a string"
    raise InputError(f"data.{name}", got=f"{value!r} as '{field}' in {where}", expected=expected)


def class_numbers(
    columns: Sequence[list[Any]], known: Sequence[str] | str = "auto"
) -> tuple[list[np.ndarray], int, tuple[str, ...] | None]:
    """Return the labels of each column as class numbers (int64), the number of classes, and their names.

    String labels are numbered in the order of `known`; with "auto" in sorted order over all columns.
    """
    kinds = {type(value) for column in columns for value in column}
    if len(kinds) > 1:
        raise InputError("data.label_field", got="both whole numbers and strings", expected="one kind of label")
    if kinds == {str}:
        names = sorted({value for column in columns for value in column})
        if known != "auto":
            check_names(names, known, key="data.label_field", whole=False)
            names = list(known)
        numbers = {name: number for number, name in enumerate(names)}
        found = [np.array([numbers[value] for value in column], np.int64) for column in columns]
        return found, len(names), tuple(names)
    found = [np.array(column, np.int64) for column in columns]
    for column in found:
        check_classes(column, name="label_field", key="data.label_field")
    return found, max(int(column.max()) for column in found) + 1, None
