"""A choice that the plan leaves to a measurement: read from `memory_probe.json`, or measured and recorded; applied."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from raytrain.autotune.probe.step import StepProbe
from raytrain.plan.choice import Deferred, Resolved
from raytrain.runs.folder import RunFolder
from raytrain.train.session import Session
from raytrain.train.state import Reporter

LABEL_COLUMNS = 10
"""Width of the labels of a run's first lines on the terminal."""

Record = dict[str, Any]
"""One entry of memory_probe.json: "value", "reason", and what they follow from."""


def read_measured(run: RunFolder) -> dict[str, Record]:
    """What this run has measured so far, by the name of the choice."""
    return run.read_json(run.memory_probe) if run.exists(run.memory_probe) else {}


@dataclass
class Calibration:
    """What the choices at the start of an attempt have in common.

    Attributes:
        session: the attempt's.
        run: whose memory_probe.json is read and written, by rank 0.
        reporter: receives an event for every choice that is measured.
        report_progress: sends a status to the driver; does nothing except on rank 0.
        decided: names of the choices that were made in this attempt, and not before.
    """

    session: Session
    run: RunFolder
    reporter: Reporter
    report_progress: Callable[[dict[str, Any]], None]
    decided: set[str] = field(default_factory=set)

    @cached_property
    def probe(self) -> StepProbe:
        """Measures the session's step; needs `prepare`."""
        return StepProbe(self.session)

    def recorded(self, name: str) -> Record | None:
        """What rank 0 reads of a choice, on every worker; None if it has not been measured. Collective."""
        workers = self.session.workers
        return workers.broadcast_object(read_measured(self.run).get(name) if workers.rank == 0 else None)

    def write(self, name: str, record: Record, *, event: str = "") -> None:
        """Rank 0 adds a choice to memory_probe.json, and reports it as a decision (called `event`, else `name`)."""
        if self.session.workers.rank == 0:
            self.run.write_json(self.run.memory_probe, {**read_measured(self.run), name: record})
            self.reporter.event("decision", what=event or name, value=record["value"], reason=record["reason"])


class DeferredChoice(ABC):
    """One choice. A restarted or resumed attempt uses what the first one measured.

    Attributes:
        name: of the entry in memory_probe.json; unless a subclass says otherwise also the choice's name in the plan.
        event: its name in the event, where that differs.
    """

    name: ClassVar[str]
    event: ClassVar[str] = ""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration, self.session = calibration, calibration.session

    def resolve(self) -> None:
        """Apply the recorded or else the measured value, where the plan leaves it open. Collective."""
        if self.applies():
            self.decide()

    def decide(self) -> None:
        """Apply the value; rank 0 prints a new one, a line that stays on the driver's terminal. Collective."""
        record = self.known_or_measured()
        self.apply(record)
        new, self.calibration.decided = self.name in self.calibration.decided, self.calibration.decided - {self.name}
        if new and self.session.workers.rank == 0 and (shown := self.shown(record)):
            print(f"{shown[0]:<{LABEL_COLUMNS}}{shown[1]}: {record['reason']}", flush=True)

    def known_or_measured(self) -> Record:
        """The recorded result if it was measured for the same settings, else a new one, which is recorded."""
        settings = self.settings()
        known = self.calibration.recorded(self.name)
        if known is not None and self.settings_of(known) == settings:
            return known
        self.calibration.decided.add(self.name)
        if (record := self.unmeasured()) is None:
            record = self.measure(settings)
            self.calibration.write(self.name, record, event=self.event)
        return record

    def applies(self) -> bool:
        """Whether this run has the choice to make."""
        return isinstance(getattr(self.session.job.plan, self.name), Deferred)

    def settings(self) -> Any:
        """What a result holds for. Collective."""
        return None

    def settings_of(self, known: Record) -> Any:
        """What a recorded result was measured for."""
        return None

    def shown(self, record: Record) -> tuple[str, str] | None:
        """(label, value) for the terminal, as in the first lines of a run; None where those do not leave it open and
        the value is the usual one."""
        return None

    def unmeasured(self) -> Record | None:
        """A value that needs no measurement and is not recorded; None where there is none."""
        return None

    @abstractmethod
    def measure(self, settings: Any) -> Record:
        """Measure on the real model; changes nothing that it measures. Collective."""

    @abstractmethod
    def apply(self, record: Record) -> None:
        """Make the session use the value."""


def record_of(chosen: Resolved, trials: Any) -> Record:
    """The record of a choice that follows from these trials."""
    return {"value": chosen.value, "reason": chosen.reason, "trials": trials}
