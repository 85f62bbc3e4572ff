"""The trials of a search over batch size and precision: which one is next, their process, and what is known already.

A trial is one measurement, in its own process and on its own device: one worker without Ray Train, experts in-process;
`train` confirms the result in the real process group.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from cluster.environment import package_version
from cluster.wording import counted
from jobs.job.facts import has_experts
from jobs.job.spec import JobSpec
from jobs.tuning.batch_search import BatchSearch, Kind
from raytrain.autotune.batch_search import BatchDecision, BatchSpace, Contest, Proposal, decide, next_proposals
from raytrain.autotune.found import VERSIONS, make_signature, signature_of
from raytrain.autotune.loaders import LoaderRates, choose_count, measure_loaders
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.precision import GateReport, gate_refusal
from raytrain.config.decode import encode
from raytrain.errors import RunError
from raytrain.plan.choice import figure_text, size_text
from raytrain.plan.room import Need
from raytrain.runs.folder import RunFolder, SweepFolder
from raytrain.runs.records import to_line
from raytrain.runs.storage import join

if TYPE_CHECKING:
    import torch

    from jobs.driver.check_job import Checked
    from jobs.tuning.trials import TrialLines  # imports Ray

CACHE = "tune_cache"
"""Folder in `save.dir` with the measurements of earlier searches."""
FREED_S = 20.0
"""Seconds to wait for the memory of an earlier trial's process to be released."""
PARTS = ("measurement", "gate", "contest", "loaders")
"""What a trial reports: one of these, or a contest with a measurement of its winner's peak."""


@dataclass(frozen=True)
class TrialRequest:
    """One trial: a proposal of the search, or a measurement of 0 to `loaders` loader processes with `passes` per step;
    `kind` is the kind of device, if there are several."""

    number: int
    candidate: Candidate
    passes: int = 0
    with_memory: bool = False
    gate_steps: int = 0
    against: tuple[Candidate, ...] = ()
    loaders: int | None = None
    kind: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TrialRequest:
        """The inverse of `to_json`."""
        points = {"candidate": Candidate(**config["candidate"]),
                  "against": tuple(Candidate(**one) for one in config["against"])}  # fmt: skip
        return cls(**{**config, **points})

    def to_json(self) -> dict[str, Any]:
        """A plain mapping: the trial's config."""
        return asdict(self)

    @property
    def proposal(self) -> Proposal:
        """As the search proposed it."""
        return Proposal(self.candidate, self.passes, self.with_memory, self.gate_steps, self.against)

    @property
    def what(self) -> str:
        """What it measures, as lines and trials.jsonl say it."""
        if self.loaders is not None:
            return "loaders"
        if self.against:
            return "in turn + memory" if self.with_memory else "in turn"
        if self.gate_steps:
            return "gate"
        return "time + memory" if self.passes and self.with_memory else "time" if self.passes else "memory"

    @property
    def text(self) -> str:
        """The beginning of its lines."""
        one = self.candidate
        parts = [self.kind, one.precision, counted(one.micro_batch_size, "row"), self.what]
        return ", ".join(part for part in parts if part)

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What is measured, also if the trial is repeated."""
        return self.kind, _aim(self.what), self.candidate.precision, self.candidate.micro_batch_size


def _aim(what: str) -> str:
    """What a trial is for: a repetition may read memory in addition, or no more."""
    return what.partition(" + ")[0]


class KnownMeasurements:
    """All measurements so far of one kind of device, from rows of trials.jsonl."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self.measurements: list[Measurement] = []
        self.gates: list[GateReport] = []
        self.contests: list[Contest] = []
        self.loaders: LoaderRates | None = None
        self.signature: dict[str, Any] | None = None
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one row."""
        if row.get("measurement") is not None:
            self.measurements.append(Measurement.from_json(row["measurement"]))
        if row.get("gate") is not None:
            self.gates.append(GateReport.from_json(row["gate"]))
        if row.get("contest") is not None:
            self.contests.append(tuple(map(Measurement.from_json, row["contest"])))
        if row.get("loaders") is not None:
            self.loaders = LoaderRates.from_json(row["loaders"])
        self.signature = row.get("signature") or self.signature

    def proposals(self, space: BatchSpace, running: Sequence[Proposal] = ()) -> list[Proposal]:
        """What the search measures next."""
        return next_proposals(space, self.measurements, running, self.gates, self.contests)

    def decision(self, space: BatchSpace) -> BatchDecision:
        """What the search has found.

        Raises:
            RunError: nothing that was measured can run.
        """
        return decide(space, self.measurements, self.gates, self.contests)

    def without_loaders(self, space: BatchSpace, most: int | None) -> Candidate | None:
        """The chosen candidate if 0 to `most` loader processes still have to be measured with it, else None."""
        if most is None:
            return None
        try:
            chosen = self.decision(space).candidate
        except RunError:  # nothing can run: the decision says so at the end
            return None
        found = self.loaders
        return None if found is not None and (found.candidate, found.most) == (chosen, most) else chosen

    def is_complete(self, space: BatchSpace, most: int | None) -> bool:
        """Whether a search has nothing left to measure."""
        return bool(self.measurements) and not self.proposals(space) and self.without_loaders(space, most) is None


def of_kind(rows: Iterable[Mapping[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The rows of trials.jsonl that were measured on this kind of device."""
    return [dict(row) for row in rows if row.get("kind", "") == kind]


