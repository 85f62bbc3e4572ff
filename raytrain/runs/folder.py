"""The run folder: the paths of its files, reading and writing them, its numbered attempts and their owner.

Everything that outlives a process is here, and nothing else passes between a run, its resume and its report. A search
folder (`tune`) is a run folder with one row per trial. Files that grow during a run are written locally and mirrored to
an object store.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from cluster.preflight import is_submitted
from raytrain.config.sections import PLACEHOLDER
from raytrain.errors import InputError, RunError
from raytrain.runs.records import JsonlWriter, ObjectJsonlWriter, plain, revived, rows_of, to_line
from raytrain.runs.storage import LocalStore, ObjectStore, join, open_store, part_below, split, typed_path

HEARTBEAT_S = 30.0
_BEAT_EVERY_S = 5.0
_HEARTBEAT = "attempts/heartbeat.json"


def process_start(pid: int) -> int | None:
    """Start time of a live process of this machine in clock ticks since boot, which together with the reused pid is
    unique; None if it is dead or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def this_process() -> dict[str, Any]:
    """The owner record of the calling process: {host, pid, start}."""
    pid = os.getpid()
    return {"host": socket.gethostname(), "pid": pid, "start": process_start(pid)}


class Attempts:
    """The numbered attempts in `attempts/` of a folder, and their owners {host, pid, start}."""

    def __init__(self, store: LocalStore | ObjectStore) -> None:
        self.store = store
        self._last_beat = -_BEAT_EVERY_S

    def next_attempt(self, owner: dict[str, Any]) -> int:
        """Claims the next number (from 1) for `owner`: every older attempt then ends before it writes. Concurrent
        callers get different numbers."""
        number = self.current_attempt() + 1
        while not self._claim(number, owner):
            number += 1
        return number

    def current_attempt(self) -> int:
        """The newest attempt number, 0 before the first; cheap."""
        names = (entry.name for entry in self.store.entries("attempts"))
        return max((int(name[:-5]) for name in names if name[:-5].isdigit()), default=0)

    def owner(self) -> dict[str, Any] | None:
        """The owner of the newest attempt; before the first, the creator of the folder."""
        return self.owner_of(self.current_attempt())

    def owner_of(self, number: int) -> dict[str, Any] | None:
        """The owner of attempt `number`; None if the attempt does not exist."""
        record = self._read(f"attempts/{number:04d}.json")
        return None if record is None else {name: record[name] for name in ("host", "pid", "start")}

    def heartbeat(self) -> None:
        """Records that the newest attempt is alive, for readers on other hosts; writes at most every 5 s."""
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_EVERY_S:
            self._last_beat = now
            row = {"attempt": self.current_attempt(), "time": time.time()}
            self.store.write_bytes(_HEARTBEAT, json.dumps(row).encode())

    def lives(self, owner: dict[str, Any]) -> bool:
        """Whether an owner's process is alive: on its own host by the process itself, on others by a heartbeat younger
        than 30 s."""
        if owner["host"] == socket.gethostname():
            start = process_start(owner["pid"])
            return start is not None and start == owner["start"]
        beat = self._read(_HEARTBEAT)
        return beat is not None and time.time() - beat["time"] < HEARTBEAT_S

    def _claim(self, number: int, owner: dict[str, Any]) -> bool:
        # The nonce makes two records of one owner differ, so that a race on an object store has one winner.
        record = {**owner, "time": time.time(), "nonce": secrets.token_hex(8)}
        return self.store.create_exclusive(f"attempts/{number:04d}.json", json.dumps(record).encode())

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(self.store.read_bytes(name))
        except FileNotFoundError:
            return None


RESERVE_BYTES = 1 << 18
"""Enough for result.json and the last events."""
_RESERVE = "attempts/reserve"
REMOVED_KEYS = ("tune.objective", "tune.fresh", "tune.found")
"""Keys of a job that earlier versions knew. A job.yaml with one is refused; runs and searches that have one in their
record go on without it."""


def _file(name: str, doc: str) -> property:
    return property(lambda run: join(run.path, name), doc=doc)


