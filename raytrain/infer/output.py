"""The output folder of batch inference: one file for each unit, progress, and the joined answers in input order.

Workers write unit files, the driver reads progress and joins them; `--resume` computes only what is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

from raytrain.data.sources.tables import is_text
from raytrain.errors import InputError, RunError
from raytrain.infer.input import Unit, UnitReport, as_json, fitted, json_value, shortest
from raytrain.infer.runner import RowResult
from raytrain.runs.folder import Attempts, this_process
from raytrain.runs.storage import ANSWERS, LocalStore, ObjectStore, join, locate, open_store, unreadable, whole_file

# ---------------------------------------------------------------- folder


KEY = "infer.output"
JOB, COMMAND = "job.json", "command"
PARTS = "parts"
CONVERTED = "input"
MANIFEST = "manifest.json"
LEASE = "attempts"
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
        return join(self.path, PARTS)

    @property
    def store(self) -> LocalStore | ObjectStore:
        return open_store(self.path, ANSWERS)

    def identity(self) -> dict[str, Any] | None:
        """What the job that wrote here depends on; None in a new folder."""
        known = self._job()
        return None if known is None else {name: value for name, value in known.items() if name != COMMAND}

    def command(self) -> dict[str, Any] | None:
        """What the command that wrote here was given, for one that only continues it; None if that is unknown."""
        return (self._job() or {}).get(COMMAND)

    def _job(self) -> dict[str, Any] | None:
        store = self.store
        return json.loads(store.read_bytes(JOB)) if store.exists(JOB) else None

    def check_free(self, *, resume: bool) -> None:
        """Check that a command may write here, before anything is written. Raises InputError: the folder holds
        something else, or another command writes to it."""
        user = self._user()
        if user is not None:
            seen = f"{self.path}, to which process {user['pid']} on {user['host']} writes"
            raise InputError(KEY, got=seen, expected="a folder that no other command uses", remedy="wait for its end")
        known = self.identity()
        if known is None:
            held = [entry.name for entry in self.store.entries("") if entry.name not in (CONVERTED, LEASE)]
            if held:
                seen = f"{self.path}, which holds {held[0]}"
                raise InputError(KEY, got=seen, expected="a new or empty folder")
        elif not resume:
            seen = f"{self.path}, which holds results of an earlier command"
            remedy = f"to continue it: {shlex.join(['--resume', self.path])}"
            raise InputError(KEY, got=seen, expected="a new folder", remedy=remedy)

    def check_same(self, identity: Mapping[str, Any]) -> None:
        """Raise InputError if the folder holds results of a job that differs; it names what differs."""
        known = self.identity()
        if known is None:
            return
        plain = json.loads(json.dumps(identity))
        differing = [name for name in {**known, **plain} if known.get(name) != plain.get(name)]
        if differing:
            name = sorted(differing)[0]
            raise InputError(
                "--resume",
                got=f"{self.path}, computed with {name} {known.get(name)!r}",
                expected=repr(plain.get(name)),
                remedy="its rows would be mixed with others: repeat the command that wrote it, or use a new folder",
            )  # fmt: skip

    @contextlib.contextmanager
    def claimed(self, identity: Mapping[str, Any], command: Mapping[str, Any] | None = None) -> Iterator[None]:
        """Write here as the only command, given `command`; `beat` is to be called every few seconds. Raises
        InputError: another command has begun to write here."""
        attempts = Attempts(self.store)
        number = attempts.next_attempt(this_process())
        try:
            user = self._user(before=number)
            if user is not None:
                self.store.delete(f"{LEASE}/{number:04d}.json")
                self.check_free(resume=True)
            if self.identity() is None:
                self.store.write_bytes(
                    JOB, json.dumps({**identity, COMMAND: command}, indent=1, sort_keys=True).encode()
                )
            yield
        finally:
            if self._user(before=number) is None:
                self.store.delete_tree(LEASE)

    def beat(self) -> None:
        """Renew the claim, for commands on other machines."""
        Attempts(self.store).heartbeat()

    def _user(self, before: int | None = None) -> dict[str, Any] | None:
        """The process of a command that writes here, of those that claimed it before this number."""
        attempts = Attempts(self.store)
        for number in range(1, attempts.current_attempt() + 1 if before is None else before):
            owner = attempts.owner_of(number)
            if owner is not None and attempts.lives(owner):
                return owner
        return None

    def has_parts(self) -> bool:
        names = (entry.name for entry in self.store.entries(PARTS))
        return any(name.endswith(".parquet") and not name.startswith(".") for name in names)

    def forget(self) -> None:
        if not self.has_parts():
            for name in (CONVERTED, PARTS):
                self.store.delete_tree(name)
            self.store.delete(JOB)
            with contextlib.suppress(OSError):  # it holds something else, or is not there
                os.rmdir(self.path)

    def finished(self, units: Sequence[Unit], job: str) -> dict[int, int]:
        """The units that are complete -> their failed rows. Raises InputError: a file of another unit than its name
        says, or of another job."""
        names = {entry.name for entry in self.store.entries(PARTS)}
        present = [unit for unit in units if part_name(unit.number) in names]
        return {unit.number: part_facts(self.parts, unit, job)[0].failed for unit in present}


def digest_of(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def part_name(number: int) -> str:
    return f"unit-{number:06d}.parquet"


def write_part(
    parts: str, unit: Unit, table: Any, results: Sequence[RowResult], *, ids: Any, report: UnitReport, job: str
) -> None:
    """Write the file of a unit, complete or not at all: the columns of `table`, ids, results, and in its footer the
    report and the `digest_of` the job."""
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
        "worker": pa.array([report.worker] * unit.rows, pa.string()),
    }
    about = json.dumps({**asdict(report), "start": unit.start, "job": job})
    made = pa.table(columns).replace_schema_metadata({ABOUT: about.encode()})
    sink = pa.BufferOutputStream()
    parquet.write_table(made, sink)
    open_store(parts, ANSWERS).write_bytes(part_name(unit.number), sink.getvalue().to_pybytes())


def part_facts(parts: str, unit: Unit, job: str) -> tuple[UnitReport, Any]:
    """The report of the worker that wrote a unit's file, and its Arrow schema, from its footer. Raises InputError if it
    is no file of this unit and job."""
    import pyarrow as pa
    from pyarrow import parquet

    path = join(parts, part_name(unit.number))
    wrong = partial(InputError, KEY, remedy="delete it: --resume computes its rows again")
    try:
        filesystem, inner = locate(path, key=KEY)
        with filesystem.open_input_file(inner) as file:
            opened = parquet.ParquetFile(file)
            schema, rows = opened.schema_arrow, opened.metadata.num_rows
        about = json.loads((schema.metadata or {}).get(ABOUT, b"{}"))
    except (pa.ArrowException, ValueError) as error:
        raise wrong(got=f"{path}, which cannot be read ({error})", expected="the file of a unit") from error
    expected = {"number": unit.number, "start": unit.start, "rows": unit.rows}
    if {name: about.get(name) for name in expected} != expected or rows != unit.rows:
        seen = f"{path} with rows {about.get('start')} to {about.get('start', 0) + rows}"
        raise wrong(got=seen, expected=f"rows {unit.start} to {unit.start + unit.rows}")
    said = {one.name: about[one.name] for one in fields(UnitReport) if one.name in about}
    if about.get("job") != job or len(said) < len(fields(UnitReport)):
        raise wrong(got=f"{path}, which another job wrote", expected="the file of a unit of this job")
    return UnitReport(**said), schema.remove_metadata()


def written_report(parts: str, unit: Unit, job: str) -> UnitReport | None:
    """What the worker said that has written a unit's file; None if there is none, or none of this unit and job."""
    store = open_store(parts, ANSWERS)
    try:
        return part_facts(parts, unit, job)[0] if store.exists(part_name(unit.number)) else None
    except InputError:
        return None


