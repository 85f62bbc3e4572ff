"""The lease on a run folder: numbered attempts, their owners, and whether one is still alive. Torch-free.

`attempts/0000.json` names the process that created the run folder, `attempts/0001.json` the owner of the first attempt,
and so on. There is one writer: an attempt that finds a newer number than its own ends before it writes.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from raytrain.runs.records import plain
from raytrain.runs.storage import LocalStore, ObjectStore

HEARTBEAT_S = 30.0
_BEAT_EVERY_S = 5.0
_HEARTBEAT = "attempts/heartbeat.json"


def process_start(pid: int) -> int | None:
    """Start time of a live process of this machine in clock ticks since boot; None if it is dead or a zombie.

    Together with the pid it identifies a process uniquely: pids are reused, start times are not.
    """
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
    """The `attempts/` directory of one run folder."""

    def __init__(self, store: LocalStore | ObjectStore) -> None:
        self._store = store
        self._last_beat = -_BEAT_EVERY_S

    def found(self, owner: dict[str, Any]) -> None:
        """Records the creator of the run folder."""
        self._store.create_exclusive("attempts/0000.json", _record(owner))

    def take_next(self, owner: dict[str, Any]) -> int:
        """Claims the next number (from 1) for `owner`; concurrent callers get different numbers."""
        number = self.current() + 1
        while not self._store.create_exclusive(f"attempts/{number:04d}.json", _record(owner)):
            number += 1
        return number

    def current(self) -> int:
        """The newest number; 0 before the first attempt."""
        names = (entry.name for entry in self._store.entries("attempts"))
        return max((int(name[:-5]) for name in names if name[:-5].isdigit()), default=0)

    def owner(self) -> dict[str, Any] | None:
        """The owner {host, pid, start} of the newest attempt, or the creator of the folder before the first."""
        return self._read(f"attempts/{self.current():04d}.json")

    def owner_of(self, number: int) -> dict[str, Any] | None:
        """The owner of attempt `number`, {host, pid, start}; None if the attempt does not exist."""
        record = self._read(f"attempts/{number:04d}.json")
        return None if record is None else {name: record[name] for name in ("host", "pid", "start")}

    def beat(self) -> None:
        """Writes the heartbeat, unless it was written less than 5 s ago."""
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_EVERY_S:
            self._last_beat = now
            row = {"attempt": self.current(), "time": time.time()}
            self._store.write_bytes(_HEARTBEAT, json.dumps(row).encode())

    def alive(self, *, ended: float | None) -> dict[str, Any] | None:
        """The owner if its process still works on this run, else None.

        On the owner's host the process itself is checked; on other hosts a heartbeat younger than 30 s counts.

        Args:
            ended: when the result was written (unix seconds). A result written after the newest attempt started
                ends that attempt, even if its process (such as a notebook) is still alive.
        """
        owner = self.owner()
        if owner is None:
            return None
        began = self._store.changed(f"attempts/{self.current():04d}.json")
        if began is not None and ended is not None and ended > began:
            return None
        return owner if self.lives(owner) else None

    def lives(self, owner: dict[str, Any]) -> bool:
        """Whether an owner's process is alive, on its own host by the process itself, on others by the heartbeat."""
        if owner["host"] == socket.gethostname():
            start = process_start(owner["pid"])
            return start is not None and start == owner["start"]
        beat = self._read(_HEARTBEAT)
        return beat is not None and time.time() - beat["time"] < HEARTBEAT_S

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return json.loads(self._store.read_bytes(name))
        except FileNotFoundError:
            return None


def _record(owner: dict[str, Any]) -> bytes:
    # The nonce makes two records of one owner differ, so that a race on an object store has one winner.
    return json.dumps(plain({**owner, "time": time.time(), "nonce": secrets.token_hex(8)})).encode()
