"""Read Parquet, CSV and JSON lines as Arrow tables, choose columns and convert them to arrays. Torch-free."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import numpy as np

from raytrain.config.messages import abbreviated, suggestion
from raytrain.data.rows.contract import IGNORED_LABEL, nonfinite
from raytrain.data.sources.sections import as_paths
from raytrain.errors import InputError
from raytrain.runs.storage import file_size, locate, opened_stream, read_bytes, unreadable

TEXT = "string"
CSV_KINDS = ("int64", "bool", "double", TEXT)
"""What a column of a CSV file can hold, in the order in which it is meant."""
# pyarrow's default list without its spellings of NaN: NaN and missing values have different errors.
MISSING = ["", "#N/A", "#N/A N/A", "#NA", "<NA>", "N/A", "NA", "NULL", "n/a", "null"]

#: The source that reads the files of a name, where it is not the one that was asked for.
KINDS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".txt": "text"}
#: Maximum number of columns listed in a message.
NAMED_AT_MOST = 20
INT64_MAX = 2**63 - 1
CODES_FROM = 10**18
"""Whole numbers of so many digits are codes: as labels they are the names of classes."""


@dataclass(frozen=True)
class ColumnChoice:
    """The columns used: `stacked` become x (rows, F), `named` keep their names, `label` becomes labels."""

    stacked: tuple[str, ...]
    named: tuple[str, ...]
    label: str | None

    def reads(self) -> dict[str, list[str]]:
        return {"stacked": list(self.stacked), "named": list(self.named)}


def read_pair(keys: Mapping[str, Any], *, kind: str) -> list[Any]:
    """The files of `path`, and of `eval_path` if it is given, as a pyarrow Table each; errors as of `read_tables`."""
    label, names = keys["label"], [name for name in ("path", "eval_path") if keys[name] is not None]
    tables = [read_tables(as_paths(keys[name]), kind=kind, key=f"data.{name}", text=[label]) for name in names]
    if any(label not in table.column_names for table in tables):
        return tables
    import pyarrow as pa
    from pyarrow import compute

    has_codes = False
    for table in tables if kind == "jsonl" else ():
        if column_kind(table[label].type) == "number":
            ends = compute.call_function("min_max", [table[label].cast("double", safe=False)])
            has_codes |= any(value.is_valid and abs(value.as_py()) >= CODES_FROM for value in ends.values())
    if has_codes:
        codes = [_whole_numbers(as_paths(keys[name]), label, key=f"data.{name}") for name in names]
        if all(one is not None for one in codes):
            pairs = zip(tables, codes, strict=True)
            return [table.set_column(table.column_names.index(label), label, pa.array(one)) for table, one in pairs]
    if kind != "csv":
        return tables

    every = csv_kinds(pa.chunked_array([part for table in tables for part in table[label].chunks]), label=True)
    made = []
    for table in tables:  # a name in one of them makes all of them names; whole numbers stay apart from fractions
        kind = csv_kinds(table[label], label=True)[0] if len(every) > 1 else TEXT
        made.append(table.set_column(table.column_names.index(label), label, typed(table[label], kind)))
    return made


def read_tables(paths: Sequence[str], *, kind: str, key: str, text: Sequence[str | None] = ()) -> Any:
    """Read all files as one pyarrow Table, in the order given. `text`: columns of CSV files that stay as they are
    written; the types of the others follow from all files. Raises InputError: a file that is missing, unreadable or
    of another format, no rows, or columns that differ."""
    import pyarrow as pa

    tables = [_read_table(path, kind=kind, key=key) for path in paths]
    for path, table in zip(paths, tables, strict=True):
        check_distinct(table.column_names, key=key)
        if sorted(table.column_names) != sorted(tables[0].column_names):
            raise InputError(
                key,
                got=f"the columns {abbreviated(table.column_names, NAMED_AT_MOST)} in {path}",
                expected=f"{abbreviated(tables[0].column_names, NAMED_AT_MOST)} as in {paths[0]}",
            )
    try:
        table = pa.concat_tables(tables, promote_options="permissive")
        for number, name in enumerate(table.column_names if kind == "csv" else ()):
            if name not in text:
                table = table.set_column(number, name, typed(table[name], csv_kinds(table[name])[0]))
    except pa.ArrowException as error:
        raise InputError(key, got=f"columns of different types: {error}", expected="one type per column") from error
    if not table.num_rows:
        raise InputError(key, got=f"0 rows in {', '.join(paths)}", expected="at least one row")
    return table


def _whole_numbers(paths: Sequence[str], name: str, *, key: str) -> list[str | None] | None:
    """A column of JSON lines as the texts of its whole numbers, which Arrow has rounded beyond 64 bits: they are the
    names of classes as such codes of CSV files are. None if a number has a fraction."""
    files = [read_bytes(path, key=key, unpack=True) for path in paths]
    values = [json.loads(line).get(name) for file in files for line in file.splitlines() if line.strip()]
    if any(type(value) not in (int, NoneType) for value in values):
        return None
    return [None if value is None else str(value) for value in values]


def check_distinct(names: Sequence[str], *, key: str) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise InputError(key, got=f"two columns named '{twice}'", expected="different names")


def _read_table(path: str, *, kind: str, key: str) -> Any:
    import pyarrow as pa

    file_size(path, key=key)
    filesystem, inner = locate(path, key=key)
    try:
        if kind == "parquet":
            from pyarrow import parquet

            return parquet.read_table(inner, filesystem=filesystem)
        options = csv_as_text(filesystem, inner) if kind == "csv" else {}
        with opened_stream(filesystem, inner) as stream:
            if kind == "csv":
                from pyarrow import csv

                return csv.read_csv(stream, **options)
            from pyarrow import json

            found = json.read_json(stream)
        times = [one.name for one in found.schema if pa.types.is_timestamp(one.type)]
        if not times:
            return found
        # what looks like a time is a text, also where the other files have texts that do not
        texts = json.ParseOptions(explicit_schema=pa.schema([(name, pa.string()) for name in times]))
        with opened_stream(filesystem, inner) as stream:
            return json.read_json(stream, parse_options=texts)
    except pa.ArrowException as error:
        message = str(error).splitlines()[0]
        raise InputError(key, got=f"{path}, which cannot be read: {message}", expected=f"a {kind} file") from error
    except OSError as error:
        raise unreadable(path, error, key=key) from error


def csv_as_text(filesystem: Any, path: str) -> dict[str, Any]:
    """Options of pyarrow's readers of CSV with which every cell is the text that the file has: null where there is
    nothing, "" where there are quotes around nothing."""
    from pyarrow import csv

    parse = csv.ParseOptions(newlines_in_values=True)
    with opened_stream(filesystem, path) as stream:
        names = csv.open_csv(stream, parse_options=parse).schema.names
    return csv_texts(names)


def csv_texts(names: Iterable[str]) -> dict[str, Any]:
    """Options of pyarrow's readers of CSV with which these columns are texts, and null only without quotes."""
    import pyarrow as pa
    from pyarrow import csv

    convert = csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), null_values=[""], strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )  # fmt: skip
    return {"parse_options": csv.ParseOptions(newlines_in_values=True), "convert_options": convert}


