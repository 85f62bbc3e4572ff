"""The input of batch inference: rows of files in input order, read a range at a time. Torch-free.

Parquet is read where it lies. Other formats are converted to Parquet once, in one streamed pass, so that any range of
rows can be read without the ones before it.
"""

from __future__ import annotations

import contextlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from raytrain.config.messages import suggestion
from raytrain.errors import InputError
from raytrain.runs.storage import file_size, join, locate, open_store, split, unreadable

KEY = "infer.input"
FORMATS = {
    ".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".txt": "text",
}  # fmt: skip
EXPECTED = f"files that end in {', '.join(FORMATS)}, or a folder of files of one of these kinds"
TEXT_COLUMN = "text"
BLOCK_BYTES = 8 << 20
LINES_AT_ONCE = 10_000


@dataclass(frozen=True)
class InputFiles:
    """The files of an input, all of one format, in the order of their rows."""

    paths: tuple[str, ...]
    kind: str


def input_files(given: str | Sequence[str]) -> InputFiles:
    """The files that `infer.input` names: files and folders (sorted by name), local paths or URIs.

    Raises:
        InputError: nothing is there, or files of no known kind or of several kinds.
    """
    named = [given] if isinstance(given, str) else list(given)
    paths = [file for one in named for file in _files_at(one)]
    kinds = {path: _kind(path) for path in paths}
    first = kinds[paths[0]]
    for path, kind in kinds.items():
        if kind != first:
            raise InputError(KEY, seen=f"{path} beside {paths[0]}", expected="files of one kind")
        file_size(path, key=KEY)
    return InputFiles(tuple(paths), first)


def _files_at(path: str) -> list[str]:
    store = open_store(path)
    names = sorted(entry.name for entry in store.entries("") if not entry.name.startswith((".", "_")))
    if not names:
        return [path]
    files = [name for name in names if _suffix(name) in FORMATS]
    if not files:
        raise InputError(KEY, seen=f"the folder {path} with {names[0]}", expected=EXPECTED)
    return [join(path, name) for name in files]


def _suffix(path: str) -> str:
    return os.path.splitext(split(path)[1])[1].lower()


def _kind(path: str) -> str:
    kind = FORMATS.get(_suffix(path))
    if kind is None:
        raise InputError(KEY, seen=path, expected=EXPECTED)
    return kind


