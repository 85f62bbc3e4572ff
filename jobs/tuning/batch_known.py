"""What a search over batch size and precision knows, read from the rows of trials.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raytrain.search.contest import Contest
from raytrain.search.loaders import LoaderRates
from raytrain.search.measurement import Measurement
from raytrain.search.noise_scale import NoiseScale
from raytrain.search.precision import GateReport
from raytrain.search.space import BatchSpace


class Known:
    """All that was measured, from rows of trials.jsonl."""

    def __init__(self, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.rows: list[dict[str, Any]] = []
        self.measurements: list[Measurement] = []
        self.gates: list[GateReport] = []
        self.contests: list[Contest] = []
        self.noise: NoiseScale | None = None
        self.loaders: LoaderRates | None = None
        self.signature: dict[str, Any] | None = None
        for row in rows:
            self.add(dict(row))

    def add(self, row: dict[str, Any]) -> None:
        """One more row."""
        self.rows.append(row)
        if row.get("gate") is not None:
            self.gates.append(GateReport.from_json(row["gate"]))
        elif row.get("noise") is not None:
            self.noise = NoiseScale(**row["noise"])
        elif row.get("loaders") is not None:
            self.loaders = LoaderRates.from_json(row["loaders"])
        if row.get("measurement") is not None:
            self.measurements.append(Measurement.from_json(row["measurement"]))
        if row.get("contest") is not None:
            self.contests.append(Contest.from_json(row["contest"]))
        self.signature = row.get("signature") or self.signature


def weighed(space: BatchSpace, known: Known, *, goodput: bool) -> BatchSpace:
    """The space with the noise scale in it, where that decides and is known; infinite noise wastes no row."""
    rows = known.noise.rows if goodput and known.noise is not None and math.isfinite(known.noise.rows) else None
    return replace(space, noise_rows=rows)
