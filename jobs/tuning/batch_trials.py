"""The trials of a search over batch size and precision: which one is next, and their process.

A trial is one measurement, in its own process and on its own device: one worker without Ray Train, experts in-process;
`train` confirms the result in the real process group.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ray.tune.search import Searcher

from cluster.wording import counted
from jobs.driver.progress import Activity
from jobs.tuning.batch_search import BatchSearch, Kind
from jobs.tuning.cache import KnownMeasurements
from jobs.tuning.trials import TrialRecorder, ran_out, why
from raytrain.autotune.batch_search import BatchSpace, Proposal
from raytrain.autotune.found import signature_of
from raytrain.autotune.loaders import LoaderRates, choose_count, measure_loaders
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.precision import GateReport, gate_refusal
from raytrain.plan.choice import figure_text, size_text
from raytrain.runs.folder import SweepFolder

if TYPE_CHECKING:
    import torch

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


class BatchTrials(TrialRecorder):
    """Which trial is next, and how each one ended; each kind of device has its own line of measurements.

    Args:
        known: by kind, measurements of earlier searches and of this one, which are not repeated.
        most: limit on the number of trials.
    """

    def __init__(
        self, search: BatchSearch, *, known: Mapping[str, KnownMeasurements], sweep: SweepFolder, activity: Activity,
        print_line: Callable[[str], None], most: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sweep, activity, print_line)
        self._search, self._known, self._most = search, known, most
        self._requests: dict[int, TrialRequest] = {}
        self._numbers = itertools.count(1 + max((row["trial"] for row in sweep.ended()), default=0))
        self._dead = {
            (row.get("kind", ""), _aim(row["what"]), row["precision"], row["micro_batch_size"]): row["trial"]
            for row in sweep.again()
        }
        self._no_loaders: set[str] = set()

    def propose(self) -> dict[str, Any] | str | None:
        """The next trial, of the kind with the most idle devices; None: wait for running trials; `Searcher.FINISHED`:
        there is none."""
        running = [one.kind for one in self._requests.values()]
        for kind in sorted(self._search.kinds, key=lambda one: running.count(one.name) - one.devices):
            wanted = None if self.stopping else self._next(kind)
            if wanted is None:
                continue
            number = self._dead.pop(wanted.key, None)  # it died in an earlier command
            if number is None:
                number = next(self._numbers)
                if self._most is not None and number > self._most:
                    continue
            wanted = self._requests[number] = replace(wanted, number=number)
            self.proposed(wanted.to_json())
            return wanted.to_json()
        return None if self._requests and not self.stopping else Searcher.FINISHED

    def _next(self, kind: Kind) -> TrialRequest | None:
        """The next trial of a kind without its number; None if nothing can be started now."""
        running = [one.proposal for one in self._requests.values() if one.kind == kind.name]
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

    def text_of(self, config: dict[str, Any]) -> str:
        """Its kind of device, candidate, and what is measured."""
        return TrialRequest.of(config).text

    def row_of(
        self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None, *, deaths: int
    ) -> tuple[dict[str, Any] | None, str]:
        """See `TrialRecorder`; a crash is a failed measurement."""
        wanted = TrialRequest.of(config)
        found = {name: result[name] for name in PARTS if result.get(name) is not None}
        died = deaths > 0 and not found
        found = found or self._failed(wanted, error, deaths=deaths)
        space = next(self._search.space_of(kind) for kind in self._search.kinds if kind.name == wanted.kind)
        outcome = "died" if died else "ok" if error is None else "error"
        row = {
            **({"kind": wanted.kind} if wanted.kind else {}),
            "what": wanted.what,
            "precision": wanted.candidate.precision,
            "micro_batch_size": wanted.candidate.micro_batch_size,
            "outcome": outcome if died else found.get("measurement", {}).get("outcome", outcome),
            "budget_bytes": space.budget_bytes,
            **found,
            "signature": result.get("signature"),
        }
        return row, result_text(row, space)

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """See `TrialRecorder`."""
        self._requests.pop(config["number"], None)
        super().ended(config, result, error)

    def recorded(self, row: dict[str, Any]) -> None:
        """What follows is proposed from it."""
        self._known[row.get("kind", "")].add(row)

    def _failed(self, wanted: TrialRequest, error: BaseException | None, *, deaths: int) -> dict[str, Any]:
        reason = "it ended without a result" if error is None else why(error, deaths=deaths)
        if wanted.loaders is not None:
            self._no_loaders.add(wanted.kind)  # only their count is missing; the search continues
            return {"reason": reason}
        if wanted.gate_steps:
            lead = self._search.space.lead
            return {"gate": GateReport(wanted.candidate.precision, lead, error=reason).to_json()}
        outcome = "out_of_memory" if ran_out(error) else "error"
        return {"measurement": Measurement(wanted.candidate, outcome, reason=reason).to_json()}


class BatchSearcher(Searcher):
    """Our search as a searcher of Ray Tune. Its state is in trials.jsonl."""

    def __init__(self, trials: BatchTrials) -> None:
        super().__init__(metric=None, mode=None)
        self._trials = trials

    def suggest(self, trial_id: str) -> Any:
        """The next trial's config, None to be asked again, or `Searcher.FINISHED`."""
        found = self._trials.propose()
        return {"trial": found} if isinstance(found, dict) else found

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Does nothing: the recorder also has the error."""

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: see the class."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing: see the class."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


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
    wanted = TrialRequest.of(config["trial"])
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