class RunFolder(Attempts):
    """One run on disk or in an object store. Cheap to create; pickled by path; any process may use one.

    Properties that name a file are full paths (or URIs); a `name` argument is such a path or the part of it below the
    run folder. Reading methods raise FileNotFoundError, writing methods RunError.
    """

    def __init__(self, path: str) -> None:
        super().__init__(open_store(path))
        self.path: str = self.store.uri
        self.is_local: bool = self.store.is_local
        self._writers: dict[str, JsonlWriter | ObjectJsonlWriter] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.path,))

    def __repr__(self) -> str:
        return f"RunFolder({self.path!r})"

    # -- making and finding -----------------------------------------------------------------------

    @classmethod
    def create(cls, save_dir: str, name: str, *, job: dict[str, Any] | None = None, latest: bool = True) -> Self:
        """Creates `<save_dir>/<name>-<UTC stamp>`, owned by this process, and points `latest` to it. `job` is kept as
        job.json for `--resume auto`. Raises InputError for a `save.dir` that cannot be written."""
        try:
            parent = open_store(save_dir)
            parent.make_dir("")
            latest_at = parent.at("latest")
            if parent.is_local and os.path.isdir(latest_at) and not os.path.islink(latest_at):
                raise FileExistsError("it contains a directory named `latest`, where the link should be")
            folder = _new_folder(parent, f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
            run = cls(join(parent.uri, folder))
            run._claim(0, this_process())
            if latest:
                _point_latest(parent, folder)
        except (OSError, ValueError, RunError) as error:
            raise InputError(
                "save.dir", got=f"{save_dir} ({error})", expected="a directory or URI that can be written"
            ) from error
        if job is not None:
            run.write_json(run.job_mapping, _comparable(job))
        return run

    @classmethod
    def open(cls, path: str) -> Self:
        """Opens an existing run, as a user names it; `latest` is followed once. Errors: InputError if there is none."""
        path = typed_path(path, key="run folder")
        try:
            store = open_store(path)
            if store.is_local and os.path.islink(store.at("")):
                target = os.readlink(store.at(""))
                store = open_store(os.path.join(os.path.dirname(store.at("")), target))
            elif split(path)[1] == "latest" and not store.entries("") and store.exists(""):
                store = open_store(join(split(path)[0], store.read_bytes("").decode().strip()))
            if store.entries(""):
                return cls(store.uri)
        except (OSError, ValueError) as error:
            seen = f"{path} ({error})"
            raise InputError("run folder", got=seen, expected="the folder of a run") from error
        state = "an empty folder" if os.path.isdir(path) else "which does not exist"
        remedy = run_to_name(path)
        raise InputError("run folder", got=f"{path}, {state}", expected="the folder of a run", remedy=remedy)

    # -- names ------------------------------------------------------------------------------------

    def _name(self, path: str) -> str:
        below = part_below(self.path, path)
        return path if below is None else below

    job = _file("job.yaml", "The job's YAML as given.")
    job_mapping = _file("job.json", "The job as a mapping.")
    plan = _file("plan.json", "The plan that the run follows.")
    environment = _file("environment.json", "Versions, hardware and environment variables.")
    preflight = _file("preflight.json", "The results of the checks before the start.")
    memory_probe = _file("memory_probe.json", "The decisions made by measurements.")
    metrics = _file("metrics.jsonl", "Train and eval rows.")
    experts = _file("experts.jsonl", "Rows routed to each expert in each log interval, and the expert's location.")
    events = _file("events.jsonl", "Attempts, faults, decisions.")
    result = _file("result.json", "How the run ended.")
    sample = _file("sample.json", "Text generated by the language model.")
    weights = _file("weights/model.safetensors", "The exported weights, for plain PyTorch.")
    report_dir = _file("report", "The report pages and pictures.")
    checkpoints_dir = _file("checkpoints", "One directory per checkpoint.")

    def routing_trace(self, step: int) -> str:
        """The routing trace of step `step`, if that step is traced."""
        return join(self.path, f"routing/step_{step:08d}.npz")

    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints that are complete by their marks, which do not say that they are valid."""
        names = [entry.name for entry in self.store.entries("checkpoints")]
        complete = [name for name in names if self.exists(f"checkpoints/{name}/COMPLETE")]
        return sorted(int(name.removeprefix("step_")) for name in complete)

    def checkpoint_dir(self, step: int) -> str:
        return join(self.path, f"checkpoints/step_{step:08d}")

    # -- reading and writing ----------------------------------------------------------------------

    def exists(self, name: str) -> bool:
        return self.store.exists(self._name(name))

    def read_text(self, name: str) -> str:
        return self.store.read_bytes(self._name(name)).decode()

    def read_json(self, name: str) -> Any:
        """Non-finite numbers are restored as floats. Errors: RunError if the file is not JSON."""
        try:
            return revived(json.loads(self.read_text(name)))
        except ValueError as error:
            raise RunError(f"{join(self.path, self._name(name))}: no JSON ({error})") from error

    def recorded_job(self) -> dict[str, Any]:
        """The job as the run was started with it, as far as its keys are known today. Errors: as `read_json`."""
        job = self.read_json(self.job_mapping)
        for section, _, key in (name.partition(".") for name in REMOVED_KEYS):
            if isinstance(job.get(section), dict):
                job[section] = {name: value for name, value in job[section].items() if name != key}
        return job

    def read_rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of a JSONL file, [] where there is none."""
        try:
            data = self.store.read_bytes(self._name(name))
        except FileNotFoundError:
            return []
        return rows_of(data, origin=f"{join(self.path, self._name(name))}")

    def write_bytes(self, name: str, data: bytes) -> None:
        """Writes the full file, atomically on a local path; creates missing directories."""
        self.store.write_bytes(self._name(name), data)

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: Any) -> None:
        """Non-finite numbers are written as strings, so that any JSON parser can read the file."""
        self.write_text(name, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")

    def writer(self, name: str) -> JsonlWriter | ObjectJsonlWriter:
        """The appender of a JSONL file, one per file; on an object store it uploads every 10 s."""
        name = self._name(name)
        if name not in self._writers:
            if isinstance(self.store, LocalStore):
                self._writers[name] = JsonlWriter(self.store.at(name))
            else:
                self._writers[name] = ObjectJsonlWriter(self.store, name)
        return self._writers[name]

    def append_event(self, row: dict[str, Any]) -> None:
        self.writer(self.events).write(row)

    def reserve_space(self) -> None:
        """Keeps `RESERVE_BYTES` of a local disk for the files of the end of a run, if they are free."""
        if self.is_local:
            with contextlib.suppress(RunError):  # the disk is full already
                self.store.write_bytes(_RESERVE, b"\xff" * RESERVE_BYTES)

    def release_space(self) -> None:
        """Frees what `reserve_space` keeps."""
        if self.is_local:
            self.store.delete(_RESERVE)

    def flush(self) -> None:
        """Uploads rows that are not uploaded yet (object stores)."""
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """Uploads the rest and closes the appenders; the folder may be used again afterwards."""
        while self._writers:
            self._writers.popitem()[1].close()

    def truncate_metrics(self, step: int) -> int:
        """Removes everything after `step` from metrics.jsonl, experts.jsonl and routing/; returns the number of metrics
        rows removed. The files are replaced: an old writer that is still running appends to the unlinked file."""
        for entry in self.store.entries("routing"):
            if int(entry.name.removeprefix("step_").partition(".")[0]) > step:
                self.store.delete(f"routing/{entry.name}")
        self._truncate(self.experts, step)
        return self._truncate(self.metrics, step)

    def _truncate(self, path: str, step: int) -> int:
        name = self._name(path)
        writer = self._writers.pop(name, None)
        if writer is not None:
            writer.close()
        if not self.store.exists(name):
            return 0
        rows = self.read_rows(name)
        kept = [row for row in rows if row["step"] <= step]
        self.store.write_bytes(name, b"".join(to_line(row) for row in kept))
        return len(rows) - len(kept)

    def alive(self) -> dict[str, Any] | None:
        """The owner if its process still works on this run, else None."""
        return self._alive_unless(self.store.changed("result.json"))

    def _alive_unless(self, ended: float | None) -> dict[str, Any] | None:
        """`ended`: unix time of the end. One after the newest attempt started ends that attempt, even if its process
        (such as a notebook) is still alive."""
        owner = self.owner()
        began = self.store.changed(f"attempts/{self.current_attempt():04d}.json")
        if owner is None or (began is not None and ended is not None and ended > began):
            return None
        return owner if self.lives(owner) else None

    def finished(self) -> bool:
        """True after a `done`; a failed or interrupted run may be resumed."""
        return self.exists(self.result) and self.read_json(self.result).get("status") == "done"


def run_to_name(path: str) -> str:
    """What to type in the place of a path that is no run: the newest run inside it, next to it or in `runs`, or how to
    start one."""
    next_to_it = os.path.dirname(path.rstrip("/")) or "."
    for folder in dict.fromkeys((path, next_to_it, "runs")):
        with contextlib.suppress(OSError):  # no folder, not a local one, or one that may not be read
            runs = [entry for entry in os.scandir(folder) if os.path.isfile(os.path.join(entry.path, "job.json"))]
            if runs := [run for run in runs if not run.is_symlink()]:
                name = shlex.quote(os.path.normpath(max(runs, key=lambda run: run.stat().st_mtime).path))
                return f"did you mean {name}?" if folder == path else f"for example {name}"
    return "`raytrain train` starts a run and prints its folder"


def find_unfinished(save_dir: str, name: str, job: dict[str, Any]) -> RunFolder | None:
    """The newest run of this name and job that is neither done nor alive (`--resume auto`), or None."""
    store = open_store(save_dir)
    pattern = re.compile(re.escape(name) + r"-(\d{8}T\d{6}Z)(?:-(\d+))?")
    matches = [match for entry in store.entries("") if entry.is_dir and (match := pattern.fullmatch(entry.name))]
    found = [(match[1], int(match[2] or 1), match[0]) for match in matches]
    for _stamp, _number, folder in sorted(found, reverse=True):
        run = RunFolder(join(store.uri, folder))
        same = run.exists(run.job_mapping) and _comparable(run.recorded_job()) == _comparable(job)
        if same and not run.finished() and not run.alive():
            return run
    return None


def _comparable(job: dict[str, Any]) -> Any:
    # A job that contains Python objects (model.module) equals no other job, even if an address is reused.
    return plain(job, other=lambda value: f"{value!r} {secrets.token_hex(8)}")


def _new_folder(parent: LocalStore | ObjectStore, stem: str) -> str:
    """Makes `stem`, or `stem-2`, ... where it exists; on a local path two processes never share one."""
    number = 1
    while True:
        folder = stem if number == 1 else f"{stem}-{number}"
        if parent.is_local:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parent.at(folder))
                return folder
        elif not parent.exists(folder):
            parent.make_dir(folder)
            return folder
        number += 1