class BatchTrials:
    """`trials.Trials` of a search; each kind of device has its own line of measurements.

    Args:
        known: by kind, measurements of earlier searches and of this one, which are not repeated.
        needs: by kind, what a trial needs of the cluster.
        most: limit on the number of trials.
    """

    def __init__(
        self, search: BatchSearch, *, known: Mapping[str, KnownMeasurements], needs: Mapping[str, Need],
        sweep: SweepFolder, lines: TrialLines, most: int | None = None,
    ) -> None:  # fmt: skip
        self._search, self._known, self._sweep, self._lines, self._most = search, known, sweep, lines, most
        self._needs = needs
        self.stopping = False
        self._running: dict[int, TrialRequest] = {}
        self._began: dict[int, float] = {}
        self._numbers = itertools.count(1 + max((row["trial"] for row in sweep.ended()), default=0))
        self._dead = {
            (row.get("kind", ""), _aim(row["what"]), row["precision"], row["micro_batch_size"]): row["trial"]
            for row in sweep.again()
        }
        self._tried_again: set[int] = set()
        self._no_loaders: set[str] = set()

    def propose(self) -> dict[str, Any] | str | None:
        """The next trial, of the kind with the most idle devices; see `trials.Trials`."""
        running = [one.kind for one in self._running.values()]
        for kind in sorted(self._search.kinds, key=lambda one: running.count(one.name) - one.devices):
            wanted = None if self.stopping else self._next(kind)
            if wanted is None:
                continue
            if (number := self._dead.pop(wanted.key, None)) is not None:  # it died in an earlier command
                self._tried_again.add(number)
            else:
                number = next(self._numbers)
                if self._most is not None and number > self._most:
                    continue
            wanted = self._running[number] = replace(wanted, number=number)
            self._lines.propose(number, wanted.text, self._needs[kind.name])
            return wanted.to_json()
        return None if self._running and not self.stopping else "done"

    def _next(self, kind: Kind) -> TrialRequest | None:
        """The next trial of a kind without its number; None if nothing can be started now."""
        running = [one.proposal for one in self._running.values() if one.kind == kind.name]
        known, space = self._known[kind.name], self._search.space_of(kind)
        if found := known.proposals(space, running):
            return TrialRequest(0, **vars(found[0]), kind=kind.name)
        if running or kind.name in self._no_loaders or not any(one.outcome == "ok" for one in known.measurements):
            return None
        most = self._search.loaders.most
        chosen = known.without_loaders(space, most)
        if chosen is None:
            return None
        passes = math.ceil((space.rows_per_step or chosen.micro_batch_size) / chosen.micro_batch_size)
        return TrialRequest(0, chosen, passes=passes, loaders=most, kind=kind.name)

    def started(self, config: dict[str, Any]) -> None:
        """Called when the trial's process has started."""
        self._began[config["number"]] = time.time()
        self._lines.start(config["number"])

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """Record the result of a trial; a crash is recorded as a failed measurement."""
        from jobs.tuning.trials import has_died, keep_row

        wanted = TrialRequest.of(config)
        self._running.pop(wanted.number, None)
        if self.stopping:
            return
        found = {name: result[name] for name in PARTS if result.get(name) is not None}
        deaths = 1 + (wanted.number in self._tried_again) if has_died(error) and not found else 0
        found = found or self._failed(wanted, error, again=deaths > 1)
        space = next(self._search.space_of(kind) for kind in self._search.kinds if kind.name == wanted.kind)
        outcome = "died" if deaths else "ok" if error is None else "error"
        now = time.time()
        row = {
            "trial": wanted.number,
            **({"kind": wanted.kind} if wanted.kind else {}),
            "what": wanted.what,
            "precision": wanted.candidate.precision,
            "micro_batch_size": wanted.candidate.micro_batch_size,
            "outcome": outcome if deaths else found.get("measurement", {}).get("outcome", outcome),
            **({"deaths": deaths} if deaths else {}),
            "budget_bytes": space.budget_bytes,
            **found,
            "signature": result.get("signature"),
            "time": now,
            "wall_s": now - self._began.get(wanted.number, now),
        }
        keep_row(self._sweep, row, error)
        self._known[wanted.kind].add(row)
        self._lines.end(wanted.number, f"{wanted.text}: {result_text(row, space)}")

    def _failed(self, wanted: TrialRequest, error: BaseException | None, *, again: bool) -> dict[str, Any]:
        from jobs.tuning.trials import ran_out, why

        reason = "it ended without a result" if error is None else why(error)
        reason += ", and once before" if again else ""
        if wanted.loaders is not None:
            self._no_loaders.add(wanted.kind)  # only their count is missing; the search continues
            return {"reason": reason}
        if wanted.gate_steps:
            lead = self._search.space.lead
            return {"gate": GateReport(wanted.candidate.precision, lead, error=reason).to_json()}
        outcome = "out_of_memory" if ran_out(error) else "error"
        return {"measurement": Measurement(wanted.candidate, outcome, reason=reason).to_json()}