# ---------------------------------------------------------------- progress


#: Seconds between two writes of one worker.
EVERY_S = 5.0
PREFIX = "progress-"


@dataclass
class WorkerProgress:
    parts: str  # the folder of the units' files
    name: str  # of the worker
    every_s: float = EVERY_S
    _written: float = field(default_factory=time.monotonic, init=False)

    def report(self, unit: Unit, rows: int) -> None:
        """So many rows of a unit are done. What cannot be written is left out: the unit's own file will tell."""
        now = time.monotonic()
        if now - self._written < self.every_s:
            return
        self._written = now
        with contextlib.suppress(RunError):
            data = json.dumps({"unit": unit.number, "rows": rows}).encode()
            open_store(self.parts, ANSWERS).write_bytes(f"{PREFIX}{self.name}.json", data)


def rows_in_progress(parts: str) -> dict[int, int]:
    """Unit -> rows that are done of it, as the workers reported last."""
    store, found = open_store(parts), dict[int, int]()
    for entry in store.entries(""):
        if entry.name.startswith(PREFIX):
            with contextlib.suppress(OSError, ValueError):  # replaced or deleted meanwhile
                row = json.loads(store.read_bytes(entry.name))
                found[int(row["unit"])] = max(int(row["rows"]), found.get(int(row["unit"]), 0))
    return found