@dataclass
class InputRows:
    """Rows of Parquet files, read by range.

    Attributes:
        paths: the files, in order.
        groups: rows of each row group of each file.
        limit: rows after this one are left out; None for all.
    """

    paths: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    limit: int | None = None
    _held: tuple[tuple[int, int], Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def at(cls, paths: Sequence[str], *, limit: int | None = None) -> InputRows:
        """Read the files' metadata. Raises InputError: a file that is no Parquet, or columns that differ."""
        groups, schema = [], None
        for path in paths:
            file = _open_parquet(path)
            meta = file.metadata
            schema = schema or file.schema_arrow
            if file.schema_arrow.names != schema.names:
                seen = f"the columns {', '.join(file.schema_arrow.names)} in {path}"
                raise InputError(KEY, seen=seen, expected=f"{', '.join(schema.names)}, as in {paths[0]}")
            groups.append(tuple(meta.row_group(number).num_rows for number in range(meta.num_row_groups)))
        return cls(tuple(paths), tuple(groups), limit)

    @property
    def rows(self) -> int:
        """Rows of the input."""
        total = sum(map(sum, self.groups))
        return total if self.limit is None else min(total, self.limit)

    @property
    def schema(self) -> Any:
        """Arrow schema of the first file."""
        return _open_parquet(self.paths[0]).schema_arrow

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
        return pa.concat_tables(parts, promote_options="permissive").combine_chunks()

    def _group(self, file: int, group: int) -> Any:
        if self._held is None or self._held[0] != (file, group):
            path = self.paths[file]
            try:
                table = _open_parquet(path).read_row_group(group)
            except OSError as error:
                raise unreadable(path, error, key=KEY) from error
            self._held = ((file, group), table)
        return self._held[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": None}


def _open_parquet(path: str) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    filesystem, inner = locate(path, key=KEY)
    try:
        return parquet.ParquetFile(filesystem.open_input_file(inner))
    except pa.ArrowException as error:
        raise InputError(KEY, seen=f"{path}: {str(error).splitlines()[0]}", expected="a Parquet file") from error
    except OSError as error:
        raise unreadable(path, error, key=KEY) from error


def check_columns(schema: Any, wanted: dict[str, str | None]) -> None:
    """Raise InputError for the first column that the input lacks; `wanted` maps a key to the column it names."""
    names = list(schema.names)
    for key, name in wanted.items():
        if name is not None and name not in names:
            raise InputError(
                key, seen=f"'{name}', which is not in {KEY}", expected=f"one of its columns {', '.join(names)}",
                remedy=suggestion(name, names),
            )  # fmt: skip


# ---------------------------------------------------------------- other formats


def converted(files: InputFiles, folder: str, *, rows_at_once: int = LINES_AT_ONCE) -> list[str]:
    """Write files of another format as Parquet in `folder`, one for each; returns the paths. Parquet is left alone.

    Raises:
        InputError: a file that cannot be read, or has no rows.
    """
    if files.kind == "parquet":
        return list(files.paths)
    store = open_store(folder)
    store.make_dir("")
    written = []
    for number, path in enumerate(files.paths):
        target = join(folder, f"input-{number:05d}.parquet")
        if not store.exists(split(target)[1]):
            _convert(path, files.kind, target, rows_at_once)
        written.append(target)
    return written


def _convert(path: str, kind: str, target: str, rows_at_once: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    folder, name = split(target)
    store = open_store(folder)
    partial = f".{name}.tmp" if store.is_local else name
    try:
        with store.open_write(partial) as sink, contextlib.ExitStack() as stack:
            writer = None
            for batch in _batches(path, kind, rows_at_once):
                if writer is None:
                    writer = stack.enter_context(parquet.ParquetWriter(sink, batch.schema))
                writer.write_table(batch.cast(writer.schema), row_group_size=rows_at_once)
            if writer is None:
                raise InputError(KEY, seen=f"no rows in {path}", expected="at least one row")
    except (pa.ArrowException, InputError) as error:
        store.delete(partial)
        if isinstance(error, InputError):
            raise
        raise InputError(KEY, seen=f"{path}: {str(error).splitlines()[0]}", expected=f"a {kind} file") from error
    if store.is_local:
        os.replace(store.at(partial), store.at(name))


def _batches(path: str, kind: str, rows_at_once: int) -> Iterator[Any]:
    """Tables of the rows of one file, in order."""
    import pyarrow as pa

    filesystem, inner = locate(path, key=KEY)
    try:
        with filesystem.open_input_stream(inner) as stream:
            if kind == "csv":
                from pyarrow import csv

                reader = csv.open_csv(stream, read_options=csv.ReadOptions(block_size=BLOCK_BYTES))
                yield from (pa.Table.from_batches([batch]) for batch in reader if batch.num_rows)
            else:
                yield from _json_or_text(stream, path, kind, rows_at_once)
    except OSError as error:
        raise unreadable(path, error, key=KEY) from error


def _json_or_text(stream: Any, path: str, kind: str, rows_at_once: int) -> Iterator[Any]:
    import io

    import pyarrow as pa

    if kind == "json":
        yield pa.Table.from_pylist(_json_rows(stream.read(), path))
        return
    lines: list[Any] = []
    for number, raw in enumerate(io.BufferedReader(stream), start=1):
        line = _decoded(raw.rstrip(b"\r\n"), path, number)
        if kind == "jsonl" and line.strip():
            lines.append(_json_object(line, path, number))
        elif kind == "text":
            lines.append({TEXT_COLUMN: line})
        if len(lines) == rows_at_once:
            yield pa.Table.from_pylist(lines)
            lines = []
    if lines:
        yield pa.Table.from_pylist(lines)


def _decoded(line: bytes, path: str, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(KEY, seen=f"{path} line {number}, which is not UTF-8", expected="UTF-8 text") from error


def _json_object(line: str, path: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(KEY, seen=f"{path} line {number}: {error}", expected="a JSON object on each line") from error
    if not isinstance(row, dict):
        raise InputError(KEY, seen=f"{path} line {number}: a {type(row).__name__}", expected="a JSON object")
    return row


def _json_rows(text: bytes, path: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(KEY, seen=f"{path}: {error}", expected="a JSON array of objects") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InputError(KEY, seen=f"{path}, which is no array of objects", expected="a JSON array of objects")
    return rows
