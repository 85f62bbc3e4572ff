"""How far each worker is inside its unit, as small files beside the units': the driver reads them on any cluster."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field

from raytrain.errors import RunError
from raytrain.infer.units import Unit
from raytrain.runs.storage import ANSWERS, open_store

#: Seconds between two writes of one worker.
EVERY_S = 5.0
PREFIX = "progress-"


@dataclass
class WorkerProgress:
    """Writes the progress of one worker.

    Attributes:
        parts: the folder of the units' files.
        name: of the worker.
    """

    parts: str
    name: str
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