def csv_kinds(column: Any, among: Sequence[str] = CSV_KINDS, *, label: bool = False) -> list[str]:
    """The types among these that hold every value of a column of texts; the first is meant, the last is `TEXT`.

    Labels with leading zeros are texts, so that `007` and `7` are two classes, as are ids of 19 digits; true and false
    are the names of classes. Other spellings of one number (`+7`, `7`; `1.0`, `1.00`) are that number.
    """
    import pyarrow as pa
    from pyarrow import compute

    if label:
        codes = compute.call_function(
            "match_substring_regex", [column], compute.MatchSubstringOptions(r"^\s*[+-]?(0[0-9xX]|\d{19,}\s*$)")
        )
        if compute.call_function("any", [codes]).as_py():
            return [TEXT]
        among = [kind for kind in among if kind != "bool"]
    found: list[str] = []
    for clean in (False, True):
        cells, found = (_present(column, MISSING) if clean else column), []
        for kind in among:
            with contextlib.suppress(pa.ArrowInvalid):
                cells.cast(kind)
                found.append(kind)
        if found != [TEXT]:
            break
    return found


def typed(column: Any, kind: str) -> Any:
    """A column of texts as one of `CSV_KINDS`, with null for every way to write that a value is missing; as `TEXT`
    only nothing itself is missing. Raises pyarrow.ArrowInvalid for a value of another type."""
    import pyarrow as pa

    try:
        return column.cast(kind) if kind != TEXT else _present(column, [""])
    except pa.ArrowInvalid:
        return _present(column, MISSING).cast(kind)


