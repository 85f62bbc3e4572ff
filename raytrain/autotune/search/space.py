"""What a search over batch size and precision may try, and the measurements that it proposes. Pure, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raytrain.autotune.search.measurement import Candidate
from raytrain.autotune.search.noise_scale import efficiency
from raytrain.errors import InputError

#: Passes of one timed measurement after the dropped warm-up: two, and a third if those differ.
LEAST_PASSES, PASSES = 2, 3
#: Steps of a memory reading, which is not timed.
MEMORY_PASSES = 2
#: Limits per precision: the number of sizes, and of passes over all of them, including warm-ups and memory readings;
#: only a confirmation that fails is followed by another one beyond that.
MOST_SIZES, MOST_STEPS = 6, 25
#: The second size is up to this multiple of the first.
FIRST_RATIO = 8


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
        noise_rows: gradient noise scale in rows (`raytrain.autotune.search.noise_scale`); given, the search maximises
            goodput.
        workers: of the run; with the size they make the global batch where it is free.
        gate_steps: real steps over which a lower precision is compared with the reference before it is chosen; 0: none.
    """

    precisions: tuple[str, ...]
    sizes: tuple[int, ...]
    rows_per_step: int | None
    budget_bytes: int | None
    reference: str = "fp32"
    devices: int = 1
    noise_rows: float | None = None
    workers: int = 1
    gate_steps: int = 20

    def __post_init__(self) -> None:
        if not self.precisions:
            raise InputError("precision.dtype", got="no candidate", expected="at least one precision to measure")
        if not self.sizes or list(self.sizes) != sorted(set(self.sizes)) or min(self.sizes) < 1:
            raise InputError("tune.space", got=f"micro-batch sizes {list(self.sizes)}", expected="ascending, from 1")

    @property
    def lead(self) -> str:
        """The precision that the others are compared with: the reference, else the first."""
        return self.reference if self.reference in self.precisions else self.precisions[0]

    def first_sizes(self) -> tuple[int, ...]:
        """The two small sizes that give the lines of time and memory: 2 rows where there is a choice (a batch norm
        refuses a single one), and up to eight times that."""
        smallest = min(self.sizes)
        begin = self.sizes[1] if len(self.sizes) > 3 and smallest == 1 else smallest
        later = [size for size in self.sizes if size > begin]
        within = [size for size in later if size <= FIRST_RATIO * begin]
        return (begin, within[-1] if within else later[0]) if later else (begin,)

    def score(self, size: int, pass_s: float, update_s: float) -> float:
        """Rows per second of one worker; as goodput, those rows counted by what they are worth at the smallest batch
        (`raytrain.autotune.search.noise_scale`)."""
        rows = self.rows_per_step or size
        speed = rows / (math.ceil(rows / size) * pass_s + update_s)
        if self.noise_rows is None or self.rows_per_step is not None:
            return speed
        return speed * efficiency(self.noise_rows, self.workers * size, reference=self.workers * self.sizes[0])


@dataclass(frozen=True)
class Proposal:
    """One measurement that the search proposes.

    Attributes:
        candidate: what to measure.
        passes: timed passes at most, after a warm-up that is dropped; 0: memory alone.
        with_memory: also read the peak.
        against: other candidates, measured with this one in `passes` alternating rounds
            (`raytrain.autotune.probe.step.StepProbe.measure_in_turn`), after this one's peak if it is to be read.
        gate_steps: if not 0, run the numeric gate (`raytrain.autotune.probe.numeric_gate.run_gate`) of this candidate
            against the reference instead, over this many steps.
    """

    candidate: Candidate
    passes: int = PASSES
    with_memory: bool = False
    gate_steps: int = 0
    against: tuple[Candidate, ...] = ()


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


def nearest_at_most(sizes: Sequence[int], limit: float) -> int | None:
    """The largest of `sizes` up to `limit`."""
    return max((size for size in sizes if size <= limit), default=None)
