"""The trials of a search over batch size and precision: which one is next, and their process.

A trial is one measurement, in its own process and on its own device: one worker without Ray Train, experts in-process;
`train` confirms the result in the real process group.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ray.tune.search import Searcher

from cluster.wording import counted
from jobs.driver.progress import Activity
from jobs.tuning.batch_search import BatchSearch
from jobs.tuning.trials import StatelessSearcher, TrialRecorder, ran_out, why
from raytrain.autotune.batch_search import next_proposals
from raytrain.autotune.batch_space import BatchSpace, Proposal, ProposalResult, SearchResults
from raytrain.autotune.found import signature_of
from raytrain.autotune.loaders import choose_count
from raytrain.autotune.measurement import LoaderRates, Measurement, from_json
from raytrain.autotune.precision import GateReport, gate_refusal
from raytrain.plan.choice import figure_text, size_text
from raytrain.plan.room import Need
from raytrain.runs.folder import SweepFolder

if TYPE_CHECKING:
    import torch

FREED_S = 20.0
"""Seconds to wait for the memory of an earlier trial's process to be released."""


class BatchTrials(TrialRecorder):
    """Which trial is next, and how each one ended; each kind of device has its own line of measurements. The config of
    a trial is its number, its kind of device and the fields of its `Proposal`.

    Args:
        known: by kind, results of earlier searches and of this one, which are not repeated.
        needs: by kind, what a trial needs of a cluster.
        most: limit on the number of trials.
    """

    def __init__(
        self, search: BatchSearch, *, known: Mapping[str, SearchResults], needs: Mapping[str, Need],
        sweep: SweepFolder, activity: Activity, print_line: Callable[[str], None], most: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(sweep, activity, print_line)
        self._search, self._known, self._needs, self._most = search, known, needs, most
        self._requests: dict[int, tuple[str, Proposal]] = {}
        self._numbers = itertools.count(1 + max((row["trial"] for row in sweep.ended()), default=0))
        self._dead = {
            (row.get("kind", ""), row["what"].partition(" + ")[0], row["precision"], row["micro_batch_size"]): row[
                "trial"
            ]
            for row in sweep.again()
        }

    def propose(self) -> dict[str, Any] | str | None:
        """The config of the next trial, on the kind with the most idle devices; None: wait for running trials;
        `Searcher.FINISHED`: there is none."""
        running = [kind for kind, _ in self._requests.values()]
        for kind in sorted(self._search.kinds, key=lambda one: running.count(one.name) - one.devices):
            beside = [proposal for name, proposal in self._requests.values() if name == kind.name]
            found = next_proposals(self._search.space_of(kind), self._known[kind.name], beside)
            if self.stopping or not found:
                continue
            aim, one = found[0].aim
            number = self._dead.pop(
                (kind.name, aim, one.precision, one.micro_batch_size), None
            )  # in an earlier command
            if number is None:
                number = next(self._numbers)
                if self._most is not None and number > self._most:
                    continue
            self._requests[number] = kind.name, found[0]
            config = {"number": number, "kind": kind.name, **asdict(found[0])}
            self.proposed(config)
            return config
        return None if self._requests and not self.stopping else Searcher.FINISHED

    def text_of(self, config: dict[str, Any]) -> str:
        """Its kind of device, candidate, and what is measured."""
        wanted = from_json(Proposal, config)
        one = wanted.candidate
        parts = (config["kind"], one.precision, counted(one.micro_batch_size, "row"), wanted.what)
        return ", ".join(filter(None, parts))

    def need_of(self, config: dict[str, Any], *, started: bool) -> Need | None:
        """The place of its process."""
        return None if started else self._needs[config["kind"]]

    def row_of(
        self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None, *, deaths: int
    ) -> tuple[dict[str, Any] | None, str]:
        """See `TrialRecorder`; a crash is a failed measurement."""
        wanted, kind = from_json(Proposal, config), config["kind"]
        found, reason, outcome = from_json(ProposalResult, result), "", "ok"
        if found == ProposalResult():
            reason = "it ended without a result" if error is None else why(error, deaths=deaths)
            found, outcome = self._failed(wanted, error, reason), "died" if deaths else "error"
        elif error is not None:
            outcome = "error"
        if found.measurement is not None and outcome != "died":
            outcome = found.measurement.outcome
        space = next(self._search.space_of(one) for one in self._search.kinds if one.name == kind)
        row = {
            **({"kind": kind} if kind else {}),
            "what": wanted.what,
            "precision": wanted.candidate.precision,
            "micro_batch_size": wanted.candidate.micro_batch_size,
            "outcome": outcome,
            "budget_bytes": space.budget_bytes,
            **found.to_json(),
            **({"reason": reason} if wanted.loaders is not None and reason else {}),
        }
        return row, result_text(found, space, reason if wanted.loaders is not None else "")

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """See `TrialRecorder`."""
        self._requests.pop(config["number"], None)
        super().ended(config, result, error)

    def recorded(self, row: dict[str, Any]) -> None:
        """What follows is proposed from it."""
        self._known[row.get("kind", "")].add(from_json(ProposalResult, row))

    def _failed(self, wanted: Proposal, error: BaseException | None, reason: str) -> ProposalResult:
        """What a trial that ended without a result says about its candidate."""
        if wanted.loaders is not None:  # only their count is missing; the search ends without it
            return ProposalResult(loaders=LoaderRates(wanted.candidate, wanted.loaders))
        if wanted.gate_steps:
            return ProposalResult(gate=GateReport(wanted.candidate.precision, self._search.space.lead, error=reason))
        outcome = "out_of_memory" if ran_out(error) else "error"
        return ProposalResult(Measurement(wanted.candidate, outcome, reason=reason))


class BatchSearcher(StatelessSearcher):
    """Our search as a searcher of Ray Tune."""

    def __init__(self, trials: BatchTrials) -> None:
        super().__init__(metric=None, mode=None)
        self._trials = trials

    def suggest(self, trial_id: str) -> Any:
        """The next trial's config, None to be asked again, or `Searcher.FINISHED`."""
        found = self._trials.propose()
        return {"trial": found} if isinstance(found, dict) else found

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Does nothing: the recorder also has the error."""


def result_text(found: ProposalResult, space: BatchSpace, reason: str) -> str:
    """What a trial has measured, for its line."""
    if found.gate is not None:
        return gate_refusal(found.gate) or "loss and gradient norm agree"
    if found.loaders is not None and found.loaders.rates:
        count = choose_count(found.loaders)
        return f"{counted(count.value, 'loader process', 'loader processes')}: {count.reason}"
    parts = [reason] if reason else []
    for one in filter(None, (found.measurement, *(found.contest or ()))):
        rows = space.rows(one.candidate.micro_batch_size)
        name = f"{one.candidate.precision} x {one.candidate.micro_batch_size} " if found.contest else ""
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
    job: Any = cloudpickle.loads(ray.get(settings.job))
    data: Any = None if settings.data is None else ray.get(settings.data)
    if job.planned("device") == "cuda":
        _await_freed_memory(torch.device("cuda", 0))
    source = source_from_driver(data, job.data, context=job.model.keys.get("context"))
    session = Session(job, workers=Workers(), source=source)
    session.prepare(settings.prepared)
    probe = StepProbe(session)
    trial = config["trial"]
    found = run_proposal(
        probe, from_json(Proposal, trial), reference=settings.reference, budget=settings.budgets[trial["kind"]]
    )
    tune.report(replace(found, signature=asdict(signature_of(session, workers=settings.workers))).to_json())


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
