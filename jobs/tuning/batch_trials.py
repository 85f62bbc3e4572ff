"""The trials of a search over batch size and precision on the driver: what the search wants, and what it was told."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from jobs.tuning.batch_known import Known, weighed
from jobs.tuning.searcher import DONE, keep_traceback, ran_out, why
from jobs.tuning.table import SweepTable, batch_cells, batch_text
from raytrain.search.batch import BatchSpace, Proposal, next_proposals
from raytrain.search.measurement import Candidate, Measurement
from raytrain.search.precision import GateReport
from raytrain.sweep_folder import SweepFolder


@dataclass(frozen=True)
class Wanted:
    """One trial: a proposal of the search with its number, or a reading of the gradient noise scale."""

    number: int
    candidate: Candidate
    passes: int = 0
    with_memory: bool = False
    gate_steps: int = 0
    against: tuple[Candidate, ...] = ()
    noise: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Wanted:
        """The inverse of `to_json`."""
        names = ("number", "passes", "with_memory", "gate_steps", "noise")
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
        """In a word, for the table."""
        if self.noise:
            return "noise"
        if self.against:
            return "in turn + memory" if self.with_memory else "in turn"
        if self.gate_steps:
            return "gate"
        return "time + memory" if self.passes and self.with_memory else "time" if self.passes else "memory"


KINDS = ("measurement", "gate", "contest", "noise")
"""What a trial may report, one of them; a contest with a measurement of its winner's peak."""


class BatchTrials:
    """`searcher.Trials` of a search.

    Args:
        known: what earlier searches and this sweep measured, which is not measured again.
        noise_at: the candidate whose gradients tell the noise scale; None: it is not asked for.
        goodput: the noise scale is read first, and decides; else it is read last, as advice.
        most: trials of this sweep at most.
    """

    def __init__(
        self, space: BatchSpace, *, known: Known, sweep: SweepFolder, table: SweepTable,
        noise_at: Candidate | None = None, goodput: bool = False, most: int | None = None,
    ) -> None:  # fmt: skip
        self.space, self.known = space, known
        self._sweep, self._table, self._noise_at, self._most = sweep, table, noise_at, most
        self._goodput, self.stopping = goodput, False
        self._running: dict[int, Wanted] = {}
        self._began: dict[int, float] = {}
        ended = sweep.ended()
        for row in ended:
            table.end(row["trial"], batch_cells(row, space), batch_text(row, space))
        self._number = max((row["trial"] for row in ended), default=0)

    def propose(self) -> dict[str, Any] | str | None:
        """What the search wants next."""
        if self.stopping:
            return DONE
        wanted = self.next()
        if wanted is None:
            return None if self._running else DONE
        self._number += 1
        self._running[wanted.number] = wanted
        return wanted.to_json()

    def next(self) -> Wanted | None:
        """The next trial; None where nothing is to be started now."""
        number = self._number + 1
        if self._most is not None and number > self._most:
            return None
        noise = self._noise(number)
        if noise is not None and self._goodput:
            return None if self._running else noise
        running = [one.proposal for one in self._running.values()]
        space = weighed(self.space, self.known, goodput=self._goodput)
        found = next_proposals(space, self.known.measurements, running, self.known.gates, self.known.contests)
        if found:
            return Wanted(number, **vars(found[0]))
        works = any(one.outcome == "ok" for one in self.known.measurements)
        return noise if works and not self._running else None

    def _noise(self, number: int) -> Wanted | None:
        if self._noise_at is None or self.known.noise is not None:
            return None
        return Wanted(number, self._noise_at, noise=True)

    def started(self, config: dict[str, Any]) -> None:
        """It has its process."""
        wanted = Wanted.of(config)
        self._began[wanted.number] = time.time()
        one = wanted.candidate
        self._table.start(wanted.number, [wanted.what, one.precision, str(one.micro_batch_size)])

    def ended(self, config: dict[str, Any], result: dict[str, Any], error: BaseException | None) -> None:
        """Writes its line; a crash is a measurement as well, that says so."""
        wanted = Wanted.of(config)
        self._running.pop(wanted.number, None)
        if self.stopping:
            return
        found = {name: result[name] for name in KINDS if result.get(name) is not None}
        if not found:
            found = self._failed(wanted, error)
        now = time.time()
        row = {
            "trial": wanted.number,
            "what": wanted.what,
            "precision": wanted.candidate.precision,
            "micro_batch_size": wanted.candidate.micro_batch_size,
            "outcome": found.get("measurement", {}).get("outcome", "ok" if error is None else "error"),
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

    def _failed(self, wanted: Wanted, error: BaseException | None) -> dict[str, Any]:
        reason = "it ended without a result" if error is None else why(error)
        if wanted.noise:
            self._noise_at = None  # an advice less; the search goes on
            return {"reason": reason}
        if wanted.gate_steps:
            return {"gate": GateReport(wanted.candidate.precision, self.space.lead, error=reason).to_json()}
        outcome = "out_of_memory" if error is not None and ran_out(error) else "error"
        return {"measurement": Measurement(wanted.candidate, outcome, reason=reason).to_json()}
