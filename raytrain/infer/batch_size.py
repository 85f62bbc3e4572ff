"""`infer.batch_size: auto`: the rows of a batch, measured on a few rows of the input before the first unit.

A cheap form of the search of training: from a usual size on, sizes are doubled while rows per second grow and memory
allows it. What is tried costs at most `SHARE` of the job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from raytrain.errors import OutOfMemory
from raytrain.infer.input.rows import InputRows
from raytrain.infer.predictor import Predictor
from raytrain.infer.runner import let_go_of_batch
from raytrain.infer.units import Unit
from raytrain.plan.text import figure_text
from raytrain.train.memory.device import PeakMeter, exact_memory

#: Rows of a batch where nothing is measured: for answers of many tokens, and for one output a row.
GENERATED_ROWS, PLAIN_ROWS = 16, 256
#: The most of a job's time that the search takes.
SHARE = 0.1
#: A size twice as large must bring at least so much throughput to be tried further; and of several sizes, the smallest
#: within so much of the best is taken.
GAIN = 0.05
#: Tokens of an answer in the search: a token at the end of a long answer takes hardly longer than one at its begin.
PROBED_TOKENS = 16
WARM_UP_ROWS = 2
#: Passes of a size: one whose memory is read, which also warms up, then those that are timed.
TIMED = 2
PASSES = 1 + TIMED


@dataclass(frozen=True)
class MeasuredSize:
    """What was measured of one size.

    Attributes:
        peak_bytes: of the process, with answers of full length.
    """

    rows: int
    rows_per_s: float
    peak_bytes: int


@dataclass(frozen=True)
class BatchChoice:
    """The rows of a batch, and why.

    Attributes:
        seconds: that the search took.
    """

    rows: int
    reason: str
    measured: tuple[MeasuredSize, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return asdict(self)


def usual_rows(*, generates: bool) -> int:
    """The size where nothing is measured."""
    return GENERATED_ROWS if generates else PLAIN_ROWS


def reason_not_to_measure(rows: int, unit_rows: int, *, generates: bool) -> str | None:
    """Why the usual size is used without a search; None if sizes should be measured."""
    usual = usual_rows(generates=generates)
    if unit_rows <= usual:
        return f"a unit has {unit_rows:,} rows"
    if rows * SHARE < PASSES * usual:  # one size alone would cost more
        return f"{rows:,} rows are too few for a search"
    return None


@dataclass
class BatchSizeSearch:
    """Measures batches of growing size with a loaded model.

    Attributes:
        unit: whose rows are used; a batch is at most as large.
        total: rows of the job.
        budget: bytes that the process may use; None if unknown.
    """

    predictor: Predictor
    rows: InputRows
    unit: Unit
    total: int
    device: torch.device
    budget: int | None
    _measured: list[MeasuredSize] = field(default_factory=list, init=False)
    _floor: int = field(default=0, init=False)

    def run(self) -> BatchChoice:
        """The choice. An error of the model or of a row ends the search: the job computes the row again, and tells.

        Raises:
            RunError: an error ended the GPU's context.
        """
        began = time.perf_counter()
        reason = self._search(began)
        seconds = time.perf_counter() - began
        usual = min(usual_rows(generates=self.predictor.generates), self.unit.rows)
        if not self._measured:
            return BatchChoice(usual, reason, seconds=seconds)
        best = max(one.rows_per_s for one in self._measured)
        chosen = next(one for one in self._measured if one.rows_per_s >= (1 - GAIN) * best)
        rates = ", ".join(f"{one.rows:,}: {figure_text(one.rows_per_s)}" for one in self._measured)
        return BatchChoice(chosen.rows, f"rows/s measured {rates}; {reason}", tuple(self._measured), seconds)

    def _search(self, began: float) -> str:
        """Fill `_measured`; returns why it ended."""
        short = self.predictor.shortened(PROBED_TOKENS)
        table = self.rows.read(self.unit.start, self.unit.rows, list(short.columns))
        lengths, refused = short.lengths(table), short.refused(table)
        order = sorted(set(range(len(lengths))) - refused.keys(), key=lambda row: (-lengths[row], row))
        if not order:
            return "no row of the first unit can be answered"
        size, too_large = min(usual_rows(generates=short.generates), self.unit.rows), 0
        while True:
            try:
                ended = self._measure(short, table, order, size, began)
            except Exception as error:  # of the user's model, or of a row
                if not let_go_of_batch(error, self.device, [self.unit.start + row for row in _spread(order, size)]):
                    return f"a row among {size:,} failed"
                if self._measured or size == 1:
                    return f"{size:,} rows do not fit into memory"
                size, too_large = size // 2, size
                continue
            if ended is not None or too_large:
                return ended or f"{too_large:,} rows do not fit into memory"
            if size == self.unit.rows:
                return f"a unit has {size:,} rows"
            size = min(2 * size, self.unit.rows)

    def _measure(self, short: Predictor, table: Any, order: list[int], size: int, began: float) -> str | None:
        """Measure one size; returns why none should follow, None if one should.

        Raises:
            OutOfMemory: more memory is in use than the process may use.
        """
        before = self._measured[-1] if self._measured else None
        share = short.answer_tokens / self.predictor.answer_tokens  # of the time of a whole answer
        if before is None:
            self._answer(short, table, order[:WARM_UP_ROWS])
        else:
            expected = PASSES * size * share / before.rows_per_s
            if time.perf_counter() - began + expected > SHARE * self.total / before.rows_per_s:
                return f"{size:,} rows would take more than {SHARE:.0%} of the job to measure"
            if self.budget is not None and self._predicted(size) > self.budget:
                return f"{size:,} rows would not fit into memory"
        batch = _spread(order, size)
        with exact_memory(self.device):
            meter = PeakMeter(self.device)
            self._answer(short, table, batch)
            peak = meter.peak() + self.predictor.cached_bytes(size) - short.cached_bytes(size)
        self._floor = meter.floor
        if self.budget is not None and peak > self.budget:
            raise OutOfMemory(f"{size} rows need {peak:,} bytes, {self.budget:,} are allowed")
        seconds = []
        for _ in range(TIMED):
            at = time.perf_counter()
            self._answer(short, table, batch)
            seconds.append(time.perf_counter() - at)
        rate = size * share / min(seconds)
        self._measured.append(MeasuredSize(size, rate, peak))
        if before is not None and rate < (1 + GAIN) * before.rows_per_s:
            return f"{size:,} rows are not faster"
        return None

    def _predicted(self, size: int) -> float:
        last = self._measured[-1]
        return self._floor + (last.peak_bytes - self._floor) * size / last.rows

    def _answer(self, short: Predictor, table: Any, batch: Sequence[int]) -> None:
        short.predict(table.take(list(batch)), [self.unit.start + row for row in batch])
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _spread(order: Sequence[int], size: int) -> list[int]:
    """`size` rows at equal distances in `order`, the first one among them: of about the same mean length each time."""
    return [order[at * len(order) // size] for at in range(size)]
