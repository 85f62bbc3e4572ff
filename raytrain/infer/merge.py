"""Joins the units' files into the answers in input order, and checks that no row is missing or doubled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from raytrain.errors import RunError
from raytrain.infer.output import PARTS, TIMING_COLUMNS, OutputFolder, check_part, part_name
from raytrain.infer.units import Unit
from raytrain.runs.storage import Store, join, locate, open_store

FORMATS = ("parquet", "csv", "jsonl")
TIMING = "timing.parquet"
NAMED_AT_MOST = 10


def merge(output: OutputFolder, units: Sequence[Unit], *, kind: str) -> dict[str, Any]:
    """Write `predictions.KIND` and `timing.parquet`; returns what the manifest says about them.

    Raises:
        RunError: units are missing, or files belong to none; the message names them.
    """
    _check_complete(output, units)
    failed = sum(check_part(output.parts, unit) for unit in units)
    store, name = open_store(output.path), f"predictions.{kind}"
    schema = _joint_schema(output, units)
    kept = [field for field in schema if field.name not in TIMING_COLUMNS]
    predictions = _written(store, name, kind, kept, _tables(output, units, schema))
    timed = [schema.field("id"), *(schema.field(column) for column in TIMING_COLUMNS)]
    timing = _written(store, TIMING, "parquet", timed, _tables(output, units, schema))
    rows = sum(unit.rows for unit in units)
    return {
        "rows": rows, "failed": failed, "units": len(units), "unit_rows": [unit.rows for unit in units],
        "files": {name: predictions, TIMING: timing},
    }  # fmt: skip


def remove_parts(output: OutputFolder) -> None:
    """Delete the units' files, after the manifest was written."""
    open_store(output.path).delete_tree(PARTS)


def _check_complete(output: OutputFolder, units: Sequence[Unit]) -> None:
    names = {entry.name for entry in open_store(output.parts).entries("") if not entry.name.startswith(".")}
    expected = {part_name(unit.number) for unit in units}
    for found, what in ((expected - names, "missing"), (names - expected, "of no unit of this input")):
        if found:
            some = ", ".join(sorted(found)[:NAMED_AT_MOST])
            raise RunError(
                f"{len(found)} files in {output.parts} are {what}: {some}"
                + (" ..." if len(found) > NAMED_AT_MOST else "")
                + "; --resume computes missing ones"
            )


def _joint_schema(output: OutputFolder, units: Sequence[Unit]) -> Any:
    """The schema that all parts fit: a unit whose rows all failed has no type of prediction."""
    import pyarrow as pa
    from pyarrow import parquet

    schemas = []
    for unit in units:
        filesystem, inner = locate(join(output.parts, part_name(unit.number)), key="infer.output")
        schemas.append(parquet.read_schema(inner, filesystem=filesystem).remove_metadata())
    return pa.unify_schemas(schemas, promote_options="permissive")


def _tables(output: OutputFolder, units: Sequence[Unit], schema: Any) -> Iterator[Any]:
    from pyarrow import parquet

    for unit in units:
        filesystem, inner = locate(join(output.parts, part_name(unit.number)), key="infer.output")
        yield parquet.read_table(inner, filesystem=filesystem).cast(schema)


def _written(store: Store, name: str, kind: str, fields: list[Any], tables: Iterator[Any]) -> dict[str, Any]:
    """Write the fields of all tables as one file; {"bytes", "sha256"}."""
    import pyarrow as pa

    schema = pa.schema(fields)
    with store.open_write(name) as file:
        counted = _Hashed(file)
        sink = pa.PythonFile(counted, mode="w")
        _write(sink, kind, schema, tables)
        sink.flush()
    return {"bytes": counted.bytes, "sha256": counted.hash.hexdigest()}


def _write(sink: Any, kind: str, schema: Any, tables: Iterator[Any]) -> None:
    from pyarrow import csv, parquet

    names = schema.names
    if kind == "jsonl":
        for table in tables:
            for row in table.select(names).to_pylist():
                sink.write((json.dumps(row, ensure_ascii=False, default=str) + "\n").encode())
        return
    writer: Any = parquet.ParquetWriter(sink, schema) if kind == "parquet" else csv.CSVWriter(sink, schema)
    for table in tables:
        writer.write_table(table.select(names))
    writer.close()


class _Hashed:
    """A file that hashes what is written to it."""

    def __init__(self, file: Any) -> None:
        self._file, self.bytes, self.hash = file, 0, hashlib.sha256()
        self.closed = False

    def write(self, data: bytes) -> int:
        """Write and hash; a raw file may take a part of the data only."""
        view = memoryview(data)
        self.hash.update(view)
        self.bytes += len(view)
        while view:
            view = view[self._file.write(view) :]
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """The store closes the file."""

    def tell(self) -> int:
        return self.bytes
