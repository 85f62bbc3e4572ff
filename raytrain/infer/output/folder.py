"""The output folder of batch inference while it is computed: one file for each unit, and what the job depends on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from raytrain.errors import InputError
from raytrain.infer.runner import RowResult
from raytrain.infer.units import Unit, UnitReport
from raytrain.runs.lease import Attempts, this_process
from raytrain.runs.storage import ANSWERS, LocalStore, ObjectStore, join, locate, open_store

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
        """Folder of the units' files."""
        return join(self.path, PARTS)

    @property
    def store(self) -> LocalStore | ObjectStore:
        """The folder's files."""
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
        """Check that a command may write here, before anything is written.

        Raises:
            InputError: the folder holds something else, or another command writes to it.
        """
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
        """Write here as the only command, given `command`; `beat` is to be called every few seconds.

        Raises:
            InputError: another command has begun to write here.
        """
        attempts = Attempts(self.store)
        number = attempts.take_next(this_process())
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
        Attempts(self.store).beat()

    def _user(self, before: int | None = None) -> dict[str, Any] | None:
        """The process of a command that writes here, of those that claimed it before this number."""
        attempts = Attempts(self.store)
        for number in range(1, attempts.current() + 1 if before is None else before):
            owner = attempts.owner_of(number)
            if owner is not None and attempts.lives(owner):
                return owner
        return None

    def has_parts(self) -> bool:
        """Whether a unit is complete."""
        names = (entry.name for entry in self.store.entries(PARTS))
        return any(name.endswith(".parquet") and not name.startswith(".") for name in names)

    def forget(self) -> None:
        """Remove what a command wrote that computed nothing."""
        if not self.has_parts():
            for name in (CONVERTED, PARTS):
                self.store.delete_tree(name)
            self.store.delete(JOB)
            with contextlib.suppress(OSError):  # it holds something else, or is not there
                os.rmdir(self.path)

    def finished(self, units: Sequence[Unit], job: str) -> dict[int, int]:
        """The units that are complete -> their failed rows.

        Raises:
            InputError: a file of another unit than its name says, or of another job.
        """
        names = {entry.name for entry in self.store.entries(PARTS)}
        present = [unit for unit in units if part_name(unit.number) in names]
        return {unit.number: part_facts(self.parts, unit, job).report.failed for unit in present}


def digest_of(identity: Mapping[str, Any]) -> str:
    """A hash of what a job depends on, which all of its files carry."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def part_name(number: int) -> str:
    """The file of a unit."""
    return f"unit-{number:06d}.parquet"


def write_part(
    parts: str, unit: Unit, table: Any, results: Sequence[RowResult], *, ids: Any, report: UnitReport, job: str
) -> None:
    """Write the file of a unit: complete or not at all.

    Args:
        parts: the folder.
        table: the input columns to keep, as Arrow.
        ids: Arrow array of the rows' ids.
        report: what the worker says about the unit, kept in the file for `written_report`.
        job: `digest_of` the job.
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
        "worker": pa.array([report.worker] * unit.rows, pa.string()),
    }
    about = json.dumps({**asdict(report), "start": unit.start, "job": job})
    made = pa.table(columns).replace_schema_metadata({ABOUT: about.encode()})
    sink = pa.BufferOutputStream()
    parquet.write_table(made, sink)
    open_store(parts, ANSWERS).write_bytes(part_name(unit.number), sink.getvalue().to_pybytes())


@dataclass(frozen=True)
class PartFacts:
    """What the footer of a unit's file says: the report of the worker that wrote it, and its Arrow schema."""

    report: UnitReport
    schema: Any


def part_facts(parts: str, unit: Unit, job: str) -> PartFacts:
    """Read the footer of a unit's file. Raises InputError if it is no file of this unit and job."""
    import pyarrow as pa

    path = join(parts, part_name(unit.number))
    try:
        schema, rows = _schema_of(path)
        about = json.loads((schema.metadata or {}).get(ABOUT, b"{}"))
    except (pa.ArrowException, ValueError) as error:
        raise InputError(KEY, got=f"{path}, which cannot be read ({error})", expected="the file of a unit",
                         remedy="delete it: --resume computes its rows again") from error  # fmt: skip
    expected = {"number": unit.number, "start": unit.start, "rows": unit.rows}
    if {name: about.get(name) for name in expected} != expected or rows != unit.rows:
        raise InputError(
            KEY, got=f"{path} with rows {about.get('start')} to {about.get('start', 0) + rows}",
            expected=f"rows {unit.start} to {unit.start + unit.rows}",
            remedy="delete it: --resume computes its rows again",
        )  # fmt: skip
    said = {one.name: about[one.name] for one in fields(UnitReport) if one.name in about}
    if about.get("job") != job or len(said) < len(fields(UnitReport)):
        raise InputError(KEY, got=f"{path}, which another job wrote", expected="the file of a unit of this job",
                         remedy="delete it: --resume computes its rows again")  # fmt: skip
    return PartFacts(UnitReport(**said), schema.remove_metadata())


def written_report(parts: str, unit: Unit, job: str) -> UnitReport | None:
    """What the worker said that has written a unit's file; None if there is none, or none of this unit and job."""
    store = open_store(parts, ANSWERS)
    try:
        return part_facts(parts, unit, job).report if store.exists(part_name(unit.number)) else None
    except InputError:
        return None


def _schema_of(path: str) -> tuple[Any, int]:
    from pyarrow import parquet

    filesystem, inner = locate(path, key=KEY)
    with filesystem.open_input_file(inner) as file:
        opened = parquet.ParquetFile(file)
        return opened.schema_arrow, opened.metadata.num_rows
