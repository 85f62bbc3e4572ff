"""Measurements of earlier searches, stored in `<save.dir>/tune_cache` under a hash of what a measurement depends on.

The cache keeps measurements, not decisions: another global batch or memory budget measures only what is missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cluster.environment import package_version
from jobs.job.facts import has_experts
from jobs.job.spec import JobSpec
from jobs.tuning.batch.device_kinds import Kind
from jobs.tuning.batch.known import KnownMeasurements
from raytrain.autotune.search.batch_size import next_proposals
from raytrain.autotune.search.head_to_head import HeadToHead
from raytrain.autotune.search.measurement import Measurement
from raytrain.autotune.search.precision import GateReport
from raytrain.autotune.search.signature import make_signature
from raytrain.autotune.search.space import BatchSpace
from raytrain.config.decode import encode
from raytrain.plan.text import size_text
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import to_line
from raytrain.runs.storage import join

if TYPE_CHECKING:
    from jobs.driver.checks.job import Checked
    from jobs.tuning.batch.search import BatchSearch

FOLDER = "tune_cache"


class Cache:
    """The measurements of one signature; empty with `tune.fresh`.

    Args:
        gate: what the result of a numeric gate depends on in addition: another learning rate changes the updates,
            but not times and memory peaks.
    """

    def __init__(
        self, folder: str, signature: Mapping[str, Any], *, budget: int | None, fresh: bool,
        gate: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._store = RunFolder(folder)
        self.key, self._gate = _hash_of(signature), _hash_of(gate or {})
        self.file = f"{self.key}.jsonl"
        self.rows = [] if fresh else valid_rows(self._store.read_rows(self.file), budget, gate=self._gate)
        self.known = KnownMeasurements(self.rows)

    @property
    def path(self) -> str:
        """The file."""
        return join(self._store.path, self.file)

    def add_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of a sweep that are not in the cache yet."""
        self.known = self.known_with(rows)

    def known_with(self, rows: Sequence[Mapping[str, Any]]) -> KnownMeasurements:
        """The rows of earlier searches and these rows of a sweep, without duplicates."""
        times = [row.get("time") for row in self.rows]
        return KnownMeasurements([*self.rows, *(row for row in rows if row.get("time") not in times)])

    def is_complete(self, space: BatchSpace) -> bool:
        """Whether a search over this space has nothing left to measure."""
        known = self.known
        left = next_proposals(space, known.measurements, (), known.gates, known.contests)
        return bool(known.measurements) and not left

    def store(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Store new rows, except errors, unsteady times, gates that ran out of memory, and contests that did not all
        succeed: these may not recur."""
        old = [to_line(row) for row in self._store.read_rows(self.file)]
        kept = [row for row in rows if row["outcome"] not in ("error", "died") and _is_sound(row)]
        new = [to_line({**row, **({"gate_of": self._gate} if row.get("gate") else {})}) for row in kept]
        self._store.write_bytes(self.file, b"".join([*old, *(line for line in new if line not in old)]))


Caches = Mapping[str, Cache]
"""Caches by the name of the kind of device, "" for a single kind."""


def cache_key(spec: JobSpec, search: BatchSearch, checked: Checked, kind: Kind) -> dict[str, Any]:
    """The facts that a measurement depends on, as far as the driver knows them.

    The global batch and the memory budget are not included.
    """
    data = checked.data_facts
    signature = make_signature(
        model=search.alone_spec.model,
        optim=spec.optim,
        loop=spec.loop,
        experts=search.alone_spec.experts if has_experts(spec) else None,
        parameters=checked.model_facts.parameters,
        longest_row=data.tokens_per_row or data.row_bytes,
        device=kind.device,
        device_bytes=kind.device_bytes,
        threads=int(search.alone_plan.threads.value),  # type: ignore[union-attr]
        workers=search.workers,
        versions={name: package_version(name) or "" for name in ("torch", "raytrain")},
    )
    return {**signature.facts, "data": encode(search.alone_spec)["data"], "fp32_layers": spec.precision.fp32_layers}


def gate_key(search: BatchSearch) -> dict[str, Any]:
    """The facts that the result of a numeric gate depends on in addition: the settings that determine its weight
    updates and the loss it is compared with."""
    spec, max_steps = encode(search.alone_spec), search.alone_plan.max_steps.value  # type: ignore[union-attr]
    sections = {name: spec[name] for name in ("seed", "optim", "experts")}
    steps = {"max_steps": max_steps, "gate_steps": search.space.gate_steps}
    return {**sections, **steps, "reference": search.space.lead}


def _hash_of(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _is_sound(row: Mapping[str, Any]) -> bool:
    measured, contest, gate = row.get("measurement"), row.get("contest"), row.get("gate")
    if gate is not None and GateReport.from_json(gate).out_of_memory:
        return False
    steady = measured is None or Measurement.from_json(measured).is_steady
    return steady and (contest is None or HeadToHead.from_json(contest).valid)


def valid_rows(rows: Sequence[Mapping[str, Any]], budget: int | None, *, gate: str = "") -> list[dict[str, Any]]:
    """The rows that hold under a budget of `budget` bytes. A higher peak becomes out of memory; an out-of-memory under
    a smaller budget is dropped, like a gate with another hash."""
    kept = []
    for row in rows:
        measured, before = row.get("measurement"), row.get("budget_bytes")
        if row.get("gate") is not None and row.get("gate_of") != gate:
            continue
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