def _present(column: Any, missing: Sequence[str]) -> Any:
    """The texts without the spaces around them, null where only one of `missing` is left; as they are for [""]."""
    import pyarrow as pa
    from pyarrow import compute

    cells = compute.call_function("utf8_trim_whitespace", [column]) if missing == MISSING else column
    absent = compute.call_function("is_in", [cells], compute.SetLookupOptions(pa.array(missing, pa.string())))
    return compute.call_function("if_else", [absent, pa.scalar(None, pa.string()), cells])


def open_parquet(path: str, *, key: str) -> Any:
    """A Parquet file, opened. Raises InputError: it cannot be read, or is of another format."""
    import pyarrow as pa
    from pyarrow import parquet

    filesystem, inner = locate(path, key=key)
    try:
        return parquet.ParquetFile(filesystem.open_input_file(inner))
    except pa.ArrowException as error:
        kind = KINDS.get(os.path.splitext(path.lower().removesuffix(".gz"))[1])
        raise InputError(
            key, got=f"{path}: {str(error).splitlines()[0].rstrip('.')}", expected="a parquet file",
            remedy=f"data.source={kind} reads files of this name" if kind else "",
        ) from error  # fmt: skip
    except OSError as error:
        raise unreadable(path, error, key=key) from error


def parquet_sizes(paths: Sequence[str], *, key: str) -> tuple[Any, int, dict[str, float]]:
    """Return (schema, rows, bytes per row of each column) of Parquet files, from their metadata alone."""
    schema, rows, sizes = None, 0, {}
    for path in paths:
        file_size(path, key=key)
        opened = open_parquet(path, key=key)
        meta, schema = opened.metadata, schema or opened.schema_arrow
        rows += meta.num_rows
        for group in range(meta.num_row_groups):
            for number in range(meta.num_columns):
                chunk = meta.row_group(group).column(number)
                name = chunk.path_in_schema.split(".")[0]
                sizes[name] = sizes.get(name, 0) + chunk.total_uncompressed_size
    if not rows:
        raise InputError(key, got=f"0 rows in {', '.join(paths)}", expected="at least one row")
    return schema, rows, {name: size / rows for name, size in sizes.items()}


def choose_columns(
    schema: Any, *, features: Sequence[str] | None, label: str | None, key: str, table: Any = None
) -> ColumnChoice:
    """Choose the columns of `schema` to use.

    List columns keep their names. Numeric columns are stacked into x, unless neither features nor a label is given:
    then all keep their names, and a column `labels` of strings is the label. `table`: the rows, if they were read: a
    message names the value that makes a column text. Raises InputError: a column that does not exist, or one that is
    not numeric."""
    names = list(schema.names)
    check_distinct(names, key=key)
    for wanted, origin in [*((name, "data.features") for name in features or ()), (label, "data.label")]:
        if wanted is not None and wanted not in names:
            raise InputError(
                origin,
                got=f"'{wanted}', which is not in {key}",
                expected=f"columns among {abbreviated(names, NAMED_AT_MOST)}",
                remedy=suggestion(wanted, names),
            )
    if label is not None and label in (features or ()):
        others = [name for name in features or () if name != label]
        typed = f"write data.features=[{', '.join(others)}]" if others else "without data.features, all others are used"
        raise InputError(
            "data.features",
            got=f"'{label}', which data.label names as the column to predict",
            expected="columns other than the label",
            remedy=typed,
        )
    own = features is None and label is None
    if own and "labels" in names and is_text(schema.field("labels").type):
        label = "labels"
    used = [name for name in (names if features is None else features) if name != label]
    kinds = {name: column_kind(schema.field(name).type) for name in used}
    for name, kind in kinds.items():
        if kind == "other":
            found = None if table is None else first_text(table[name])
            raise InputError(
                "data.features",
                got=f"column '{name}' of type {schema.field(name).type}" + ("" if found is None else f", with {found}"),
                expected="numbers or lists of numbers",
                remedy=("rows are numbered from 0; correct that value, or " if found else "")
                + ("" if label else f"data.label={name} if it is the column to predict; else ")
                + "list the columns to use in data.features",
            )  # fmt: skip
    if not used:
        raise InputError("data.features", got="no column", expected=f"some of {abbreviated(names, NAMED_AT_MOST)}")
    stacked = tuple(name for name in used if kinds[name] == "number" and not own)
    return ColumnChoice(stacked, tuple(name for name in used if name not in stacked), label)


