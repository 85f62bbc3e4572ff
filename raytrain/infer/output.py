"""The output folder of batch inference while it is computed: one file for each unit, and what the job depends on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.errors import InputError
from raytrain.infer.runner import RowResult
from raytrain.infer.units import Unit
from raytrain.runs.storage import join, open_store, read_bytes

KEY = "infer.output"
JOB = "job.json"
PARTS = "parts"
CONVERTED = "input"
MANIFEST = "manifest.json"
ABOUT = b"raytrain"

#: Columns of a unit's file besides the input's: what becomes of a row, and how it was computed.
RESULT_COLUMNS = ("prediction", "status", "error")
TIMING_COLUMNS = ("row", "unit", "seconds", "batch_rows", "tokens", "again", "worker")


@dataclass(frozen=True)
class OutputFolder:
    """Where a job writes; a local path or a URI that all workers reach."""

    path: str

    @property
    def parts(self) -> str:
        """Folder of the units' files."""
        return join(self.path, PARTS)

    def identity(self) -> dict[str, Any] | None:
        """What the job that wrote here depends on; None in a new folder."""
        store = open_store(self.path)
        return json.loads(store.read_bytes(JOB)) if store.exists(JOB) else None

    def begin(self, identity: Mapping[str, Any], *, resume: bool) -> None:
        """Claim the folder for a job, or check that its earlier work belongs to the same one.

        Raises:
            InputError: the folder holds something else, or results of a job that differs; it names what differs.
        """
        store, known = open_store(self.path), self.identity()
        if known is None:
            held = [entry.name for entry in store.entries("") if entry.name != CONVERTED]
            if held:
                seen = f"{self.path}, which holds {held[0]}"
                raise InputError(KEY, seen=seen, expected="a new or empty folder")
            store.write_bytes(JOB, json.dumps(identity, indent=1, sort_keys=True).encode())
            return
        if not resume:
            seen = f"{self.path}, which holds results of an earlier command"
            raise InputError(KEY, seen=seen, expected="a new folder", remedy=f"to continue it: --resume {self.path}")
        plain = json.loads(json.dumps(identity))
        differing = [name for name in {**known, **plain} if known.get(name) != plain.get(name)]
        if differing:
            name = sorted(differing)[0]
            raise InputError(
                "--resume",
                seen=f"{self.path}, computed with {name} {known.get(name)!r}",
                expected=repr(plain.get(name)),
                remedy="its rows would be mixed with others: repeat the command that wrote it, or use a new folder",
            )  # fmt: skip

    def finished(self, units: Sequence[Unit]) -> dict[int, int]:
        """The units that are complete -> their failed rows.

        Raises:
            InputError: a file of another unit than its name says.
        """
        names = {entry.name for entry in open_store(self.parts).entries("")}
        found = {}
        for unit in units:
            if part_name(unit.number) in names:
                found[unit.number] = check_part(self.parts, unit)
        return found


def part_name(number: int) -> str:
    """The file of a unit."""
    return f"unit-{number:06d}.parquet"


def write_part(parts: str, unit: Unit, table: Any, results: Sequence[RowResult], *, ids: Any, worker: str) -> None:
    """Write the file of a unit: complete or not at all.

    Args:
        parts: the folder.
        table: the input columns to keep, as Arrow.
        ids: Arrow array of the rows' ids.
    """
    import pyarrow as pa
    from pyarrow import parquet

    columns = {"id": ids, **{name: table[name] for name in table.column_names}}
    columns |= {
        "prediction": pa.array([result.prediction for result in results]),
        "status": pa.array([result.status for result in results], pa.string()),
        "error": pa.array([result.error for result in results], pa.string()),
        "row": pa.array(range(unit.start, unit.start + unit.rows), pa.int64()),
        "unit": pa.array([unit.number] * unit.rows, pa.int64()),
        "seconds": pa.array([result.seconds for result in results], pa.float64()),
        "batch_rows": pa.array([result.batch_rows for result in results], pa.int64()),
        "tokens": pa.array([result.tokens for result in results], pa.int64()),
        "again": pa.array([result.again for result in results], pa.bool_()),
        "worker": pa.array([worker] * unit.rows, pa.string()),
    }
    failed = sum(result.error is not None for result in results)
    about = json.dumps({"number": unit.number, "start": unit.start, "rows": unit.rows, "failed": failed})
    made = pa.table(columns).replace_schema_metadata({ABOUT: about.encode()})
    sink = pa.BufferOutputStream()
    parquet.write_table(made, sink)
    open_store(parts).write_bytes(part_name(unit.number), sink.getvalue().to_pybytes())


def check_part(parts: str, unit: Unit) -> int:
    """Failed rows of a unit's file. Raises InputError if it is no file of this unit."""
    import pyarrow as pa

    path = join(parts, part_name(unit.number))
    try:
        schema, rows = _schema_of(path)
        about = json.loads((schema.metadata or {}).get(ABOUT, b"{}"))
    except (pa.ArrowException, ValueError) as error:
        raise InputError(KEY, seen=f"{path}, which cannot be read ({error})", expected="the file of a unit",
                         remedy="delete it: --resume computes its rows again") from error  # fmt: skip
    expected = {"number": unit.number, "start": unit.start, "rows": unit.rows}
    if {name: about.get(name) for name in expected} != expected or rows != unit.rows:
        raise InputError(
            KEY, seen=f"{path} with rows {about.get('start')} to {about.get('start', 0) + rows}",
            expected=f"rows {unit.start} to {unit.start + unit.rows}",
            remedy="delete it: --resume computes its rows again",
        )  # fmt: skip
    return int(about["failed"])


def _schema_of(path: str) -> tuple[Any, int]:
    from pyarrow import parquet

    from raytrain.runs.storage import locate

    filesystem, inner = locate(path, key=KEY)
    with filesystem.open_input_file(inner) as file:
        opened = parquet.ParquetFile(file)
        return opened.schema_arrow, opened.metadata.num_rows


def fingerprint(path: str) -> str:
    """A hash that tells two versions of a file apart by size, first and last bytes, without reading all of it."""
    head = read_bytes(path, key="infer.input", limit=1 << 16)
    from raytrain.runs.storage import file_size, locate

    size = file_size(path, key="infer.input")
    filesystem, inner = locate(path, key="infer.input")
    with filesystem.open_input_file(inner) as file:
        file.seek(max(0, size - (1 << 16)))
        tail = file.read(1 << 16)
    return hashlib.sha256(b"%d " % size + head + tail).hexdigest()[:16]
