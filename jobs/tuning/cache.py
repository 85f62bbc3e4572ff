"""What earlier searches measured, kept under `<save.dir>/tune_cache` by all that a measurement depends on.

Measurements are kept and not answers, so that another global batch or another memory budget needs only what is new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.tuning.batch_known import Known
from raytrain.planning.values import size_text
from raytrain.record import to_line
from raytrain.run_folder import RunFolder
from raytrain.search.batch import BatchSpace, next_proposals
from raytrain.search.contest import Contest
from raytrain.search.measurement import Measurement

FOLDER = "tune_cache"


class Cache:
    """The measurements of one signature; empty with `tune.fresh`."""

    def __init__(self, folder: str, signature: Mapping[str, Any], *, budget: int | None, fresh: bool) -> None:
        self._store = RunFolder(folder)
        text = json.dumps(signature, sort_keys=True)
        self.key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.file = f"{self.key}.jsonl"
        self.rows = [] if fresh else still_true(self._store.read_rows(self.file), budget)
        self.known = Known(self.rows)

    @property
    def path(self) -> str:
        """The file."""
        return f"{self._store.path}/{self.file}"

    def hear(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add a sweep's own rows to what is known, but for those that are here already."""
        told = [row.get("time") for row in self.known.rows]
        for row in rows:
            if row.get("time") not in told:
                self.known.add(dict(row))

    def answers(self, space: BatchSpace) -> bool:
        """Whether nothing is left to measure."""
        known = self.known
        left = next_proposals(space, known.measurements, (), known.gates, known.contests)
        return bool(known.measurements) and not left

    def keep(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add what was measured now, without errors, unsteady times, and contests that not all came through: they may
        not come again."""
        old = [to_line(row) for row in self._store.read_rows(self.file)]
        new = [to_line(dict(row)) for row in rows if row["outcome"] not in ("error", "died") and _is_sound(row)]
        self._store.write_bytes(self.file, b"".join([*old, *(line for line in new if line not in old)]))


Caches = Mapping[str, Cache]
"""By the name of the kind of device; that of the only one is ""."""


def _is_sound(row: Mapping[str, Any]) -> bool:
    measured, contest = row.get("measurement"), row.get("contest")
    steady = measured is None or Measurement.from_json(measured).is_steady
    return steady and (contest is None or Contest.from_json(contest).valid)


def still_true(rows: Sequence[Mapping[str, Any]], budget: int | None) -> list[dict[str, Any]]:
    """Rows as they would come out under `budget` bytes: what took more is out of memory now, and what was out of memory
    under a smaller budget is not known any more."""
    kept = []
    for row in rows:
        measured, before = row.get("measurement"), row.get("budget_bytes")
        if measured is None:
            kept.append(dict(row))
        elif measured["outcome"] == "out_of_memory":
            if before is None or (budget is not None and budget <= before):
                kept.append(dict(row))
        elif budget is not None and (measured["peak_bytes"] or 0) > budget:
            why = f"a peak of {size_text(measured['peak_bytes'])}, the budget is {size_text(budget)}"
            kept.append({**row, "measurement": {**measured, "outcome": "out_of_memory", "reason": why}})
        else:
            kept.append(dict(row))
    return kept