def column_kind(kind: Any) -> str:
    """Classify a pyarrow type: "number", "list" (of numbers, or of such lists) or "other"."""
    from pyarrow import types

    if types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind):
        return "number"
    return "list" if is_list(kind) and column_kind(kind.value_type) != "other" else "other"


def is_list(kind: Any) -> bool:
    """Whether a pyarrow type holds lists, of any or of one length."""
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def is_nested(kind: Any) -> bool:
    return is_list(kind) and is_list(kind.value_type)


def number_in(text: Any) -> float | None:
    """The number that a text is; None if it is none, or missing."""
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


def first_text(column: Any) -> str | None:
    """The first value that is no number in a column of strings most of which are: "'x' in row 3". None elsewhere."""
    if not is_text(column.type):
        return None
    values = column.to_pylist()
    wrong = [row for row, value in enumerate(values) if value not in (None, *MISSING) and number_in(value) is None]
    return f"'{values[wrong[0]]}' in row {wrong[0]}" if 0 < len(wrong) < len(values) / 2 else None


def no_label(name: str, kind: Any) -> InputError:
    expected = "whole numbers or strings for classes, fractions for regression"
    return InputError("data.label", got=f"column '{name}' of type {kind}", expected=expected)


def is_text(kind: Any) -> bool:
    """Whether a pyarrow type holds strings, plain or dictionary-encoded."""
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(value) or types.is_large_string(value) or types.is_string_view(value)


def class_names(tables: Sequence[Any], label: str | None) -> tuple[str, ...] | None:
    """Return the sorted class names of a string label over all tables; None for any other label."""
    if label is None or not all(label in table.column_names and is_text(table[label].type) for table in tables):
        return None
    return tuple(sorted({name for table in tables for name in table[label].unique().to_pylist() if name is not None}))


def is_fraction(kind: Any) -> bool:
    """Whether a pyarrow type holds numbers with a fraction: as a label, values to predict and no classes."""
    from pyarrow import types

    return types.is_floating(kind) or types.is_decimal(kind)


def count_classes(tables: Sequence[Any], label: str | None) -> int | None:
    """Return the number of classes over all tables, as training counts them: the names of a string label, else the
    largest whole number plus one; None without a label or for values with a fraction. Checks nothing."""
    columns = [table[label] for table in tables if label is not None and label in table.column_names]
    if names := class_names(tables, label):
        return len(names)
    if label is None or any(column_kind(one.type) != "number" or is_fraction(one.type) for one in columns):
        return None
    from pyarrow import compute

    highest = [compute.call_function("max", [column.cast("int64")]).as_py() for column in columns]
    top = max((value for value in highest if value is not None), default=-1)
    return top + 1 if top >= 0 else None


@dataclass(frozen=True)
class TableColumns:
    """Columns as arrays: `dense` (rows, ...), `ragged` as (values, offsets)."""

    dense: dict[str, np.ndarray] = field(default_factory=dict)
    ragged: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)


