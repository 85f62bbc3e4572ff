"""The rows of metrics.jsonl and events.jsonl, their readers and writers, and the time of a run by purpose.

Workers write the rows through the reporter; the report, `--resume` and result.json are computed from them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from raytrain.errors import RunError
from raytrain.runs.storage import ObjectStore, explained_writes, join

_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass
class StepRecord:
    """One optimizer step. `loss` is the global mean of this step only, without auxiliary losses.

    Times in seconds, memory in bytes; None where a field does not apply to the job.
    `extra` becomes additional columns; "metrics" in it names those that the loss function has told.
    """

    step: int
    epoch: int
    loss: float
    aux_loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    step_time_s: float | None = None
    data_time_s: float | None = None
    peak_memory_bytes: int | None = None
    loss_scale: float | None = None
    mfu: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        columns = asdict(self)
        extra = columns.pop("extra")
        return {"kind": "train", **columns, **{name: extra[name] for name in extra if name not in columns}}


def spreads(
    times: Sequence[float], *, step_s: Sequence[float], data_s: Sequence[float], waited_s: Sequence[float],
    peak: Sequence[float],
) -> dict[str, float]:  # fmt: skip
    """Columns of a StepRecord: how this worker's step times (`times`, sorted) and the workers' means vary.

    Workers that wait for each other take equally long for a step: `work_time_s` is a step without the waiting, of the
    median and of the slowest worker, and `slowest_rank` is who that is.
    """
    work = [step - waited for step, waited in zip(step_s, waited_s, strict=True)]
    slowest = max(range(len(work)), key=work.__getitem__)
    return {
        "wait_time_s": sum(waited_s) / len(waited_s),
        "work_time_s_median": statistics.median_low(work),
        "work_time_s_max": work[slowest],
        "slowest_rank": slowest,
        "slowest_data_time_s": data_s[slowest],
        "step_ms_p50": 1e3 * times[len(times) // 2],
        "step_ms_p95": 1e3 * times[min(len(times) - 1, int(0.95 * len(times)))],
        "step_time_s_min": min(step_s),
        "step_time_s_max": max(step_s),
        "data_time_s_min": min(data_s),
        "data_time_s_max": max(data_s),
        "peak_memory_bytes_min": int(min(peak)),
        "peak_memory_bytes_mean": sum(peak) / len(peak),
    }


@dataclass
class EvalRecord:
    """One evaluation after `step`; `accuracy` (0..1) only where it applies."""

    step: int
    loss: float
    accuracy: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"kind": "eval", "step": self.step, "loss": self.loss}
        if self.accuracy is not None:
            row["accuracy"] = self.accuracy
        return {**row, **self.extra}


def rate_of(row: Mapping[str, Any]) -> str:
    """The rate of a train row as every line shows it: of tokens where rows have them, else of samples."""
    unit = "tokens" if row.get("tokens_per_s") else "samples"
    rate = row.get(f"{unit}_per_s")
    return f"{rate:,.0f} {unit}/s" if rate else ""


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time.time(), **fields}


def plain(value: Any, *, other: Callable[[Any], Any] | None = None) -> Any:
    """`value` in JSON types: non-finite floats as "nan"/"inf"/"-inf", tuples as lists, numpy scalars as
    numbers. Other values are passed to `other`; errors: TypeError if that is None.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {str(key): plain(item, other=other) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, other=other) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # a numpy scalar
        return plain(value.item())
    if other is not None:
        return other(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON: {value!r}")


def revived(value: Any) -> Any:
    """Restores the non-finite floats that `plain` wrote as strings."""
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: revived(item) for key, item in value.items()}
    if isinstance(value, list):
        return [revived(item) for item in value]
    return value


def to_line(row: dict[str, Any]) -> bytes:
    """One JSON line; floats in the shortest form that reads back as the same double."""
    return (json.dumps(plain(row), allow_nan=False, ensure_ascii=False) + "\n").encode()