def result_text(row: Mapping[str, Any], space: BatchSpace) -> str:
    """What a trial has measured, for its line."""
    if row.get("gate") is not None:
        return gate_refusal(GateReport.from_json(row["gate"])) or "loss and gradient norm agree"
    if row.get("loaders") is not None:
        found = choose_count(LoaderRates.from_json(row["loaders"]))
        return f"{counted(found.value, 'loader process', 'loader processes')}: {found.reason}"
    parts = [row["reason"]] if row.get("reason") else []
    alone, contest = [row["measurement"]] if row.get("measurement") else [], row.get("contest") or []
    for one in map(Measurement.from_json, [*alone, *contest]):
        rows = space.rows_per_step or one.candidate.micro_batch_size
        name = f"{one.candidate.precision} x {one.candidate.micro_batch_size} " if contest else ""
        parts += [f"{name}{figure_text(rows / one.step_s(rows))} rows/s"] if one.pass_s else []
        parts += [f"peak {size_text(one.peak_bytes)}"] if one.peak_bytes else []
        parts += [f"{one.outcome.replace('_', ' ')}: {one.reason}"] if one.outcome != "ok" else []
    return ", ".join(parts)


# -- measurements of earlier searches -------------------------------------------------------------


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

    def known_with(self, rows: Iterable[Mapping[str, Any]]) -> KnownMeasurements:
        """The rows of earlier searches and these rows of a sweep, without duplicates."""
        times = {row.get("time") for row in self.rows}
        return KnownMeasurements([*self.rows, *(row for row in rows if row.get("time") not in times)])

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
    known = KnownMeasurements([row])
    measured = [*known.measurements, *(one for contest in known.contests for one in contest)]
    whole = all(one.outcome == "ok" for contest in known.contests for one in contest)
    return whole and all(one.is_steady for one in measured) and not any(gate.out_of_memory for gate in known.gates)


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


