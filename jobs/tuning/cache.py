"""What earlier searches over batch size and precision have measured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cluster.environment import package_version
from jobs.job.facts import has_experts
from jobs.job.spec import JobSpec
from jobs.tuning.batch_search import BatchSearch, Kind
from raytrain.autotune.batch_space import ProposalResult, SearchResults
from raytrain.autotune.found import VERSIONS, make_signature
from raytrain.autotune.measurement import from_json
from raytrain.config.decode import encode
from raytrain.plan.choice import size_text
from raytrain.runs.folder import RunFolder
from raytrain.runs.records import to_line
from raytrain.runs.storage import join

if TYPE_CHECKING:
    from jobs.driver.check_job import Checked

CACHE = "tune_cache"
"""Folder in `save.dir` with the measurements of earlier searches."""


def of_kind(rows: Iterable[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The rows of trials.jsonl that were measured on this kind of device."""
    return [dict(row) for row in rows if row.get("kind", "") == kind]


class Cache:
    """The measurements of one key in `<save.dir>/tune_cache`; empty with `tune.fresh`.

    It keeps measurements, not decisions: another global batch or memory budget measures only what is missing.
    """

    def __init__(self, folder: str, key: Mapping[str, Any], *, budget: int | None, fresh: bool) -> None:
        self._store = RunFolder(folder)
        self.file = f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]}.jsonl"
        self.rows = [] if fresh else valid_rows(self._store.read_rows(self.file), budget)

    @property
    def path(self) -> str:
        """The file."""
        return join(self._store.path, self.file)

    def results_with(self, rows: Iterable[Mapping[str, Any]]) -> SearchResults:
        """What the rows of earlier searches and these rows of a sweep hold, without duplicates."""
        times = {row.get("time") for row in self.rows}
        return SearchResults.of_rows([*self.rows, *(row for row in rows if row.get("time") not in times)])

    def store(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Store new rows, except errors, unsteady times, gates that ran out of memory, and contests that did not all
        succeed: these may not recur."""
        old = [to_line(row) for row in self._store.read_rows(self.file)]
        new = [to_line(dict(row)) for row in rows if row["outcome"] not in ("error", "died") and _is_sound(row)]
        self._store.write_bytes(self.file, b"".join([*old, *(line for line in new if line not in old)]))


def cache_key(spec: JobSpec, search: BatchSearch, checked: Checked, kind: Kind) -> dict[str, Any]:
    """The facts that measurements and gates depend on, as far as the driver knows them.

    The global batch and the memory budget are not included.
    """
    alone, data = encode(search.alone_spec), checked.data_facts
    signature = make_signature(
        model=search.alone_spec.model,
        optim=spec.optim,
        loop=spec.loop,
        experts=search.alone_spec.experts if has_experts(spec) else None,
        parameters=checked.model_facts.parameters,
        longest_row=data.tokens_per_row or data.row_bytes,
        device=kind.device,
        device_bytes=kind.device_bytes,
        threads=int(search.alone_plan.value("threads", 0)),
        workers=search.workers,
        versions={name: package_version(name) or "" for name in VERSIONS},
    )
    sections = {name: alone[name] for name in ("seed", "data", "optim", "experts")}
    steps = {"max_steps": search.alone_plan.value("max_steps", None), "gate_steps": search.space.gate_steps}
    return {
        **signature.facts, **sections, **steps, "reference": search.space.lead,
        "fp32_layers": spec.precision.fp32_layers,
    }  # fmt: skip


def _is_sound(row: Mapping[str, Any]) -> bool:
    found = from_json(ProposalResult, row)
    contest = found.contest or ()
    measured = [one for one in (found.measurement, *contest) if one is not None]
    whole = all(one.outcome == "ok" for one in contest) and not (found.gate and found.gate.out_of_memory)
    return whole and all(one.is_steady for one in measured)


def valid_rows(rows: Iterable[Mapping[str, Any]], budget: int | None) -> list[dict[str, Any]]:
    """The rows that hold under a budget of `budget` bytes. A higher peak becomes out of memory; an out-of-memory under
    a smaller budget is dropped."""
    kept = []
    for row in rows:
        measured, before = row.get("measurement") or {}, row.get("budget_bytes")
        peak = measured.get("peak_bytes") or 0
        if measured.get("outcome") == "out_of_memory":
            if before is not None and (budget is None or budget > before):
                continue
        elif budget is not None and peak > budget:
            why = f"a peak of {size_text(peak)}, the budget is {size_text(budget)}"
            row = {**row, "measurement": {**measured, "outcome": "out_of_memory", "reason": why}}
        kept.append(dict(row))
    return kept