def rows_of(data: bytes, *, origin: str) -> list[dict[str, Any]]:
    """The rows of a JSONL file. An incomplete last line (its writer was killed) is left out.

    Errors: RunError for any other broken line.
    """
    rows = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(revived(json.loads(line)))
        except ValueError as error:
            if number == len(lines):
                break
            raise RunError(f"{origin}, line {number}: not JSON ({error})") from error
    return rows


class JsonlWriter:
    """Appends rows to a local file, each with one system call, so that readers see complete rows immediately.

    Opening repairs an incomplete last line left by a killed writer. Errors: RunError (disk full).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        with explained_writes(self.path):
            os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
            with contextlib.suppress(FileNotFoundError), open(self.path, "r+b") as file:
                # an incomplete last line is removed, or completed if only the newline is missing
                start = max(0, file.seek(0, os.SEEK_END) - 2**20)
                file.seek(start)
                head, newline, tail = file.read().rpartition(b"\n")
                try:
                    json.loads(tail or b"0")
                except ValueError:
                    file.truncate(start + len(head) + len(newline))
                else:
                    file.write(b"\n" if tail else b"")
            self._descriptor: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def write(self, row: dict[str, Any]) -> None:
        if self._descriptor is None:
            raise ValueError(f"{self.path} was closed")
        data = memoryview(to_line(row))
        with explained_writes(self.path):
            while data:
                data = data[os.write(self._descriptor, data) :]

    def flush(self) -> None:
        """Does nothing: every row is already in the file. Exists to match `ObjectJsonlWriter`."""

    def close(self) -> None:
        """May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class ObjectJsonlWriter:
    """Appends rows to an object: they are kept in a private local file, which is uploaded every `every_s` seconds.

    If another process has written the object since the last upload (the driver and rank 0 both write events), only
    the rows not uploaded yet are added to its current content. Errors of the upload thread are raised by the next
    call, as RunError.
    """

    def __init__(self, store: ObjectStore, name: str, *, every_s: float = 10.0) -> None:
        self.path = join(store.uri, name)
        self._store, self._name, self._every_s = store, name, every_s
        self._folder = tempfile.TemporaryDirectory(prefix="raytrain-")
        self._local = Path(self._folder.name, "rows.jsonl")
        self._local.touch()
        self._pending = bytearray()
        self._seen: float | None = None
        self._error: RunError | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, row: dict[str, Any]) -> None:
        line = to_line(row)
        with self._lock:
            self._pending += line
            if self._thread is None:
                self._thread = threading.Thread(target=self._upload_often, daemon=True, name="jsonl-upload")
                self._thread.start()
        self._raise_stored()

    def flush(self) -> None:
        """Uploads pending rows now."""
        self._raise_stored()
        with self._lock:
            self._upload()

    def close(self) -> None:
        """Uploads the remaining rows and ends the thread; may be called twice."""
        self._stop.set()
        try:
            self.flush()
        finally:
            self._folder.cleanup()

    def _upload_often(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                with self._lock:
                    self._upload()
            except RunError as error:
                self._error = error
                return

    def _raise_stored(self) -> None:
        if self._error is not None:
            raise self._error

    def _upload(self) -> None:
        if not self._pending:
            return
        changed = self._store.changed(self._name)
        if changed != self._seen:  # another process has written it
            theirs = self._store.read_bytes(self._name) if changed is not None else b""
            head, newline, _torn = theirs.rpartition(b"\n")
            self._local.write_bytes(head + newline)
        with self._local.open("ab") as file:
            file.write(self._pending)
        self._store.write_bytes(self._name, self._local.read_bytes())
        self._pending.clear()
        self._seen = self._store.changed(self._name)


# ---------------------------------------------------------------- time account
# The wall time of a run by purpose, computed from its events (`time` in result.json).


PURPOSES = (
    "startup", "data", "compute", "communication", "compile", "eval", "save", "sleep", "export", "restart", "lost",
    "other",
)  # fmt: skip


def account(events: list[dict[str, Any]], *, now: float) -> dict[str, Any]:
    """{"wall_s": total over all commands, "time": {purpose: seconds}} of a run. `events`: rows of events.jsonl, in
    order; `now`: unix seconds; the end of a command that has not recorded its end."""
    total: dict[str, float] = dict.fromkeys(PURPOSES, 0.0)
    wall = 0.0
    commands = _commands(events)
    for index, rows in enumerate(commands):
        begin = rows[0]["process_start"]
        ended = next((row["time"] for row in rows if row["kind"] == "driver_end"), None)
        if ended is None:
            later = commands[index + 1][0] if index + 1 < len(commands) else None
            ended = max(rows[-1]["time"], (later or {}).get("last_sign_of_life") or 0.0) if later else now
        wall += ended - begin
        _add_command(total, rows, begin=begin, ended=ended)
    total["other"] = wall - sum(value for name, value in total.items() if name != "other")
    if total["other"] < 0:  # clocks of two processes overlap: subtract the excess from the largest part
        largest = max(total, key=lambda name: total[name])
        total[largest] += total["other"]
        total["other"] = 0.0
    return {"wall_s": wall, "time": total}


def account_of_last(events: list[dict[str, Any]], *, now: float) -> dict[str, Any]:
    commands = _commands(events)
    return account(commands[-1] if commands else [], now=now)


def _commands(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    commands: list[list[dict[str, Any]]] = []
    for row in events:
        if row["kind"] == "driver_start":
            commands.append([row])
        elif commands:
            commands[-1].append(row)
    return commands


def _add_command(total: dict[str, float], rows: list[dict[str, Any]], *, begin: float, ended: float) -> None:
    starts = [index for index, row in enumerate(rows) if row["kind"] == "attempt"]
    # the time before the first step: its start until an attempt failed, and what followed
    first = rows[: starts[0] + 1] if starts else rows
    failures = [row["failed_at"] for row in first if row["kind"] == "fault"]
    until = first[-1]["time"] if starts else _last_fault(first) if failures else ended
    failed = min(max(begin, min(failures)), until) if failures else until
    prepared = sum(row["seconds"] for row in first if row.get("phase") == "finished" and row["time"] <= failed)
    total["data"] += prepared  # reading and converting data is part of the start, but is counted as data
    total["startup"] += failed - begin - prepared
    total["restart"] += until - failed
    total["export"] += sum(row["seconds"] for row in rows if row["kind"] == "exported")
    for position, start in enumerate(starts):
        last = position + 1 == len(starts)
        mine = rows[start : len(rows) if last else starts[position + 1]]
        closed = next((row["time"] for row in mine if row["kind"] == "attempt_end"), None)
        accounts = [row for row in mine if row["kind"] in ("checkpoint", "account") and "seconds" in row]
        for name, seconds in (accounts[-1]["seconds"] if accounts else {}).items():
            total[name] += seconds
        if closed is not None and last:
            continue
        safe = accounts[-1]["time"] if accounts else mine[0]["time"]
        faults = [row for row in rows if row["kind"] == "fault" and row.get("failed_attempt") == mine[0]["attempt"]]
        stuck = [row["time"] - row["seconds"] for row in mine if row["kind"] == "hang_ended" and "seconds" in row]
        again = ended if closed is None else safe
        if not last:
            again = rows[starts[position + 1]]["time"]
        elif faults:  # the attempts after it failed before their first step
            again = _last_fault(rows)
        noticed = min([faults[0]["failed_at"], *stuck]) if faults else 0.0  # nothing was computed while it was stuck
        failed = min(max(noticed, safe), again) if faults else again if last else safe
        total["lost"] += max(0.0, failed - safe)
        total["restart"] += max(0.0, again - failed)


def _last_fault(rows: list[dict[str, Any]]) -> float:
    """When the last failed attempt was known to have failed: the next one, or the decision to stop, records it."""
    return max(row["time"] for row in rows if row["kind"] == "fault")