# -- the process of a trial -----------------------------------------------------------------------


@dataclass(frozen=True)
class BatchTrialSettings:
    """The settings that every trial of a sweep receives.

    Attributes:
        job: reference to the pickled TrainJob of one worker (it may name the user's classes).
        data: reference to data given as objects, or None.
        folder: working directory of the command, from which users' code is imported.
        prepared: the precision to prepare the session in; it has the master dtype of all candidates.
        reference: the precision that the numeric gate compares with.
        budgets: kind of device -> bytes that a process may use there; None if unknown.
        workers: number of workers of the run that the figures are for.
        channel: the `DriverChannel` actor through which the driver asks trials to exit.
    """

    job: Any
    data: Any
    folder: str
    prepared: str
    reference: str
    budgets: dict[str, int | None]
    workers: int
    channel: Any


def batch_trial(config: dict[str, Any], *, settings: BatchTrialSettings) -> None:
    """Ray Tune's trainable: measure what is asked for, report it once, and return."""
    import ray
    import torch
    from ray import cloudpickle, tune

    from raytrain.autotune.comparisons import run_proposal
    from raytrain.autotune.step_probe import StepProbe
    from raytrain.config.user_code import import_from
    from raytrain.data.sources.open import source_from_driver
    from raytrain.execution.driver_channel import on_stop_request
    from raytrain.train.memory.device import keep_freed_memory
    from raytrain.train.parallel.collectives import Workers
    from raytrain.train.session import Session

    keep_freed_memory()
    on_stop_request(settings.channel, lambda: os._exit(1))  # an unfinished measurement is useless
    if os.path.isdir(settings.folder):
        os.chdir(settings.folder)
    import_from(settings.folder)
    wanted = TrialRequest.of(config)
    job: Any = cloudpickle.loads(ray.get(settings.job))
    data: Any = None if settings.data is None else ray.get(settings.data)
    if job.planned("device") == "cuda":
        _await_freed_memory(torch.device("cuda", 0))
    source = source_from_driver(data, job.data, context=job.model.keys.get("context"))
    session = Session(job, workers=Workers(), source=source)
    session.prepare(settings.prepared)
    probe = StepProbe(session)
    if wanted.loaders is not None:
        rates = measure_loaders(probe, wanted.candidate, most=wanted.loaders, passes=wanted.passes)
        tune.report({"loaders": rates.to_json()})
        return
    taken = run_proposal(probe, wanted.proposal, reference=settings.reference, budget=settings.budgets[wanted.kind])
    found: dict[str, Any] = {name: part.to_json() for name in ("measurement", "gate") if (part := getattr(taken, name))}
    if taken.contest is not None:
        found["contest"] = [one.to_json() for one in taken.contest]
    tune.report({**found, "signature": signature_of(session, workers=settings.workers).to_json()})


def _await_freed_memory(device: torch.device) -> None:
    """Wait until the memory of a process that ended is released: until the free memory stops growing."""
    import torch

    ends = time.monotonic() + FREED_S
    free, _ = torch.cuda.mem_get_info(device)
    while time.monotonic() < ends:
        time.sleep(0.25)
        now, _ = torch.cuda.mem_get_info(device)
        if now <= free:
            return
        free = now
