"""The search folder: a run folder with one row per trial and the result of the search. Torch-free.

`trials.jsonl` is authoritative: a trial with a row in it has ended and is not run again. The one exception is a trial
whose process died or could not start: it runs once more when the search resumes, and its result becomes a second row
with the same number.
"""

from __future__ import annotations

from typing import Any

from raytrain.runs.folder import RunFolder
from raytrain.runs.storage import join


class SweepFolder(RunFolder):
    """The folder of one search (one Ray Tune run) on disk or in an object store."""

    @property
    def trials(self) -> str:
        """One row for each trial that has ended."""
        return join(self.path, "trials.jsonl")

    @property
    def best(self) -> str:
        """The job with the values found; `train` can run it unchanged."""
        return join(self.path, "best.yaml")

    @property
    def outcome(self) -> str:
        """The decisions with their reasons, as JSON; written when the search is done."""
        return join(self.path, "tune.json")

    @property
    def picture(self) -> str:
        """The picture of the trials."""
        return join(self.path, "tune.png")

    @property
    def runs(self) -> str:
        """The directory with the run folders of trials that are complete runs."""
        return join(self.path, "runs")

    def alive(self) -> dict[str, Any] | None:
        """The owner if its command still works on this search, else None: a notebook outlives its command."""
        rows = self.read_rows(self.events) if self.exists(self.events) else []
        ended = max((row["time"] for row in rows if row["kind"] == "driver_end"), default=None)
        return self._attempts.alive(ended=ended)

    def ended(self) -> list[dict[str, Any]]:
        """The rows of trials.jsonl."""
        return self.read_rows(self.trials)

    def standing(self) -> list[dict[str, Any]]:
        """The rows that a resumed search keeps: all except first deaths."""
        return [row for row in self.ended() if row.get("deaths") != 1]

    def again(self) -> list[dict[str, Any]]:
        """First deaths without a later row for the same trial: the trials to run again."""
        rows = self.ended()
        last = {row["trial"]: place for place, row in enumerate(rows)}
        return [row for place, row in enumerate(rows) if row.get("deaths") == 1 and last[row["trial"]] == place]

    def record(self, row: dict[str, Any]) -> None:
        """Appends the row of a trial that has ended."""
        writer = self.writer(self.trials)
        writer.write(row)
        writer.flush()

    def run_of(self, name: str) -> str | None:
        """The newest run folder of the run `name`; None if there is none."""
        names = [entry.name for entry in self.store.entries("runs") if entry.is_dir]
        found = [one for one in names if one.startswith(f"{name}-")]
        return f"{self.runs}/{max(found)}" if found else None