def _point_latest(parent: LocalStore | ObjectStore, folder: str) -> None:
    """Point `latest` to the folder: a relative symlink, replaced atomically, or a one-line file without symlinks."""
    if parent.is_local:
        temporary = parent.at(f".latest.{secrets.token_hex(4)}.tmp")
        try:
            os.symlink(folder, temporary)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
        else:
            os.replace(temporary, parent.at("latest"))
            return
    parent.write_bytes("latest", f"{folder}\n".encode())


# ---------------------------------------------------------------- mirror


UPLOAD_S = 10.0
"""Seconds between uploads."""


class MirroredFolder:
    """A local directory for files of a run that are appended to, such as logs.

    In a local run folder it is the directory itself. On an object store, which cannot append, it is a temporary
    directory, whose changed files are uploaded every `every_s` seconds and by `close`. An upload that fails is tried
    again by the next one; only `close` raises.

    The earlier content of files in `resumed` is kept, if they exist: a resumed process appends to them.
    """

    def __init__(self, run: RunFolder, name: str, *, resumed: tuple[str, ...] = (), every_s: float = UPLOAD_S) -> None:
        self._run, self._name, self._every_s = run, name, every_s
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.path: str = join(run.path, name)
        if run.is_local:
            os.makedirs(self.path, exist_ok=True)
            return
        self.path = tempfile.mkdtemp(prefix="raytrain-")
        for file in resumed:
            with contextlib.suppress(FileNotFoundError):
                Path(self.path, file).write_bytes(run.store.read_bytes(f"{name}/{file}"))
        threading.Thread(target=self._upload_often, daemon=True, name="upload").start()

    def close(self) -> None:
        """Upload what has changed and remove the temporary directory; may be called twice. Raises RunError: a file
        could not be uploaded."""
        if self._run.is_local or self._stop.is_set():
            return
        self._stop.set()
        try:
            self._upload(last=True)
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def _upload_often(self) -> None:
        while not self._stop.wait(self._every_s):
            with contextlib.suppress(RunError):  # tried again by the next upload
                self._upload()

    def _upload(self, *, last: bool = False) -> None:
        with self._lock:
            if self._stop.is_set() and not last:  # closed while this thread waited: the directory may be gone
                return
            for entry in sorted(os.scandir(self.path), key=lambda entry: entry.name):
                found = entry.stat()
                state = found.st_size, found.st_mtime_ns
                if self._uploaded.get(entry.name) != state:
                    self._run.store.write_bytes(f"{self._name}/{entry.name}", Path(entry.path).read_bytes())
                    self._uploaded[entry.name] = state


