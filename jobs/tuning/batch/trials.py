"""The trials of a search over batch size and precision, on the driver: proposes the next one and records results."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from jobs.tuning.batch.device_kinds import of_kind
from jobs.tuning.batch.known import IN_TURN, LOADERS, KnownMeasurements, TrialKey, trial_key, with_noise_scale
from jobs.tuning.batch.loaders import NONE, LoaderSearch
from jobs.tuning.searcher import DONE, has_died, keep_traceback, ran_out, why
from jobs.tuning.table import SweepTable, batch_cells, batch_text
from raytrain.autotune.search.batch_size import next_proposals, proposals_left
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.precision import GateReport
from raytrain.autotune.search.space import BatchSpace, Proposal
from raytrain.runs.sweep import SweepFolder


@dataclass(frozen=True)
class TrialRequest:
    """One trial: a proposal of the search, a measurement of the noise scale (`noise`), or one of 0 to `loaders` loader
    processes, with `passes` per step; `kind` is the kind of device, if there are several."""

    number: int
    candidate: Candidate
    passes: int = 0
    with_memory: bool = False
    gate_steps: int = 0
    against: tuple[Candidate, ...] = ()
    noise: bool = False
    loaders: int | None = None
    kind: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TrialRequest:
        """The inverse of `to_json`."""
        names = ("number", "passes", "with_memory", "gate_steps", "noise", "loaders", "kind")
        points = {"candidate": Candidate(**config["candidate"]),
                  "against": tuple(Candidate(**one) for one in config["against"])}  # fmt: skip
        return cls(**points, **{name: config[name] for name in names})

    def to_json(self) -> dict[str, Any]:
        """A plain mapping: the trial's config."""
        return asdict(self)

    @property
    def proposal(self) -> Proposal:
        """As the search proposed it."""
        return Proposal(self.candidate, self.passes, self.with_memory, self.gate_steps, self.against)

    @property
    def what(self) -> str:
        """What it measures, as shown in the table."""
        if self.noise:
            return "noise"
        if self.loaders is not None:
            return LOADERS
        if self.against:
            return f"{IN_TURN} + memory" if self.with_memory else IN_TURN
        if self.gate_steps:
            return "gate"
        return "time + memory" if self.passes and self.with_memory else "time" if self.passes else "memory"


KINDS = ("measurement", "gate", "contest", "noise", "loaders")
"""What a trial reports: one of these, or a contest with a measurement of its winner's peak."""


class Numbers:
    """Numbers the trials of a search, across all kinds of devices."""

    def __init__(self, sweep: SweepFolder) -> None:
        self.last = max((row["trial"] for row in sweep.ended()), default=0)


