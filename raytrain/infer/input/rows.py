"""The input of batch inference: rows of Parquet files in input order, read a range at a time. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from raytrain.config.messages import suggestion
from raytrain.errors import InputError, first_line
from raytrain.infer.input.files import KEY
from raytrain.runs.storage import locate, unreadable


@dataclass
class InputRows:
    """Rows of Parquet files, read by range.

    Attributes:
        paths: the files, in order.
        groups: rows of each row group of each file.
        schema: Arrow schema of the rows; a file that lacks a column of it has nulls there.
        limit: rows after this one are left out; None for all.
    """

    paths: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    schema: Any
    limit: int | None = None
    _held: tuple[tuple[int, int], Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def at(cls, paths: Sequence[str], *, limit: int | None = None, join: bool = False) -> InputRows:
        """Read the files' metadata.

        Args:
            join: whether a file may lack columns of another one.
        Raises:
            InputError: a file that is no Parquet, columns that differ, or a column of types that do not go together.
        """
        groups, schema = [], None
        for path in paths:
            file = _open_parquet(path)
            meta, own = file.metadata, file.schema_arrow.remove_metadata()
            if schema is not None and own.names != schema.names and not join:
                seen = f"the columns {', '.join(own.names)} in {path}"
                raise InputError(KEY, got=seen, expected=f"{', '.join(schema.names)}, as in {paths[0]}")
            schema = own if schema is None else joined([schema, own], path)
            groups.append(tuple(meta.row_group(number).num_rows for number in range(meta.num_row_groups)))
        return cls(tuple(paths), tuple(groups), schema, limit)

    @property
    def rows(self) -> int:
        """Rows of the input."""
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
        """The values of one column as Arrow arrays of at most `at_once` rows, in input order; no other column is read.

        Raises:
            InputError: a file cannot be read.
        """
        left = self.rows
        for path in self.paths:
            try:
                for batch in _open_parquet(path).iter_batches(at_once, columns=[name]):
                    if not left:
                        return
                    part = batch.column(0)[:left]
                    left -= len(part)
                    yield part
            except OSError as error:
                raise unreadable(path, error, key=KEY) from error

    def _group(self, file: int, group: int) -> Any:
        if self._held is None or self._held[0] != (file, group):
            path = self.paths[file]
            try:
                table = _open_parquet(path).read_row_group(group)
            except OSError as error:
                raise unreadable(path, error, key=KEY) from error
            self._held = ((file, group), fitted(table, self.schema))
        return self._held[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}


def joined(schemas: Sequence[Any], path: str) -> Any:
    """The schema with the columns of all of these. Raises InputError for a column of types that do not go together."""
    import pyarrow as pa

    try:
        return pa.unify_schemas(list(schemas), promote_options="permissive")
    except pa.ArrowException as error:
        remedy = "write one type, or leave the column out"
        raise InputError(
            KEY, got=f"{path}: {first_line(error)}", expected="one type a column", remedy=remedy
        ) from error


def fitted(table: Any, schema: Any) -> Any:
    """A table with the columns and types of a schema, nulls where it lacks a column."""
    import pyarrow as pa

    if table.schema.equals(schema):
        return table
    columns = [
        table[one.name].cast(one.type) if one.name in table.column_names else pa.nulls(table.num_rows, one.type)
        for one in schema
    ]
    return pa.table(columns, schema=schema)


def _open_parquet(path: str) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    filesystem, inner = locate(path, key=KEY)
    try:
        return parquet.ParquetFile(filesystem.open_input_file(inner))
    except pa.ArrowException as error:
        raise InputError(KEY, got=f"{path}: {str(error).splitlines()[0]}", expected="a Parquet file") from error
    except OSError as error:
        raise unreadable(path, error, key=KEY) from error


def check_columns(schema: Any, wanted: dict[str, str | None]) -> None:
    """Raise InputError for the first column that the input lacks; `wanted` maps a key to the column it names."""
    names = list(schema.names)
    for key, name in wanted.items():
        if name is not None and name not in names:
            raise InputError(
                key, got=f"'{name}', which is not in {KEY}", expected=f"one of its columns {', '.join(names)}",
                remedy=suggestion(name, names),
            )  # fmt: skip
