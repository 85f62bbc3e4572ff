"""Joins the units' files into the answers in input order, and checks that no row is missing or doubled."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any

from raytrain.data.sources.tables import is_text
from raytrain.errors import InputError, RunError
from raytrain.infer.input.rows import fitted
from raytrain.infer.output.folder import (
    CONVERTED,
    KEY,
    PARTS,
    TIMING_COLUMNS,
    OutputFolder,
    PartFacts,
    part_facts,
    part_name,
)
from raytrain.infer.units import Unit
from raytrain.runs.atomic import whole_file
from raytrain.runs.storage import ANSWERS, join, locate, unreadable

FORMATS = ("parquet", "csv", "jsonl")
TIMING = "timing.parquet"
NAMED_AT_MOST = 10


def merge(
    output: OutputFolder,
    units: Sequence[Unit],
    *,
    kind: str,
    job: str,
    read: Callable[[Any], None] = lambda table: None,
) -> dict[str, Any]:
    """Write `predictions.KIND` and `timing.parquet`; returns what the manifest says about them.

    Each file is read once, after all of their footers; no more than one is in memory.

    Args:
        job: `digest_of` the job.
        read: gets the table of each unit, in input order.
    Raises:
        RunError: units are missing, or files belong to none or to another job; the message names them. Nothing is
            written then.
    """
    _check_complete(output, units)
    facts = _facts(output, units, job)
    schema = _joint_schema([one.schema for one in facts])
    name = f"predictions.{kind}"
    kept = [field for field in schema if field.name not in TIMING_COLUMNS]
    timed = [schema.field("id"), *(schema.field(column) for column in TIMING_COLUMNS)]
    with (
        _writing(join(output.path, name), kind, kept) as answers,
        _writing(join(output.path, TIMING), "parquet", timed) as timing,
    ):
        for unit in units:
            table = fitted(read_part(output, unit), schema)
            answers.write(table)
            timing.write(table)
            read(table)
    return {
        "rows": sum(unit.rows for unit in units), "failed": sum(one.report.failed for one in facts),
        "units": len(units), "unit_rows": [unit.rows for unit in units],
        "text_columns": [field.name for field in kept if is_text(field.type)],
        "files": {name: answers.facts, TIMING: timing.facts},
    }  # fmt: skip


def read_part(output: OutputFolder, unit: Unit) -> Any:
    """The table of a unit's file. Raises InputError: it cannot be read."""
    from pyarrow import parquet

    path = join(output.parts, part_name(unit.number))
    filesystem, inner = locate(path, key=KEY)
    try:
        return parquet.read_table(inner, filesystem=filesystem)
    except OSError as error:
        raise unreadable(path, error, key=KEY) from error


def remove_work(output: OutputFolder) -> None:
    """Delete the units' files and the converted input, after the manifest was written."""
    for name in (PARTS, CONVERTED):
        output.store.delete_tree(name)


def _check_complete(output: OutputFolder, units: Sequence[Unit]) -> None:
    names = {entry.name for entry in output.store.entries(PARTS) if entry.name.endswith(".parquet")}
    names = {name for name in names if not name.startswith(".")}
    expected = {part_name(unit.number) for unit in units}
    for found, what in ((expected - names, "missing"), (names - expected, "of no unit of this input")):
        if found:
            raise RunError(_listed(list(found), f"files in {output.parts} are {what}"))


def _facts(output: OutputFolder, units: Sequence[Unit], job: str) -> list[PartFacts]:
    facts, wrong = list[PartFacts](), list[InputError]()
    for unit in units:
        try:
            facts.append(part_facts(output.parts, unit, job))
        except InputError as error:
            wrong.append(error)
    if wrong:
        raise RunError(_listed([error.got for error in wrong], f"files in {output.parts} are not of this job"))
    return facts


def _listed(found: Sequence[str], what: str) -> str:
    some = ", ".join(sorted(found)[:NAMED_AT_MOST])
    more = " ..." if len(found) > NAMED_AT_MOST else ""
    return f"{len(found)} {what}: {some}{more}; delete wrong ones, and --resume computes the missing ones"


def _joint_schema(schemas: Sequence[Any]) -> Any:
    """The schema that all parts fit: a unit whose rows all failed has no type of prediction."""
    import pyarrow as pa

    return pa.unify_schemas(list(schemas), promote_options="permissive")


class _MergedFile:
    """A file that tables are appended to."""

    def __init__(self, file: Any, kind: str, fields: list[Any]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        schema = pa.schema(fields)
        self._counted, self._names = _Hashed(file), schema.names
        self._sink = pa.PythonFile(self._counted, mode="w")
        self._writer: Any = None
        if kind != "jsonl":
            self._writer = (parquet.ParquetWriter if kind == "parquet" else _CsvWriter)(self._sink, schema)

    def write(self, table: Any) -> None:
        """Append the columns that the file has."""
        own = table.select(self._names)
        if self._writer is not None:
            self._writer.write_table(own)
            return
        for row in own.to_pylist():
            self._sink.write((json.dumps(row, ensure_ascii=False, default=json_value) + "\n").encode())

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
        self._sink.flush()

    @property
    def facts(self) -> dict[str, Any]:
        """{"bytes", "sha256"} of what was written."""
        return {"bytes": self._counted.bytes, "sha256": self._counted.hash.hexdigest()}


class _CsvWriter:
    """Writes cells as most programs write them: in quotes only where they need them, and an empty text as `""`, so that
    what was carried from a CSV file is what stood there. (Arrow's own writer puts quotes around every text.)"""

    def __init__(self, sink: Any, schema: Any) -> None:
        self._sink = sink
        self.write_table(schema.empty_table(), names=schema.names)

    def write_table(self, table: Any, *, names: Sequence[str] = ()) -> None:
        """Append rows; before them a row of `names`."""
        import pyarrow as pa

        pc: Any = importlib.import_module("pyarrow.compute")  # its functions are made at run time
        columns = [[name] for name in names] or [column.cast(pa.string()) for column in table.columns]
        cells = [_in_quotes(pa.chunked_array([one]) if names else one) for one in columns]
        lines = pc.binary_join_element_wise(*cells, ",", null_handling="replace", null_replacement="")
        self._sink.write("".join(f"{line}\n" for line in lines.to_pylist()).encode())

    def close(self) -> None:
        """Nothing is buffered."""


def _in_quotes(texts: Any) -> Any:
    pc: Any = importlib.import_module("pyarrow.compute")
    needed = pc.or_(pc.match_substring_regex(texts, '[",\r\n]'), pc.equal(texts, ""))
    quoted = pc.binary_join_element_wise('"', pc.replace_substring(texts, '"', '""'), '"', "")
    return pc.if_else(needed, quoted, texts)


def json_value(value: Any) -> Any:
    """A whole number beyond 64 bits as it was; another value that JSON lacks as a text."""
    return int(value) if isinstance(value, Decimal) and value == value.to_integral_value() else str(value)


@contextlib.contextmanager
def _writing(path: str, kind: str, fields: list[Any]) -> Iterator[_MergedFile]:
    with whole_file(path, ANSWERS) as file, contextlib.closing(_MergedFile(file, kind, fields)) as merged:
        yield merged


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
