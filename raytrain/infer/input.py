"""The input of batch inference: its files in order, ranges of rows, unique ids, and units of work.

The driver plans units from it; workers read the rows of a unit; ids are checked before anything is computed.
Torch-free.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import accumulate
from typing import Any

import numpy as np

from raytrain.config.messages import suggestion
from raytrain.data.sources.tables import open_parquet
from raytrain.errors import InputError, first_line
from raytrain.runs.storage import file_size, join, locate, matching, open_store, read_bytes, split, unreadable

# ---------------------------------------------------------------- files


KEY = "infer.input"
FORMATS = {
    ".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "text",
}  # fmt: skip
EXPECTED = (
    f"files that end in {', '.join(FORMATS)}, also .gz, a folder of files of one of these kinds, or IDX images "
    "(images-idx3-ubyte, also .gz)"
)
IDX = re.compile(r"idx\d[-.]ubyte(\.gz)?$|\.idx(\d-ubyte)?(\.gz)?$")
#: Kinds whose rows name their columns, so that a row may lack some.
NAMED_BY_ROW = ("jsonl", "json")


@dataclass(frozen=True)
class InputFiles:
    paths: tuple[str, ...]
    kind: str


def input_files(given: str | Sequence[str]) -> InputFiles:
    """The files that `infer.input` names: files, folders and patterns (sorted by name), local paths or URIs. Raises
    InputError: nothing is there, or files of no known kind or of several kinds."""
    named = [given] if isinstance(given, str) else list(given)
    paths = [file for one in named for path in matching(one, key=KEY) for file in _files_at(path)]
    kinds = {path: _kind(path) for path in paths}
    first = kinds[paths[0]]
    for path, kind in kinds.items():
        if kind != first:
            raise InputError(KEY, got=f"{path} beside {paths[0]}", expected="files of one kind")
        file_size(path, key=KEY)
    return InputFiles(tuple(paths), first)


def _files_at(path: str) -> list[str]:
    store = open_store(path)
    names = sorted(entry.name for entry in store.entries("") if not entry.name.startswith((".", "_")))
    if not names:
        return [path]
    files = [name for name in names if _suffix(name) in FORMATS]
    if not files:
        raise InputError(KEY, got=f"the folder {path} with {names[0]}", expected=EXPECTED)
    return [join(path, name) for name in files]


def _suffix(path: str) -> str:
    return os.path.splitext(split(path)[1].lower().removesuffix(".gz"))[1]


def _kind(path: str) -> str:
    kind = FORMATS.get(_suffix(path)) or ("idx" if IDX.search(split(path)[1].lower()) else None)
    if kind is None:
        raise InputError(KEY, got=path, expected=EXPECTED)
    return kind


def fingerprint(path: str) -> str:
    """A hash that tells two versions of a file apart by size, first and last bytes, without reading all of it."""
    head = read_bytes(path, key=KEY, limit=1 << 16)
    size = file_size(path, key=KEY)
    filesystem, inner = locate(path, key=KEY)
    with filesystem.open_input_file(inner) as file:
        file.seek(max(0, size - (1 << 16)))
        tail = file.read(1 << 16)
    return hashlib.sha256(b"%d " % size + head + tail).hexdigest()[:16]


# ---------------------------------------------------------------- rows


AS_JSON = "raytrain:json:"


def as_json(name: str) -> str:
    """The column that holds a column's values as JSON texts."""
    return f"{AS_JSON}{name}"


def own_names(schema: Any) -> list[str]:
    return [name for name in schema.names if not name.startswith(AS_JSON)]


def json_value(value: Any) -> Any:
    """A whole number beyond 64 bits as it was; another value that JSON lacks as a text."""
    return int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else str(value)


