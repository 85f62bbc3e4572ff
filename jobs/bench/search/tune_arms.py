"""The ways to search that bench `tune` compares: ours, the grid and doubling, each on one session in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from cluster.devices.inventory import local_inventory
from jobs.driver.session import session_of
from raytrain.autotune.probe.run_proposal import run_proposal
from raytrain.autotune.probe.state_guard import preserve_model, preserve_optimizers
from raytrain.autotune.probe.step import StepProbe
from raytrain.autotune.search.batch_size import BatchDecision, decide, next_proposals
from raytrain.autotune.search.head_to_head import HeadToHead
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.precision import GateReport
from raytrain.autotune.search.space import PASSES, BatchSpace, Proposal
from raytrain.train.memory.device import process_budget
from raytrain.train.session import Session

if TYPE_CHECKING:
    from jobs.bench.search.tune import TuneOptions

PRECISIONS = ("fp32", "bf16")
VOCABULARY = 256
#: Training steps, and validation batches, of each size, as in Lightning's tuner.
DOUBLING_STEPS = 3
MEMORY_FRACTION = 0.9


def gpt_job(options: TuneOptions, *, width: int, size: int) -> dict[str, Any]:
    """A GPT of two layers on drawn tokens, in micro-batches of `size` rows."""
    draw = torch.Generator().manual_seed(options.seed)
    threads = options.threads if isinstance(options.threads, int) else local_inventory().cpus
    tokens = torch.randint(VOCABULARY, (options.rows, options.context + 1), generator=draw)
    sizes = {"layers": 2, "heads": 4, "width": width, "context": options.context, "vocab_size": VOCABULARY}
    batch = size if options.free else options.rows
    return {
        "name": "bench-tune",
        "seed": options.seed,
        "model": {"builder": "raytrain.models.gpt:gpt", **sizes},
        "data": {
            "train": {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}, "eval_fraction": 0.0
        },
        "loop": {"max_steps": 1_000_000, "global_batch_size": batch, "micro_batch_size": size, "log_every": 0},
        "precision": {"dtype": "fp32"},
        "scale": {"workers": 1, "mode": "cpu", "threads": threads},
    }  # fmt: skip


@dataclass(frozen=True)
class FinishedSearch:
    """A finished search: its decision, its measurements, its seconds by phase and in total."""

    decision: BatchDecision
    measurements: list[Measurement]
    gates: list[GateReport]
    contests: list[HeadToHead]
    phases: dict[str, float]
    seconds: float

    @property
    def largest_effort(self) -> tuple[int, int]:
        """(sizes, steps) of the precision on which most was spent."""
        sizes = [
            len({one.candidate for one in self.measurements if one.candidate.precision == name})
            for name in self.decision.steps
        ]
        return max(sizes), max(self.decision.steps.values())

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return {
            "decision": self.decision.to_json(),
            "measurements": [one.to_json() for one in self.measurements],
            "gates": [gate.to_json() for gate in self.gates],
            "contests": [contest.to_json() for contest in self.contests],
            "phases": self.phases,
            "seconds": self.seconds,
        }


@dataclass
class SearchedModel:
    """The session of one model, and the sizes that may be tried."""

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
        """Run every kernel for every size once, so that the first arm does not pay for the others."""
        for candidate in self.grid_points():
            self._timed(candidate, passes=1)

    def grid_points(self, precisions: Sequence[str] = PRECISIONS) -> list[Candidate]:
        """All candidates."""
        return [Candidate(name, size) for name in precisions for size in self.sizes]

    def _timed(self, candidate: Candidate, *, passes: int = PASSES) -> Measurement:
        return self.probe.measure(candidate, budget=None, passes=passes, with_memory=False)

    def grid(self) -> tuple[list[Measurement], float]:
        """Time every point without measuring its memory; returns the measurements and the seconds they took."""
        began = time.perf_counter()
        found = [self._timed(candidate) for candidate in self.grid_points()]
        return found, time.perf_counter() - began

    def peaks(self) -> dict[int, int]:
        """Peak bytes of every size in fp32, by brute force."""
        found = {
            size: self.probe.measure(Candidate("fp32", size), budget=None, passes=0, with_memory=True)
            for size in self.sizes
        }
        return {size: one.peak_bytes or 0 for size, one in found.items()}

    def space(self, precisions: Sequence[str], *, budget: int | None) -> BatchSpace:
        """The space of all sizes: a step has the rows of the largest size, or with `free` those of one micro-batch."""
        rows = None if self.free else self.sizes[-1]
        return BatchSpace(tuple(precisions), self.sizes, rows, budget, gate_steps=self.gate_steps)

    def search(self, precisions: Sequence[str] = PRECISIONS, *, budget: int | None) -> FinishedSearch:
        """Our search, from nothing to a decision."""
        space = self.space(precisions, budget=budget)
        measurements: list[Measurement] = []
        gates: list[GateReport] = []
        contests: list[HeadToHead] = []
        phases: dict[str, float] = {}
        began = time.perf_counter()
        while proposals := next_proposals(space, measurements, (), gates, contests):
            proposal, at = proposals[0], time.perf_counter()
            result = run_proposal(self.probe, proposal, reference=space.lead, budget=budget)
            for part, found in ((result.measurement, measurements), (result.gate, gates), (result.contest, contests)):
                if part is not None:
                    found.append(part)  # pyright: ignore[reportArgumentType]
            phase = _phase(proposal)
            phases[phase] = phases.get(phase, 0.0) + time.perf_counter() - at
        decision = decide(space, measurements, gates, contests)
        return FinishedSearch(decision, measurements, gates, contests, phases, time.perf_counter() - began)

    def doubling(self) -> float:
        """Seconds of 3 steps and 3 validation batches of every size from 2 to the largest, in fp32; the size that
        fails in the end is not counted."""
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
    """The phase that a proposal belongs to."""
    if proposal.gate_steps:
        return "gate"
    if proposal.against:
        return "in turn, and the peak" if proposal.with_memory else "in turn"
    return "time and peak" if proposal.passes and proposal.with_memory else "time" if proposal.passes else "peak"
