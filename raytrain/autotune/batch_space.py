"""What a search over batch size and precision may try, what it proposes, and what came of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from raytrain.autotune.measurement import Candidate, Measurement, from_json, step_seconds
from raytrain.autotune.precision import GateReport

#: Passes of one timed measurement after the dropped warm-up: two, and a third if those differ.
LEAST_PASSES, PASSES = 2, 3
#: The second size is up to this multiple of the first.
FIRST_RATIO = 8

Contest = tuple[Measurement, ...]
"""Measurements of several candidates, the leader first; pass i of all of them is from round i."""


@dataclass(frozen=True)
class BatchSpace:
    """What may be tried, and how it is judged.

    Attributes:
        precisions: values of `precision.dtype`, the reference among them unless the job names one.
        sizes: micro-batch sizes, ascending.
        rows_per_step: rows of one worker's step where the global batch is given (accumulation makes up the rest); None
            where the batch is free, and each step is one micro-batch.
        budget_bytes: what one process may allocate; None: memory is not read.
        reference: the precision that others must beat.
        devices: measurements that may run at a time.
        workers: of the run; with the size they make the global batch where it is free.
        gate_steps: real steps over which a lower precision is compared with the reference before it is chosen; 0: none.
    """

    precisions: tuple[str, ...]
    sizes: tuple[int, ...]
    rows_per_step: int | None
    budget_bytes: int | None
    reference: str = "fp32"
    devices: int = 1
    workers: int = 1
    gate_steps: int = 20

    @property
    def lead(self) -> str:
        """The precision that the others are compared with: the reference, else the first."""
        return self.reference if self.reference in self.precisions else self.precisions[0]

    def first_sizes(self) -> tuple[int, ...]:
        """The two small sizes to begin with: 2 rows where there is a choice (a batch norm refuses a single one), and up
        to eight times that."""
        smallest = min(self.sizes)
        begin = self.sizes[1] if len(self.sizes) > 3 and smallest == 1 else smallest
        later = [size for size in self.sizes if size > begin]
        within = [size for size in later if size <= FIRST_RATIO * begin]
        return (begin, within[-1] if within else later[0]) if later else (begin,)

    def rows(self, size: int) -> int:
        """Rows of one worker's step with micro-batches of this size."""
        return self.rows_per_step or size

    def score(self, size: int, pass_s: float, updates: Sequence[float]) -> float:
        """Rows per second of one worker."""
        return self.rows(size) / step_seconds(self.rows(size), size, pass_s, updates)


def sizes_dividing(global_batch: int, workers: int) -> tuple[int, ...]:
    """Micro-batch sizes that divide a given global batch evenly: micro x accumulation x workers = global.

    If the number of workers does not divide it, the sizes that divide the batch, up to one worker's share.
    """
    share = math.ceil(global_batch / workers)
    whole = global_batch // workers if global_batch % workers == 0 else global_batch
    return tuple(size for size in range(1, share + 1) if whole % size == 0)


def sizes_free(rows: int, workers: int) -> tuple[int, ...]:
    """Powers of two up to each worker's share of the training rows, for a batch that is free."""
    most = max(1, rows // workers)
    return tuple(2**power for power in range(most.bit_length()) if 2**power <= most)


@dataclass(frozen=True)
class Proposal:
    """One measurement that the search proposes.

    Attributes:
        candidate: what to measure.
        passes: timed passes at most, after a warm-up that is dropped; 0: memory alone.
        with_memory: also read the peak.
        gate_steps: if not 0, run the numeric gate (`raytrain.autotune.comparisons.run_gate`) of this candidate against
            the reference instead, over this many steps.
        against: rivals, measured with this one in `passes` alternating rounds, after this one's peak if it is to be
            read.
    """

    candidate: Candidate
    passes: int = PASSES
    with_memory: bool = False
    gate_steps: int = 0
    against: tuple[Candidate, ...] = ()

    @property
    def what(self) -> str:
        """What it measures, as lines and trials.jsonl say it."""
        if self.gate_steps:
            return "gate"
        main = "in turn" if self.against else "time" if self.passes else ""
        return " + ".join(filter(None, [main, "memory" if self.with_memory else ""]))

    @property
    def aim(self) -> tuple[str, Candidate]:
        """What it is for; a repetition may read memory in addition, or no more."""
        return self.what.partition(" + ")[0], self.candidate


@dataclass(frozen=True)
class ProposalResult:
    """What came of a proposal; if the leader of a contest does not fit, only the measurement that shows it.
    `signature` is what the figures hold for (`raytrain.autotune.found`), from a process of its own."""

    measurement: Measurement | None = None
    gate: GateReport | None = None
    contest: Contest | None = None
    signature: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping of what there is; `from_json` is the inverse."""
        return {name: part for name, part in asdict(self).items() if part is not None}


@dataclass
class SearchResults:
    """Everything that was measured so far, in the order of time. A measurement that crashed is one with the outcome
    "error"."""

    measurements: list[Measurement] = field(default_factory=list)
    gates: list[GateReport] = field(default_factory=list)
    contests: list[Contest] = field(default_factory=list)
    signature: dict[str, Any] | None = None

    def add(self, result: ProposalResult) -> None:
        """Add what came of a proposal."""
        self.measurements += [] if result.measurement is None else [result.measurement]
        self.gates += [] if result.gate is None else [result.gate]
        self.contests += [] if result.contest is None else [result.contest]
        self.signature = result.signature or self.signature

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> SearchResults:
        """What rows of trials.jsonl hold."""
        results = cls()
        for row in rows:
            results.add(from_json(ProposalResult, row))
        return results