def convert(table: Any, choice: ColumnChoice, *, classes: tuple[str, ...] | None, key: str) -> TableColumns:
    """Convert the chosen columns to arrays: x float32, labels int64 (classes) or float32, lists unchanged. Raises
    InputError: a missing value, NaN or infinity; the message names column and row."""
    from pyarrow import compute, types

    columns = TableColumns()
    for name in (*choice.stacked, *choice.named):
        if column_kind(table.schema.field(name).type) == "other":
            seen = f"column '{name}' of type {table.schema.field(name).type}"
            raise InputError(key, got=seen, expected="numbers or lists of numbers")
    if choice.stacked:
        parts = [_numbers(table[name], name, key=key).astype(np.float32) for name in choice.stacked]
        columns.dense["x"] = np.stack(parts, axis=1)
    for name in choice.named:
        kind = table.schema.field(name).type
        if column_kind(kind) == "number":
            columns.dense[name] = _numbers(table[name], name, key=key)
        elif is_nested(kind):
            columns.dense[name] = _nested(table[name], name, key=key)
        else:
            check_present(table[name], name, key=key)
            flat = compute.call_function("list_flatten", [table[name]])  # by name: pyarrow makes them at import
            lengths = compute.call_function("list_value_length", [table[name]]).to_numpy()
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            values = _numbers(flat, name, key=key, offsets=offsets)
            if types.is_fixed_size_list(kind):
                columns.dense[name] = values.reshape(table.num_rows, -1)
            else:
                columns.ragged[name] = (values, offsets)
    if choice.label is not None:
        labels = table[choice.label]
        check_present(labels, choice.label, key=key)
        if classes is not None:
            numbers = {text: number for number, text in enumerate(classes)}
            columns.dense["labels"] = np.array([numbers[text] for text in labels.to_pylist()], dtype=np.int64)
            return columns
        if column_kind(labels.type) != "number":
            raise no_label(choice.label, labels.type)
        columns.dense["labels"] = _numbers(labels, choice.label, key=key)
        if not is_fraction(labels.type):
            check_classes(columns.dense["labels"], name=choice.label, key="data.label")
    return columns


def _numbers(column: Any, name: str, *, key: str, offsets: np.ndarray | None = None) -> np.ndarray:
    """A column of numbers as int64 or float32; all must be present and finite. `offsets`: where its rows begin, if a
    row has several."""
    import pyarrow as pa

    check_present(column, name, key=key, offsets=offsets)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    values = column.to_numpy()
    if values.dtype == np.uint64 and len(values) and values.max() > INT64_MAX:
        raise InputError(
            key, got=f"{values.max()} in column '{name}'", expected=f"whole numbers of at most {INT64_MAX}",
            remedy="write larger ones as fractions, such as parts of 2**64, or as several columns",
        )  # fmt: skip
    with np.errstate(over="ignore"):  # values out of float32 range become infinite and are rejected by column name
        values = values.astype(np.int64 if values.dtype.kind in "biu" else np.float32)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        at = int(np.argmax(~np.isfinite(values)))
        raise nonfinite(key, value=float(values[at]), column=name, row=_row_of(at, offsets))
    return values


def _row_of(at: int, offsets: np.ndarray | None) -> int:
    return at if offsets is None else int(np.searchsorted(offsets, at, side="right")) - 1


def check_present(column: Any, name: str, *, key: str, offsets: np.ndarray | None = None) -> None:
    """Raise InputError if a value is missing; the message names its row."""
    if column.null_count:
        row = _row_of(int(np.argmax(column.is_null().to_numpy())), offsets)
        raise InputError(
            key,
            got=f"a missing value in column '{name}' row {row}",
            expected="a value in every row",
            remedy="rows are numbered from 0; fill in these values or remove the rows",
        )


def _nested(column: Any, name: str, *, key: str) -> np.ndarray:
    """Lists of lists of equal lengths as one array."""
    from pyarrow import compute

    rows, shape, flat = len(column), list[int](), column
    while is_list(flat.type) and len(flat):
        each = math.prod(shape)
        check_present(flat, name, key=key, offsets=np.arange(rows + 1) * each)
        lengths = compute.call_function("list_value_length", [flat]).to_numpy()
        if (lengths != lengths[0]).any():
            row = int(np.argmax(lengths != lengths[0])) // each
            seen = f"lists of other lengths in column '{name}' row {row} than in row 0"
            raise InputError(key, got=seen, expected="nested lists of the same shape in every row")
        shape.append(int(lengths[0]))
        flat = compute.call_function("list_flatten", [flat])
    if not len(flat):
        raise InputError(key, got=f"empty lists in column '{name}'", expected="values in every row")
    values = _numbers(flat, name, key=key, offsets=np.arange(rows + 1) * math.prod(shape))
    return values.reshape(rows, *shape)


def check_classes(labels: np.ndarray, *, name: str, key: str) -> None:
    """Raise InputError for a negative class number other than -100 (no label)."""
    wrong = (labels < 0) & (labels != IGNORED_LABEL)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InputError(
            key,
            got=f"the class {labels[row]} in column '{name}' row {row}",
            expected=f"class numbers of at least 0, or {IGNORED_LABEL} for rows without a label",
        )
