"""The searches that bench `tune` compares: ours, the grid and doubling, each on one session in this process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from jobs.driver.local_session import session_of
from raytrain.autotune.batch_decision import BatchDecision, decide
from raytrain.autotune.batch_search import next_proposals
from raytrain.autotune.batch_space import PASSES, BatchSpace, Proposal, SearchResults
from raytrain.autotune.comparisons import run_proposal
from raytrain.autotune.measurement import Candidate, Measurement
from raytrain.autotune.state_guard import preserve_model, preserve_optimizers
from raytrain.autotune.step_probe import StepProbe
from raytrain.train.memory.device import process_budget
from raytrain.train.session import Session

PRECISIONS = ("fp32", "bf16")
#: Training steps, and validation batches, of each size, as in Lightning's tuner.
DOUBLING_STEPS = 3
MEMORY_FRACTION = 0.9


@dataclass(frozen=True)
class FinishedSearch:
    """A finished search: its decision, its measurements, and its seconds by phase and in total."""

    decision: BatchDecision
    results: SearchResults
    phases: dict[str, float]
    seconds: float

    @property
    def most_sizes(self) -> int:
        """The largest number of sizes over the precisions."""
        measured = {one.candidate for one in self.results.measurements}
        return max(Counter(one.precision for one in measured).values())

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {
            "decision": self.decision.to_json(),
            "measurements": [asdict(one) for one in self.results.measurements],
            "gates": [asdict(gate) for gate in self.results.gates],
            "contests": [[asdict(one) for one in contest] for contest in self.results.contests],
            "phases": self.phases,
            "seconds": self.seconds,
        }


@dataclass
class SearchedModel:
    """The session of one model, and the candidate sizes."""

    job: dict[str, Any]
    sizes: tuple[int, ...]
    gate_steps: int
    free: bool
    session: Session = field(init=False)
    probe: StepProbe = field(init=False)

    def __post_init__(self) -> None:
        self.session = session_of(self.job)
        self.session.prepare("fp32")
        self.probe = StepProbe(self.session)

    def budget(self) -> int | None:
        """Bytes that this process may use, as in a run on this machine."""
        return process_budget(self.session.device, fraction=MEMORY_FRACTION, limit=None, processes=1)

    def warm_up(self) -> None:
        """Run every kernel for every size once, so that no arm is charged for the warm-up."""
        for candidate in self.grid_points():
            self._timed(candidate, passes=1)

    def grid_points(self, precisions: Sequence[str] = PRECISIONS) -> list[Candidate]:
        """All candidates."""
        return [Candidate(name, size) for name in precisions for size in self.sizes]

    def _timed(self, candidate: Candidate, *, passes: int = PASSES) -> Measurement:
        return self.probe.measure(candidate, budget=None, passes=passes, with_memory=False)

    def grid(self) -> tuple[list[Measurement], float]:
        """Time every candidate without measuring memory; returns the measurements and the total seconds."""
        began = time.perf_counter()
        found = [self._timed(candidate) for candidate in self.grid_points()]
        return found, time.perf_counter() - began

    def peaks(self) -> dict[int, int]:
        """The measured peak bytes of every size in fp32."""
        found = {
            size: self.probe.measure(Candidate("fp32", size), budget=None, passes=0, with_memory=True)
            for size in self.sizes
        }
        return {size: one.peak_bytes or 0 for size, one in found.items()}

    def space(self, precisions: Sequence[str], *, budget: int | None) -> BatchSpace:
        """The search space of all sizes. A step has the rows of the largest size, or with `free` of one micro-batch."""
        rows = None if self.free else self.sizes[-1]
        return BatchSpace(tuple(precisions), self.sizes, rows, budget, gate_steps=self.gate_steps)

    def search(self, precisions: Sequence[str] = PRECISIONS, *, budget: int | None) -> FinishedSearch:
        """Run our search, without prior measurements."""
        space = self.space(precisions, budget=budget)
        results = SearchResults()
        phases: dict[str, float] = {}
        began = time.perf_counter()
        while proposals := next_proposals(space, results):
            proposal, at = proposals[0], time.perf_counter()
            results.add(run_proposal(self.probe, proposal, reference=space.lead, budget=budget))
            phase = _phase(proposal)
            phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - at
        return FinishedSearch(decide(space, results), results, phases, time.perf_counter() - began)

    def doubling(self) -> float:
        """The seconds of 3 steps and 3 validation batches of every size from 2 to the largest, in fp32, without the
        final size that runs out of memory."""
        session = self.session
        with preserve_model(session.trainable, session.device), preserve_optimizers(session.optimizers):
            began = time.perf_counter()
            for size in (size for size in self.sizes if size >= 2):
                micro = session.loader.one(session.loader.batches.rows_from(session.state.cursor, size))
                session.trainable.module.train()
                for number in range(DOUBLING_STEPS):
                    session.step.run(iter([micro]), global_weight=micro.weight, step=number + 1, passes=1)
                session.trainable.module.eval()
                with torch.no_grad():
                    for _ in range(DOUBLING_STEPS):
                        session.step.forward(micro.batch, global_weight=micro.weight)
            return time.perf_counter() - began


def _phase(proposal: Proposal) -> str:
    """The phase of a proposal."""
    if proposal.gate_steps:
        return "gate"
    if proposal.against:
        return "in turn, and the peak" if proposal.with_memory else "in turn"
    return "time and peak" if proposal.passes and proposal.with_memory else "time" if proposal.passes else "peak"