# ---------------------------------------------------------------- merge


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

    Each file is read once, after all of their footers; no more than one is in memory. `job`: `digest_of` the job.
    `read`: gets the table of each unit, in input order. Raises RunError: units are missing, or files belong to none
    or to another job; the message names them. Nothing is written then."""
    import pyarrow as pa
    from pyarrow import parquet

    names = {entry.name for entry in output.store.entries(PARTS) if entry.name.endswith(".parquet")}
    names = {name for name in names if not name.startswith(".")}
    expected = {part_name(unit.number) for unit in units}
    for found, what in ((expected - names, "missing"), (names - expected, "of no unit of this input")):
        if found:
            raise RunError(_listed(list(found), f"files in {output.parts} are {what}"))
    facts, wrong = list[tuple[UnitReport, Any]](), list[InputError]()
    for unit in units:
        try:
            facts.append(part_facts(output.parts, unit, job))
        except InputError as error:
            wrong.append(error)
    if wrong:
        raise RunError(_listed([error.got for error in wrong], f"files in {output.parts} are not of this job"))
    # a unit whose rows all failed has no type of prediction
    schema = pa.unify_schemas([own for _, own in facts], promote_options="permissive")
    name = f"predictions.{kind}"
    kept = [field for field in schema if field.name not in TIMING_COLUMNS]
    exact = {as_json(name) for name in schema.names}
    mixed = {name for name in schema.names if as_json(name) in schema.names}
    timed = [schema.field("id"), *(schema.field(column) for column in TIMING_COLUMNS)]
    with (
        _writing(join(output.path, name), kind, kept) as answers,
        _writing(join(output.path, TIMING), "parquet", timed) as timing,
    ):
        for unit in units:
            path = join(output.parts, part_name(unit.number))
            filesystem, inner = locate(path, key=KEY)
            try:
                found = parquet.read_table(inner, filesystem=filesystem)
            except OSError as error:
                raise unreadable(path, error, key=KEY) from error
            table = fitted(found, schema)
            answers.write(table)
            timing.write(table)
            read(table)
    return {
        "rows": sum(unit.rows for unit in units), "failed": sum(report.failed for report, _ in facts),
        "units": len(units), "unit_rows": [unit.rows for unit in units],
        "text_columns": [one.name for one in kept if is_text(one.type) and one.name not in exact | mixed],
        "files": {name: answers.facts, TIMING: timing.facts},
    }  # fmt: skip


def remove_work(output: OutputFolder) -> None:
    """Delete the units' files and the converted input, after the manifest was written."""
    for name in (PARTS, CONVERTED):
        output.store.delete_tree(name)


def _listed(found: Sequence[str], what: str) -> str:
    some = ", ".join(sorted(found)[:NAMED_AT_MOST])
    more = " ..." if len(found) > NAMED_AT_MOST else ""
    return f"{len(found)} {what}: {some}{more}; delete wrong ones, and --resume computes the missing ones"


class _MergedFile:
    def __init__(self, file: Any, kind: str, fields: list[Any]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        schema = pa.schema(fields)
        self._counted, self._names = _Hashed(file), schema.names
        self._exact = [name for name in schema.names if as_json(name) in schema.names]
        self._sink = pa.PythonFile(self._counted, mode="w")
        self._writer: Any = None
        if kind != "jsonl":
            self._writer = (parquet.ParquetWriter if kind == "parquet" else _CsvWriter)(self._sink, schema)

    def write(self, table: Any) -> None:
        own = table.select(self._names)
        if self._writer is not None:
            self._writer.write_table(own)
            return
        for row in shortest(own).to_pylist():
            for name in self._exact:
                text = row.pop(as_json(name))
                row[name] = row[name] if text is None else json.loads(text)
            self._sink.write((json.dumps(row, ensure_ascii=False, default=json_value) + "\n").encode())

    def close(self) -> None:
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
