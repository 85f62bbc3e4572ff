"""The trials of a search over batch size and precision: which one is next, and their process.

A trial is one measurement, in its own process and on its own device: one worker without Ray Train, experts in-process;
`train` confirms the result in the real process group.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ray.tune.search import Searcher

from cluster.wording import counted
from jobs.tuning.driver import TuneCommand
from jobs.tuning.trials import StatelessSearcher, TrialRecorder, ran_out, why
from raytrain.autotune.batch_search import next_proposals
from raytrain.autotune.batch_space import BatchSpace, Proposal, ProposalResult, SearchResults
from raytrain.autotune.found import signature_of
from raytrain.autotune.measurement import Measurement, from_json
from raytrain.autotune.precision import GateReport, gate_refusal
from raytrain.plan.choice import figure_text, size_text
from raytrain.plan.room import Need

if TYPE_CHECKING:
    import torch

FREED_S = 20.0
"""Seconds to wait for the memory of an earlier trial's process to be released."""


class BatchTrials(TrialRecorder):
    """Which trial is next on one kind of device, and how each one ended. The config of a trial is its number, its kind
    of device and the fields of its `Proposal`.

    Args:
        known: results of this search so far, which are not repeated, and to which new ones are added.
        kind: name of the kind of device; "" for a single kind.
        need: what a trial needs of a cluster.
    """

    def __init__(
        self, command: TuneCommand, space: BatchSpace, known: SearchResults, *, need: Need, kind: str = ""
    ) -> None:
        super().__init__(command)
        self._space, self._known, self._kind, self._need = space, known, kind, need
        self._most = command.spec.tune.max_trials
        self._requests: dict[int, Proposal] = {}
        self._number = max((row["trial"] for row in self.sweep.ended()), default=0)
        self._dead = {row["trial"]: row for row in self.sweep.again() if row.get("kind", "") == kind}

    def propose(self) -> dict[str, Any] | str | None:
        """The config of the next trial; None: wait for running trials; `Searcher.FINISHED`: there is none."""
        found = [] if self.stopping else next_proposals(self._space, self._known, list(self._requests.values()))
        number = self._number_of(found[0]) if found else None
        if number is None:
            return None if self._requests and not self.stopping else Searcher.FINISHED
        self._requests[number] = found[0]
        config = {"number": number, "kind": self._kind, **asdict(found[0])}
        self.proposed(config)
        return config

    def _number_of(self, wanted: Proposal) -> int | None:
        """The number of the trial in an earlier command whose process died, else the next one, if one may be made."""
        for number, row in self._dead.items():
            if (row["what"].partition(" + ")[0], row["precision"], row["micro_batch_size"]) == (
                wanted.aim[0], wanted.candidate.precision, wanted.candidate.micro_batch_size,
            ):  # fmt: skip
                del self._dead[number]
                return number
        if self._most is not None and self._number >= self._most:
            return None
        self._number += 1
        return self._number

    def text_of(self, config: dict[str, Any]) -> str:
        """Its kind of device, candidate, and what is measured."""
        wanted = from_json(Proposal, config)
        one = wanted.candidate
        return ", ".join(filter(None, (self._kind, one.precision, counted(one.micro_batch_size, "row"), wanted.what)))

    def need_of(self, config: dict[str, Any], *, started: bool) -> Need | None:
        """The place of its process."""
        return None if started else self._need

    def row_of(
        self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None, *, deaths: int
    ) -> tuple[dict[str, Any] | None, str]:
        """See `TrialRecorder`; a crash is a failed measurement."""
        wanted, found, outcome = from_json(Proposal, config), from_json(ProposalResult, result), "ok"
        one = wanted.candidate
        if found == ProposalResult():
            reason = "it ended without a result" if error is None else why(error, deaths=deaths)
            outcome = "died" if deaths else "out_of_memory" if ran_out(error) else "error"
            failed = Measurement(one, "out_of_memory" if ran_out(error) else "error", reason=reason)
            gate = GateReport(one.precision, self._space.lead, error=reason)
            found = ProposalResult(gate=gate) if wanted.gate_steps else ProposalResult(failed)
        elif error is not None:
            outcome = "error"
        elif found.measurement is not None:
            outcome = found.measurement.outcome
        row = {
            **({"kind": self._kind} if self._kind else {}),
            "what": wanted.what,
            "precision": one.precision,
            "micro_batch_size": one.micro_batch_size,
            "outcome": outcome,
            "budget_bytes": self._space.budget_bytes,
            **found.to_json(),
        }
        return row, result_text(found, self._space)

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """See `TrialRecorder`."""
        self._requests.pop(config["number"], None)
        super().ended(config, result, error)

    def recorded(self, row: dict[str, Any]) -> None:
        """What follows is proposed from it."""
        self._known.add(from_json(ProposalResult, row))


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


def result_text(found: ProposalResult, space: BatchSpace) -> str:
    """What a trial has measured, for its line."""
    if found.gate is not None:
        return gate_refusal(found.gate) or "loss and gradient norm agree"
    parts = []
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
        budget: bytes that a process may use; None if unknown.
        workers: number of workers of the run that the figures are for.
        channel: the `DriverChannel` actor through which the driver asks trials to exit.
    """

    job: Any
    data: Any
    folder: str
    prepared: str
    reference: str
    budget: int | None
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
    wanted = from_json(Proposal, config["trial"])
    found = run_proposal(probe, wanted, reference=settings.reference, budget=settings.budget)
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