class SweepFolder(RunFolder):
    """The folder of one search (one Ray Tune run) on disk or in an object store."""

    trials = _file("trials.jsonl", "One row per trial.")
    best = _file("best.yaml", "The chosen job.")
    outcome = _file("tune.json", "The decisions with their reasons; written when the search is done.")
    picture = _file("tune.png", "Curves of the trials.")
    runs = _file("runs", "The run folders of its trials.")

    def alive(self) -> dict[str, Any] | None:
        """The owner if its command still works on this search, else None: a notebook outlives its command."""
        ended = max((row["time"] for row in self.read_rows(self.events) if row["kind"] == "driver_end"), default=None)
        return self._alive_unless(ended)

    def ended(self) -> list[dict[str, Any]]:
        return self.read_rows(self.trials)

    def standing(self) -> list[dict[str, Any]]:
        """The rows that a resumed search keeps: all but those of trials whose process died."""
        return [row for row in self.ended() if row["outcome"] != "died"]

    def again(self) -> list[dict[str, Any]]:
        """The last rows of the trials that ended in the death of their process: a resumed search repeats them."""
        return [row for row in {row["trial"]: row for row in self.ended()}.values() if row["outcome"] == "died"]

    def record(self, row: dict[str, Any]) -> None:
        writer = self.writer(self.trials)
        writer.write(row)
        writer.flush()

    def run_of(self, name: str) -> str | None:
        """The newest run folder of the run `name`; None if there is none."""
        names = [entry.name for entry in self.store.entries("runs") if entry.is_dir]
        found = [one for one in names if one.startswith(f"{name}-")]
        return f"{self.runs}/{max(found)}" if found else None


def shell_command(*words: str) -> str:
    """A command `raytrain VERB ...` to copy into a shell: every command that is printed or written is made here."""
    return shlex.join(["raytrain", *words])


def on_cluster(*words: str) -> str:
    """The same command through `submit`, if this process is the driver of a submitted job."""
    return shell_command(*["submit"] * is_submitted(), *words)


def resume_command(verb: str, folder: str, *keys: str) -> str:
    """How to resume a run or a search: on the cluster if it was submitted, from Python if its job has objects."""
    if verb == "train" and has_objects(RunFolder(folder)):
        return f"train(..., resume={json.dumps(folder, ensure_ascii=False)})"
    return on_cluster(verb, "--resume", folder, *keys)


def start_anew(run: RunFolder) -> str:
    """How to start a new run of the same job."""
    if has_objects(run):
        return "train(...) without resume starts a new run"
    return f"`{on_cluster('train', run.job)}` starts a new run of the same job"


def has_objects(run: RunFolder) -> bool:
    """Whether the job of a run has Python objects, which its folder cannot hold: only its program can resume it."""
    return run.exists(run.job) and PLACEHOLDER in run.read_text(run.job)