class BatchTrials:
    """`searcher.Trials` of a search on one kind of device.

    Args:
        numbers: numbers the trials.
        kind: the kind of device, "" for a single kind.
        known: measurements of earlier searches and of this one, which are not repeated.
        noise_at: the candidate with which to measure the noise scale; None: not measured.
        goodput: measure the noise scale first, since it decides; otherwise last, as advice.
        loaders: how many processes may read the data; measured with the chosen candidate.
        most: limit on the number of trials.
    """

    def __init__(
        self, space: BatchSpace, *, known: KnownMeasurements, sweep: SweepFolder, table: SweepTable, numbers: Numbers,
        kind: str = "", noise_at: Candidate | None = None, goodput: bool = False, most: int | None = None,
        loaders: LoaderSearch = NONE,
    ) -> None:  # fmt: skip
        self.space, self.known = space, known
        self._sweep, self._table, self._noise_at, self._most = sweep, table, noise_at, most
        self._goodput, self.stopping, self._loaders = goodput, False, loaders
        self._running: dict[int, TrialRequest] = {}
        self._began: dict[int, float] = {}
        self._numbers, self._kind = numbers, kind
        for row in of_kind(sweep.standing(), kind):
            table.end(row["trial"], batch_cells(row, space), batch_text(row, space))
        self._dead = {trial_key(row): row["trial"] for row in of_kind(sweep.again(), kind)}
        self._tried_again: set[int] = set()

    @property
    def idle(self) -> int:
        """Number of idle devices."""
        return self.space.devices - len(self._running)

    @property
    def awaits_noise(self) -> bool:
        """Whether the noise scale decides and is not measured yet."""
        return self._goodput and self._noise() is not None

    def propose(self) -> dict[str, Any] | str | None:
        """The config of the next trial; see `searcher.Trials`."""
        if self.stopping:
            return DONE
        wanted = self.next()
        if wanted is None:
            return None if self._running else DONE
        self._numbers.last = max(self._numbers.last, wanted.number)
        if self._dead.pop(_key_of(wanted), None) is not None:
            self._tried_again.add(wanted.number)
        self._running[wanted.number] = wanted
        one = wanted.candidate
        cells = [wanted.what, one.precision, str(one.micro_batch_size)]
        self._table.propose(wanted.number, [wanted.kind, *cells] if wanted.kind else cells, left=self._left_text())
        return wanted.to_json()

    def _left_text(self) -> str:
        left = self.left() - len(self._running)
        if self._most is not None:
            left = min(left, self._most - self._numbers.last)
        return f"about {left} more after it" if left > 0 else "probably the last one"

    def left(self) -> int:
        """About how many trials, running ones included, are to be measured yet, as far as is known now."""
        known = self.known
        space = with_noise_scale(self.space, known, goodput=self._goodput)
        others = (self._noise() is not None) + (self._loaders.ask(space, known, self._goodput) is not None)
        return proposals_left(space, known.measurements, known.gates, known.contests) + others

    def next(self) -> TrialRequest | None:
        """The next trial; None if nothing can be started now."""
        noise = self._noise()
        if noise is not None and self.awaits_noise:
            return None if self._running else self._numbered(noise)
        running = [one.proposal for one in self._running.values()]
        space = with_noise_scale(self.space, self.known, goodput=self._goodput)
        found = next_proposals(space, self.known.measurements, running, self.known.gates, self.known.contests)
        if found:
            return self._numbered(TrialRequest(0, **vars(found[0])))
        if self._running or not any(one.outcome == "ok" for one in self.known.measurements):
            return None
        last = noise or self._reading()
        return None if last is None else self._numbered(last)

    def _reading(self) -> TrialRequest | None:
        """A measurement of loader processes with the chosen candidate."""
        chosen = self._loaders.ask(self.space, self.known, self._goodput)
        if chosen is None:
            return None
        rows = self.space.rows_per_step or chosen.micro_batch_size
        return TrialRequest(0, chosen, passes=math.ceil(rows / chosen.micro_batch_size), loaders=self._loaders.most)

    def _noise(self) -> TrialRequest | None:
        if self._noise_at is None or self.known.noise is not None:
            return None
        return TrialRequest(0, self._noise_at, noise=True)

    def _numbered(self, wanted: TrialRequest) -> TrialRequest | None:
        """The request with a number: that of the trial it repeats if that one died in an earlier command, else the
        next one; None beyond the limit."""
        number = self._dead.get(_key_of(wanted), self._numbers.last + 1)
        over = self._most is not None and number > self._most
        return None if over else replace(wanted, number=number, kind=self._kind)

    def started(self, config: dict[str, Any]) -> None:
        """Called when the trial's process has started."""
        wanted = TrialRequest.of(config)
        self._began[wanted.number] = time.time()
        self._table.start(wanted.number)

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """Record the result of a trial; a crash is recorded as a failed measurement."""
        wanted = TrialRequest.of(config)
        self._running.pop(wanted.number, None)
        if self.stopping:
            return
        found = {name: result[name] for name in KINDS if result.get(name) is not None}
        deaths = 1 + (wanted.number in self._tried_again) if has_died(error) and not found else 0
        if not found:
            found = self._failed(wanted, error, again=deaths > 1)
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
            "budget_bytes": self.space.budget_bytes,
            **found,
            "signature": result.get("signature"),
            "time": now,
            "wall_s": now - self._began.get(wanted.number, now),
        }
        keep_traceback(self._sweep, wanted.number, error)
        self._sweep.record(row)
        self.known.add(row)
        self._table.end(wanted.number, batch_cells(row, self.space), batch_text(row, self.space))

    def _failed(self, wanted: TrialRequest, error: BaseException | None, *, again: bool) -> dict[str, Any]:
        reason = "it ended without a result" if error is None else why(error)
        reason += ", and once before" if again else ""
        if wanted.noise:
            self._noise_at = None  # only advice is missing; the search continues
            return {"reason": reason}
        if wanted.loaders is not None:
            self._loaders = LoaderSearch(None, reason)
            return {"reason": reason}
        if wanted.gate_steps:
            return {"gate": GateReport(wanted.candidate.precision, self.space.lead, error=reason).to_json()}
        outcome = "out_of_memory" if error is not None and ran_out(error) else "error"
        return {"measurement": Measurement(wanted.candidate, outcome, reason=reason).to_json()}


class KindTrials:
    """`searcher.Trials` of a search on several kinds of devices, each of which proposes its own trials."""

    def __init__(self, trials: Mapping[str, BatchTrials]) -> None:
        self._trials = dict(trials)

    def propose(self) -> dict[str, Any] | str | None:
        """The next trial of the kind with the most idle devices. A noise scale that decides is measured first, by one
        kind for all."""
        first = next((one for one in self._trials.values() if one.awaits_noise), None)
        asked = [first] if first is not None else sorted(self._trials.values(), key=lambda one: -one.idle)
        answers = []
        for one in asked:
            answer = one.propose()
            if isinstance(answer, dict):
                return answer
            answers.append(answer)
        return DONE if all(answer == DONE for answer in answers) else None

    def started(self, config: dict[str, Any]) -> None:
        """Called when a trial's process has started."""
        self._trials[config["kind"]].started(config)

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """Record the result of a trial; all kinds share the noise scale, which does not depend on the device."""
        own = self._trials[config["kind"]]
        own.ended(config, result, error)
        for one in self._trials.values():
            one.known.noise = one.known.noise or own.known.noise

    def stop(self) -> None:
        """Propose no further trials and ignore results."""
        for one in self._trials.values():
            one.stopping = True


def _key_of(wanted: TrialRequest) -> TrialKey:
    """Identifies what is measured, independently of the number of passes."""
    point = wanted.candidate
    return TrialKey(
        point.precision, point.micro_batch_size, wanted.noise, wanted.gate_steps > 0, wanted.loaders is not None,
        bool(wanted.against),
    )  # fmt: skip
