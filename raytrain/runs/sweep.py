"""The folder of a sweep: like a run's, with a line for each trial and what was found. Torch-free.

`trials.jsonl` is the truth: a trial that stands in it has ended and is never run again, but for one: a trial whose
process died, or could not begin, is measured once more when the sweep goes on. What it comes to then is a second row
of its number.
"""

from __future__ import annotations

from typing import Any

from raytrain.runs.folder import RunFolder


class SweepFolder(RunFolder):
    """One sweep on disk or in an object store."""

    @property
    def trials(self) -> str:
        """One row for each trial that has ended."""
        return f"{self.path}/trials.jsonl"

    @property
    def best(self) -> str:
        """The job with the values found, which `train` takes as it is."""
        return f"{self.path}/best.yaml"

    @property
    def outcome(self) -> str:
        """What was decided, with reasons, by the machine; there once the sweep is done."""
        return f"{self.path}/tune.json"

    @property
    def picture(self) -> str:
        """The trials drawn."""
        return f"{self.path}/tune.png"

    @property
    def runs(self) -> str:
        """Where trials that are whole runs have their run folders."""
        return f"{self.path}/runs"

    def ended(self) -> list[dict[str, Any]]:
        """The rows of trials.jsonl."""
        return self.read_rows(self.trials)

    def standing(self) -> list[dict[str, Any]]:
        """The rows that hold when the sweep goes on: all but first deaths."""
        return [row for row in self.ended() if row.get("deaths") != 1]

    def again(self) -> list[dict[str, Any]]:
        """First deaths that nothing has followed: what is to be measured once more."""
        rows = self.ended()
        last = {row["trial"]: place for place, row in enumerate(rows)}
        return [row for place, row in enumerate(rows) if row.get("deaths") == 1 and last[row["trial"]] == place]

    def record(self, row: dict[str, Any]) -> None:
        """One more trial has ended."""
        writer = self.writer(self.trials)
        writer.write(row)
        writer.flush()

    def run_of(self, name: str) -> str | None:
        """The newest run folder whose name begins so; None where there is none."""
        names = [entry.name for entry in self.store.entries("runs") if entry.is_dir]
        found = [one for one in names if one.startswith(f"{name}-")]
        return f"{self.runs}/{max(found)}" if found else None