@dataclass
class InputRows:
    """Rows of Parquet files, read by range."""

    paths: tuple[str, ...]  # the files, in order
    groups: tuple[tuple[int, ...], ...]  # rows of each row group of each file
    schema: Any  # Arrow schema of the rows; a file that lacks a column of it has nulls there
    limit: int | None = None  # rows after this one are left out; None for all
    _held: tuple[tuple[int, int], Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def at(
        cls, paths: Sequence[str], *, origins: Sequence[str] = (), limit: int | None = None, join: bool = False,
        used: Collection[str] | None = None,
    ) -> InputRows:  # fmt: skip
        """Read the files' metadata. Raises InputError: a file that is no Parquet, columns that differ, or a column of
        types that do not go together.

        Args:
            origins: what they were converted from, for messages.
            join: whether a file may lack columns of another one.
            used: see `joined`.
        """
        groups, schema, origins = [], None, origins or paths
        for path, origin in zip(paths, origins, strict=True):
            file = open_parquet(path, key=KEY)
            meta, own = file.metadata, without_views(file.schema_arrow.remove_metadata())
            if schema is not None and own.names != schema.names and not join:
                seen = f"the columns {', '.join(own.names)} in {origin}"
                raise InputError(KEY, got=seen, expected=f"{', '.join(schema.names)}, as in {origins[0]}")
            schema = own if schema is None else joined([schema, own], origin, used)
            groups.append(tuple(meta.row_group(number).num_rows for number in range(meta.num_row_groups)))
        return cls(tuple(paths), tuple(groups), schema, limit)

    @property
    def rows(self) -> int:
        total = sum(map(sum, self.groups))
        return total if self.limit is None else min(total, self.limit)

    def read(self, start: int, rows: int, columns: Sequence[str] | None = None) -> Any:
        """Rows `start` to `start + rows` as an Arrow table. A row group that is read in parts is decoded once, if the
        parts are read in order."""
        import pyarrow as pa

        pieces = [(file, group) for file, groups in enumerate(self.groups) for group in range(len(groups))]
        ends = list(accumulate(count for groups in self.groups for count in groups))
        parts, at = [], bisect_right(ends, start)
        while rows > 0 and at < len(pieces):
            begin = ends[at] - self.groups[pieces[at][0]][pieces[at][1]]
            part = self._group(*pieces[at]).slice(start - begin, rows)
            parts.append(part if columns is None else part.select(list(columns)))
            start, rows, at = start + part.num_rows, rows - part.num_rows, at + 1
        return pa.concat_tables(parts).combine_chunks()

    def column(self, name: str, *, at_once: int = 1 << 16) -> Iterator[Any]:
        """The values of one column as Arrow arrays of at most `at_once` rows, in input order; no other column is
        read. Raises InputError: a file cannot be read."""
        import pyarrow as pa

        left, kind = self.rows, self.schema.field(name).type
        for path in self.paths:
            file = open_parquet(path, key=KEY)
            if name not in file.schema_arrow.names:
                nulls = min(file.metadata.num_rows, left)
                left -= nulls
                yield pa.nulls(nulls, kind)
                continue
            try:
                for batch in file.iter_batches(at_once, columns=[name]):
                    if not left:
                        return
                    part = batch.column(0)[:left]
                    left -= len(part)
                    yield part.cast(kind)
            except OSError as error:
                raise unreadable(path, error, key=KEY) from error

    def _group(self, file: int, group: int) -> Any:
        if self._held is None or self._held[0] != (file, group):
            path = self.paths[file]
            try:
                table = open_parquet(path, key=KEY).read_row_group(group)
            except OSError as error:
                raise unreadable(path, error, key=KEY) from error
            self._held = ((file, group), fitted(table, self.schema))
        return self._held[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}


def joined(schemas: Sequence[Any], path: str, used: Collection[str] | None = None) -> Any:
    """The schema with the columns of all of these. `used`: the columns whose types matter; another one whose types
    do not go together holds texts. None: all. Raises InputError: types of a used column that do not go together."""
    import pyarrow as pa

    if all(schema.equals(schemas[0]) for schema in schemas):
        return schemas[0]
    found = []
    for name in dict.fromkeys(name for schema in schemas for name in schema.names):
        own = [schema.field(name) for schema in schemas if name in schema.names]
        try:
            one = pa.unify_schemas([pa.schema([field]) for field in own], promote_options="permissive").field(0)
            if pa.types.is_floating(one.type) and any(pa.types.is_decimal(field.type) for field in own):
                raise pa.ArrowInvalid(f"the column {name} with whole numbers beyond 64 bits and with fractions")
        except pa.ArrowException as error:  # what is raised here would lose digits
            if used is None or name in used:
                raise InputError(
                    KEY, got=f"{path}: {first_line(error)}", expected="one type a column",
                    remedy="write one type, or leave the column out",
                ) from error  # fmt: skip
            one = pa.field(name, pa.string())
        found.append(one)
    return pa.schema(found)


def _mapped(kind: Any, change: Callable[[Any], Any]) -> Any:
    """A type in which `change` was applied to each type that holds no others."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_list(kind):
        return pa.list_(_mapped(kind.value_type, change))
    if types.is_large_list(kind):
        return pa.large_list(_mapped(kind.value_type, change))
    if types.is_fixed_size_list(kind):
        return pa.list_(_mapped(kind.value_type, change), kind.list_size)
    if types.is_struct(kind):
        return pa.struct([one.with_type(_mapped(one.type, change)) for one in kind])
    if types.is_map(kind):
        return pa.map_(_mapped(kind.key_type, change), _mapped(kind.item_type, change))
    return change(kind)


def without_views(schema: Any) -> Any:
    """The schema with plain texts and bytes instead of views of them, of which Arrow takes no rows."""
    import pyarrow as pa

    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    return pa.schema([one.with_type(_mapped(one.type, lambda kind: plain.get(kind, kind))) for one in schema])


def shortest(table: Any) -> Any:
    """The table with float32 as the float64 of the shortest text that gives the float32 back: 0.1 and not
    0.10000000149011612."""
    import pyarrow as pa

    columns = []
    for column in table.columns:
        texts, numbers = (
            _mapped(column.type, lambda kind, to=to: to if kind == pa.float32() else kind)
            for to in (pa.string(), pa.float64())
        )
        columns.append(column if texts == column.type else column.cast(texts).cast(numbers))
    return pa.table(columns, names=table.column_names)


def holds_bytes(kind: Any) -> bool:
    """Whether values of an Arrow type are bytes, or hold some."""
    from pyarrow import types

    found = list[bool]()

    def look(one: Any) -> Any:
        one = one.value_type if types.is_dictionary(one) else one
        plain = types.is_binary(one) or types.is_large_binary(one)
        found.append(plain or types.is_fixed_size_binary(one) or types.is_binary_view(one))
        return one

    _mapped(kind, look)
    return any(found)


def fitted(table: Any, schema: Any) -> Any:
    """A table with the columns and types of a schema, nulls where it lacks a column, or has values that are no texts
    in a column of texts (see `joined`). Raises InputError: a value that the type of its column does not hold."""
    import pyarrow as pa

    if table.schema.equals(schema):
        return table
    columns = []
    for one in schema:
        own = pa.nulls(table.num_rows, one.type)
        try:
            own = table[one.name].cast(one.type) if one.name in table.column_names else own
        except pa.ArrowException as error:
            if not pa.types.is_string(one.type):
                seen = f"the column {one.name} as {one.type} in all files together: {first_line(error)}"
                raise InputError(
                    KEY, got=seen, expected="one type a column", remedy="write one type, or leave the column out"
                ) from error
        columns.append(own)
    return pa.table(columns, schema=schema)


def check_cells(schema: Any, carried: Mapping[str, Sequence[str | None]], form: str) -> None:
    """Raise InputError for the first carried column whose values a file of the format `form` does not hold: CSV single
    values, and JSON lines anything but bytes; `carried` maps a key to the columns it names."""
    from pyarrow import types

    for key, name in ((key, name) for key, names in carried.items() for name in names if name is not None):
        kind = schema.field(name).type
        seen = f"{name}, whose values are of type {kind}, with infer.format {form}"
        if form != "parquet" and holds_bytes(kind):
            raise InputError(key, got=seen, expected="numbers or texts", remedy="infer.format: parquet holds bytes")
        if form == "csv" and types.is_nested(kind):
            raise InputError(
                key, got=seen, expected="columns of single values", remedy="infer.format: jsonl or parquet"
            )


def check_columns(schema: Any, wanted: dict[str, str | None]) -> None:
    """Raise InputError for the first column that the input lacks; `wanted` maps a key to the column it names."""
    names = own_names(schema)
    for key, name in wanted.items():
        if name is not None and name not in names:
            raise InputError(
                key, got=f"'{name}', which is not in {KEY}", expected=f"one of its columns {', '.join(names)}",
                remedy=suggestion(name, names),
            )  # fmt: skip


# ---------------------------------------------------------------- ids


def duplicate_id(rows: InputRows, column: str) -> tuple[Any, Sequence[int]] | None:
    """A value of a column that occurs twice or is missing, and the rows where; None if all values are unique.

    Only hashes of the values are kept, 8 bytes a row; the column is read again where two of them are equal. Raises
    InputError: its values cannot be ids, such as lists."""
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


# ---------------------------------------------------------------- units


#: Rows of a batch where `infer.batch_size` is auto, for answers of many tokens and for one output a row. A GPU is busy
#: with many rows only; a batch that memory does not hold is halved, and so are those after it.
GENERATED_ROWS, PLAIN_ROWS = 16, 256
GENERATED_ROWS_ON_GPU, PLAIN_ROWS_ON_GPU = 256, 4096

#: `infer.unit_rows: auto` aims at this many units, so that a lost one is a small part of the work.
UNITS = 64
#: Fewest rows of a unit: writing its file takes about as long as some hundred outputs of a small model, and less than
#: one generated answer.
LEAST_GENERATED, LEAST_PLAIN, MOST_ROWS = 16, 512, 4096


@dataclass(frozen=True)
class Unit:
    """The rows `start` to `start + rows` of the input: computed by one worker, written as one file."""

    number: int
    start: int
    rows: int


@dataclass(frozen=True)
class UnitReport:
    """What a worker says about a unit that it has written."""

    number: int
    rows: int
    failed: int
    tokens: int
    seconds: float  # to read, compute and write it; in the unit's file without the time to write that
    worker: str
    load_s: float  # seconds that the worker took to load the model
    out_of_memory: int
    # begin, end: unix seconds
    begin: float
    end: float
    stages: str = ""  # `StageTimes` of the unit as JSON; "" for a model that is not divided
    quantized: str = ""  # `Quantization` of the worker's model as JSON; "" without int8 weights
    # why the unit was given up and no file written: more rows failed than the job allows. None otherwise.
    error: str | None = None


def usual_rows(*, generates: bool, on_gpu: bool = False) -> int:
    if on_gpu:
        return GENERATED_ROWS_ON_GPU if generates else PLAIN_ROWS_ON_GPU
    return GENERATED_ROWS if generates else PLAIN_ROWS


def unit_size(rows: int, *, generates: bool) -> int:
    """Rows of a unit by the input and the kind of model alone: the same units for any number of workers."""
    return min(max(-(-rows // UNITS), LEAST_GENERATED if generates else LEAST_PLAIN), MOST_ROWS)


def units_of(rows: int, size: int) -> list[Unit]:
    """All units of `rows` rows; only the last one may be smaller than `size`."""
    return [Unit(number, start, min(size, rows - start)) for number, start in enumerate(range(0, rows, size))]


def batches_of(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The rows of a unit in batches of about equal lengths, at most `size` rows each.

    A product with one row may use another kernel than one with several. A row that would remain alone therefore
    takes the last row of the batch before it along; only a unit of one row is a batch of one. `lengths`: of each
    row; longer rows come first, so that a batch that is too large fails early."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    if size > 2 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-1].insert(0, batches[-2].pop())
    return batches
