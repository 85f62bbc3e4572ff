"""The trials of a search over batch size and precision: which one is next, and their process.

A trial is one measurement, in its own process and on its own device: one worker without Ray Train, experts in-process.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from ray import cloudpickle, tune
from ray.tune.search import Searcher

from cluster.wording import counted, plain_number
from jobs.tuning.driver import TuneCommand
from jobs.tuning.trials import StatelessSearcher, TrialRecorder, outcome_of, why
from raytrain.autotune.batch_search import Measured, Proposal, SearchResults, next_proposals
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.size_curve import BatchSpace
from raytrain.execution.driver_channel import on_stop_request
from raytrain.plan.choice import size_text
from raytrain.plan.room import Need


class BatchTrials(TrialRecorder):
    """Which trial is next, and how each one ended. The config of a trial is its number with the fields of its
    `Proposal`. What is `known` of this search so far is not repeated; new results are added to it."""

    def __init__(self, command: TuneCommand, space: BatchSpace, known: SearchResults, *, need: Need) -> None:
        super().__init__(command)
        self._space, self._known, self._need = space, known, need
        self._most = command.spec.tune.max_trials
        self._requests: dict[int, Proposal] = {}
        self._number = max((row["trial"] for row in self.sweep.ended()), default=0)
        self._dead = {row["trial"]: row for row in self.sweep.again()}

    def propose(self) -> dict[str, Any] | str | None:
        """The config of the next trial; None: wait for running trials; `Searcher.FINISHED`: there is none."""
        found = [] if self.stopping else next_proposals(self._space, self._known, list(self._requests.values()))
        number = self._number_of(found[0]) if found else None
        if number is None:
            return None if self._requests and not self.stopping else Searcher.FINISHED
        self._requests[number] = found[0]
        config = {"number": number, **asdict(found[0])}
        self.runs(config, started=False)
        return config

    def _number_of(self, wanted: Proposal) -> int | None:
        """The number of the trial in an earlier command whose process died, else the next one, if one may be made."""
        for number, row in self._dead.items():
            candidate = Candidate(row["precision"], row["micro_batch_size"])
            if (row["what"].partition(" + ")[0], candidate) == wanted.aim:
                del self._dead[number]
                return number
        if self._most is not None and self._number >= self._most:
            return None
        self._number += 1
        return self._number

    def text_of(self, config: dict[str, Any]) -> str:
        wanted = Proposal.from_json(config)
        one = wanted.candidate
        return f"{one.precision}, {counted(one.micro_batch_size, 'row')}, {wanted.what}"

    def need_of(self, config: dict[str, Any], *, started: bool) -> Need | None:
        return None if started else self._need

    def row_of(
        self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None
    ) -> tuple[dict[str, Any] | None, str]:
        """See `TrialRecorder`; a crash is a failed measurement."""
        wanted = Proposal.from_json(config)
        one, measured = wanted.candidate, tuple(Measurement.from_json(row) for row in result.get("measured", ()))
        ended = None if error is None else outcome_of(error)
        if not measured:
            reason = "it ended without a result" if error is None else why(error)
            measured = (Measurement(one, "out_of_memory" if ended == "out_of_memory" else "error", reason=reason),)
        row = {
            "what": wanted.what,
            "precision": one.precision,
            "micro_batch_size": one.micro_batch_size,
            "outcome": ended if ended == "died" else measured[0].outcome,
            "budget_bytes": self._space.budget_bytes,
            "measured": [asdict(each) for each in measured],
        }
        self._known.add(measured)  # what follows is proposed from it
        return row, result_text(measured, self._space)

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        self._requests.pop(config["number"], None)
        super().ended(config, result, error)


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


def result_text(measured: Measured, space: BatchSpace) -> str:
    parts = []
    for one in measured:
        rows = space.rows(one.candidate.micro_batch_size)
        name = f"{one.candidate.precision} x {one.candidate.micro_batch_size} " if len(measured) > 1 else ""
        parts += [f"{name}{plain_number(rows / one.step_s(rows))} rows/s"] if one.pass_s else []
        parts += [f"peak {size_text(one.peak_bytes)}"] if one.peak_bytes else []
        parts += [f"{one.outcome.replace('_', ' ')}: {one.reason}"] if one.outcome != "ok" else []
    return ", ".join(parts)


# -- the process of a trial -----------------------------------------------------------------------


def batch_trial(
    config: dict[str, Any], *, job: bytes, data: Any, folder: str, budget: int | None, channel: Any
) -> None:  # fmt: skip
    """Ray Tune's trainable: measure what is asked for, report it once, and return.

    Args:
        job: the pickled TrainJob of one worker, which may name the user's classes.
        data: data given as objects, or None.
        folder: working directory of the command, from which users' code is imported.
        channel: the `DriverChannel` actor through which the driver asks trials to exit.
    """
    from raytrain.autotune.step_probe import StepProbe
    from raytrain.config.user_code import import_from
    from raytrain.data.sources.open import source_from_driver
    from raytrain.train.memory.device import keep_freed_memory
    from raytrain.train.parallel.collectives import Workers
    from raytrain.train.session import Session

    keep_freed_memory()
    on_stop_request(channel, lambda: os._exit(1))  # an unfinished measurement is useless
    if os.path.isdir(folder):
        os.chdir(folder)
    import_from(folder)
    own: Any = cloudpickle.loads(job)
    source = source_from_driver(data, own.data, context=own.model.keys.get("context"))
    session = Session(own, workers=Workers(), source=source)
    wanted = Proposal.from_json(config["trial"])
    session.prepare("fp64" if wanted.candidate.precision == "fp64" else "fp32")  # the format of the weights
    measured = StepProbe(session).run_proposal(wanted, budget=budget)
    tune.report({"measured": [asdict(one) for one in measured]})
