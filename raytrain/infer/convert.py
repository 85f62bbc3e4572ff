"""Input of other formats as Parquet, in a streamed pass, so that any range of rows can be read without the ones before
it. Torch-free.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, partial
from typing import Any

import numpy as np

from raytrain.data.sources.idx import IMAGES, read_idx
from raytrain.data.sources.tables import CSV_KINDS, TEXT, check_distinct, csv_as_text, csv_kinds, typed
from raytrain.errors import InputError, first_line
from raytrain.infer.input import KEY, InputFiles, as_json, fingerprint, fitted, joined
from raytrain.runs.storage import ANSWERS, join, locate, open_store, opened_stream, unreadable, whole_file

TEXT_COLUMN = "text"
BLOCK_BYTES = 8 << 20
LINES_AT_ONCE = 10_000
NO_KEYS = "objects without any key"


class _OtherColumnsError(Exception):
    """A later part of a file has columns, or types of them, that those before it have not."""


def converted(
    files: InputFiles, folder: str, *, carried: Collection[str | None] = (), label: str | None = None,
    numbers: bool = True, exact: Collection[str] = (), used: Collection[str] | None = None,
    rows_at_once: int = LINES_AT_ONCE,
) -> list[str]:  # fmt: skip
    """Write files of another format as Parquet in `folder`, one for each; returns the paths. Parquet is left alone.

    A file that was converted before is not converted again: its name holds the fingerprint of the original. Raises
    InputError: a file that cannot be read, or has no rows. RunError: the folder cannot be written.

    Args:
        carried, label, numbers: of CSV files, see `CsvTypes`.
        exact: columns of JSON files whose values are also kept as JSON texts, in columns named by `as_json`, unless
            they are texts: Arrow gives each object the keys of all, and makes whole numbers among fractions fractions.
        used: columns of JSON files that must have one type, see `joined`; None: all but those that hold objects, of
            which no number can be taken.
    """
    if files.kind == "parquet":
        return list(files.paths)
    import pyarrow as pa

    store, written, types = open_store(folder), [], CsvTypes(files.paths, carried, label, numbers)
    for number, path in enumerate(files.paths):
        name = f"input-{number:05d}-{fingerprint(path)}.parquet"
        if not store.exists(name):
            target = join(folder, name)
            try:
                if files.kind == "csv":
                    write_tables(types.tables(path), target, origin=path, rows_at_once=rows_at_once)
                elif files.kind == "idx":
                    write_tables(_idx_tables(path, rows_at_once), target, origin=path, rows_at_once=rows_at_once)
                else:
                    read = partial(_json_or_text, path, files.kind, exact, used, rows_at_once)
                    write_joined(read, target, origin=path, used=used, rows_at_once=rows_at_once)
            except pa.ArrowException as error:
                raise InputError(KEY, got=f"{path}: {first_line(error)}", expected=f"a {files.kind} file") from error
        written.append(join(folder, name))
    return written


def write_tables(
    tables: Iterable[Any], target: str, *, origin: str, schema: Any = None, used: Collection[str] | None = None,
    rows_at_once: int = LINES_AT_ONCE,
) -> None:  # fmt: skip
    """Write tables as one Parquet file, with the schema of the first one if none is given. `origin`: where the rows
    come from, for messages. Raises InputError: there are no rows. _OtherColumnsError: a table does not fit the
    schema."""
    from pyarrow import parquet

    writer, rows = None, 0
    with whole_file(target, ANSWERS) as sink, contextlib.ExitStack() as stack:
        for table in tables:
            if writer is None:
                schema = schema or table.schema.remove_metadata()
                writer = stack.enter_context(parquet.ParquetWriter(sink, schema))
            if not joined([schema, table.schema.remove_metadata()], origin, used).equals(schema):
                raise _OtherColumnsError
            writer.write_table(fitted(table, schema), row_group_size=rows_at_once)
            rows += table.num_rows
        if writer is None or not rows:
            raise InputError(KEY, got=f"no rows in {origin}", expected="at least one row")


def write_joined(
    tables: Callable[[], Iterable[Any]], target: str, *, origin: str, used: Collection[str] | None = None,
    rows_at_once: int = LINES_AT_ONCE,
) -> None:  # fmt: skip
    """Write tables as one Parquet file with the columns of all of them, nulls where one lacks a column. `tables` gives
    them, in order; it is called again, twice, where later ones have other columns than the first: once for all columns,
    once to write. Raises InputError: there are no rows, or the types of a column do not go together."""
    try:
        write_tables(tables(), target, origin=origin, used=used, rows_at_once=rows_at_once)
    except _OtherColumnsError:
        schema = None
        for table in tables():
            own = table.schema.remove_metadata()
            schema = own if schema is None else joined([schema, own], origin, used)
        write_tables(tables(), target, origin=origin, schema=schema, used=used, rows_at_once=rows_at_once)


def _stream(path: str) -> Any:
    filesystem, inner = locate(path, key=KEY)
    try:
        return opened_stream(filesystem, inner)
    except OSError as error:
        raise unreadable(path, error, key=KEY) from error


# ---------------------------------------------------------------- CSV


@dataclass
class CsvTypes:
    """The types of the columns of CSV files, which follow from all files, so that their order is of no matter. Columns
    that are `carried` stay as they are written, with null for an empty cell without quotes; `label` is read as the
    labels of training; others may hold numbers, unless a model of texts reads them (`numbers`)."""

    files: Sequence[str]
    carried: Collection[str | None] = ()
    label: str | None = None
    numbers: bool = True

    def tables(self, path: str) -> Iterator[Any]:
        """The rows of a file, in order; columns in that of the first file, as training takes them by their names."""
        for table in _csv_tables(path):
            if set(table.column_names) == set(self._names) and len(table.column_names) == len(self._names):
                table = table.select(self._names)
            for number, name in enumerate(table.column_names):
                if name not in self.carried:
                    kind = self._kinds[name][0] if self.numbers else TEXT
                    column = typed(table[name], kind)
                    column = column.fill_null("") if kind == TEXT and name != self.label else column
                    table = table.set_column(number, name, column)
            yield table

    @cached_property
    def _names(self) -> list[str]:
        return next((table.column_names for table in _csv_tables(self.files[0])), [])

    @cached_property
    def _kinds(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for table in (table for path in self.files for table in _csv_tables(path)):
            for name in table.column_names:
                found[name] = csv_kinds(table[name], found.get(name, CSV_KINDS), label=name == self.label)
        return found


def _csv_tables(path: str) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import csv

    filesystem, inner = locate(path, key=KEY)
    read = csv.ReadOptions(block_size=BLOCK_BYTES)
    with _stream(path) as stream:
        reader = csv.open_csv(stream, read_options=read, **csv_as_text(filesystem, inner))
        check_distinct(reader.schema.names, key=KEY)
        yield from (pa.Table.from_batches([batch]) for batch in reader if batch.num_rows)


# ---------------------------------------------------------------- JSON and text


def _json_or_text(
    path: str, kind: str, exact: Collection[str], used: Collection[str] | None, rows_at_once: int
) -> Iterator[Any]:
    """Tables of the rows of one file, in order."""
    try:
        with _stream(path) as stream:
            if kind == "json":
                try:
                    rows = json.loads(stream.read())
                except (json.JSONDecodeError, UnicodeDecodeError) as error:
                    raise InputError(KEY, got=f"{path}: {error}", expected="a JSON array of objects") from error
                if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                    seen = f"{path}, which is no array of objects"
                    raise InputError(KEY, got=seen, expected="a JSON array of objects")
                yield _table(rows, path, exact, used)
                return
            lines: list[dict[str, Any]] = []
            for number, raw in enumerate(io.BufferedReader(stream), start=1):
                where = f"{path} line {number}"
                try:
                    line = raw.rstrip(b"\r\n").decode("utf-8-sig" if number == 1 else "utf-8")
                    row = json.loads(line) if kind == "jsonl" and line.strip() else None
                except UnicodeDecodeError as error:
                    raise InputError(KEY, got=f"{where}, which is not UTF-8", expected="UTF-8 text") from error
                except json.JSONDecodeError as error:
                    raise InputError(KEY, got=f"{where}: {error}", expected="a JSON object on each line") from error
                if kind == "jsonl" and line.strip():
                    if not isinstance(row, dict):
                        raise InputError(KEY, got=f"{where}: a {type(row).__name__}", expected="a JSON object")
                    lines.append(row)
                elif kind == "text" and line.strip():
                    lines.append({TEXT_COLUMN: line})
                if len(lines) == rows_at_once:
                    yield _table(lines, path, exact, used)
                    lines = []
            if lines:
                yield _table(lines, path, exact, used)
    except OSError as error:
        raise unreadable(path, error, key=KEY) from error


def _idx_tables(path: str, rows_at_once: int) -> Iterator[Any]:
    """The images of an IDX file as training reads them: values from 0 to 1 in the column `x`, a list for each image."""
    import pyarrow as pa

    images = read_idx(path, key=KEY, **IMAGES)
    images = images.reshape(len(images), -1)
    for start in range(0, len(images), rows_at_once):
        values = images[start : start + rows_at_once].astype(np.float32) / np.float32(255.0)
        yield pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), images.shape[1])})


def _table(rows: list[dict[str, Any]], path: str, exact: Collection[str], used: Collection[str] | None) -> Any:
    """The rows with the columns of all of them; a row that lacks one has null there. A column that is not used holds
    its JSON texts where Arrow has no type for it."""
    import pyarrow as pa

    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        must = not any(isinstance(value, dict) for value in values) if used is None else name in used
        try:
            if name in exact:
                columns[as_json(name)] = _json_texts(values)
            columns[name] = _column(values)
        except (UnicodeEncodeError, pa.ArrowException, OverflowError) as error:
            if must or (name in exact and isinstance(error, UnicodeEncodeError)):
                raise _no_column(path, name, error) from error
            columns[name] = _json_texts(values, ascii_only=True)
        if name in exact and all(isinstance(value, str | None) for value in values):
            del columns[as_json(name)]  # it is what the column itself holds
    return pa.table(columns)


def _no_column(path: str, name: str, error: Exception) -> InputError:
    if isinstance(error, UnicodeEncodeError):
        seen = f"{path}: the column {name} with half of a surrogate pair ({error.object[error.start]!r})"
        return InputError(KEY, got=seen, expected="Unicode text")
    if str(error) == NO_KEYS:
        seen = f"{path}: the column {name} with {NO_KEYS}"
        return InputError(
            KEY, got=seen, expected="objects with keys", remedy="infer.format: jsonl keeps them as they are"
        )
    return InputError(
        KEY, got=f"{path}: the column {name} with values of several types ({first_line(error)})",
        expected="one type a column", remedy="write one type, or leave the column out",
    )  # fmt: skip


def _json_texts(values: list[Any], *, ascii_only: bool = False) -> Any:
    """Raises UnicodeEncodeError for half of a surrogate pair, unless it is written as ASCII."""
    import pyarrow as pa

    texts = [None if value is None else json.dumps(value, ensure_ascii=ascii_only) for value in values]
    return pa.array(texts, pa.string())


def _column(values: list[Any]) -> Any:
    """Arrow holds whole numbers beyond 64 bits as decimals. Raises ArrowInvalid for objects without any key, which
    Parquet does not hold."""
    import pyarrow as pa

    try:
        found = pa.array(values)
    except OverflowError:
        found = pa.array(_decimals(values))
    if "struct<>" in str(found.type):
        raise pa.ArrowInvalid(NO_KEYS)
    return found


def _decimals(value: Any) -> Any:
    """Whole numbers as decimals, also inside of lists and objects."""
    if isinstance(value, dict):
        return {name: _decimals(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_decimals(one) for one in value]
    return Decimal(value) if type(value) is int else value
