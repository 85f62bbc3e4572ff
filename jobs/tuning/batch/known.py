"""The measurements that a search over batch size and precision has so far, read from the rows of trials.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from raytrain.autotune.search.batch_size import next_proposals
from raytrain.autotune.search.head_to_head import HeadToHead
from raytrain.autotune.search.loaders import LoaderRates
from raytrain.autotune.search.measurement import Measurement
from raytrain.autotune.search.noise_scale import NoiseScale
from raytrain.autotune.search.precision import GateReport
from raytrain.autotune.search.space import BatchSpace

IN_TURN = "in turn"
"""Name of a head-to-head comparison in the table and in trials.jsonl."""

LOADERS = "loaders"
"""Name of a measurement of loader processes, likewise."""


class TrialKey(NamedTuple):
    """Identifies what a trial measures, independently of its number of passes."""

    precision: str
    micro_batch_size: int
    noise: bool
    gate: bool
    loaders: bool
    in_turn: bool


class KnownMeasurements:
    """All measurements so far, from rows of trials.jsonl."""

    def __init__(self, rows: Sequence[Mapping[str, Any]] = ()) -> None:
        self.rows: list[dict[str, Any]] = []
        self.measurements: list[Measurement] = []
        self.gates: list[GateReport] = []
        self.contests: list[HeadToHead] = []
        self.noise: NoiseScale | None = None
        self.loaders: LoaderRates | None = None
        self.signature: dict[str, Any] | None = None
        for row in rows:
            self.add(dict(row))

    def add(self, row: dict[str, Any]) -> None:
        """Add one row."""
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
            self.contests.append(HeadToHead.from_json(row["contest"]))
        self.signature = row.get("signature") or self.signature


def with_noise_scale(space: BatchSpace, known: KnownMeasurements, *, goodput: bool) -> BatchSpace:
    """The space with the measured noise scale if goodput decides; without it if the scale is unknown or infinite."""
    rows = known.noise.rows if goodput and known.noise is not None and math.isfinite(known.noise.rows) else None
    return replace(space, noise_rows=rows)


def trial_key(row: Mapping[str, Any]) -> TrialKey:
    """The key of a row of trials.jsonl."""
    what = row["what"]
    kinds = (what == "noise", what == "gate", what == LOADERS, what.startswith(IN_TURN))
    return TrialKey(row["precision"], row["micro_batch_size"], *kinds)


def still_needed(died: Sequence[Mapping[str, Any]], space: BatchSpace, known: KnownMeasurements) -> list[int]:
    """Numbers of the trials that died and that a search with these measurements still needs."""
    everything = replace(space, devices=len(space.precisions) * len(space.sizes))
    found = next_proposals(everything, known.measurements, (), known.gates, known.contests)
    points = ((one, one.candidate) for one in found)
    wanted = {
        TrialKey(point.precision, point.micro_batch_size, False, one.gate_steps > 0, False, bool(one.against))
        for one, point in points
    }

    def lacking(what: TrialKey) -> bool:
        if what.noise or what.loaders:
            return (known.noise if what.noise else known.loaders) is None
        return what in wanted

    return [row["trial"] for row in died if lacking(trial_key(row))]
