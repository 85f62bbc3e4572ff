"""What compilation was worth in a run: eager against compiled steps, and the step by which its time is made up.

Pure: records in, values out. Only a run with `loop.compile` measures an eager step (the event `eager_step`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from raytrain.report.records import Row, RunRecords, number, percentile

SAME = 0.03
"""A difference up to this fraction of a step is noise."""


@dataclass(frozen=True)
class CompileGain:
    """Compiled and eager steps of a run.

    Attributes:
        eager_s: seconds of a step as it was written, measured at the start.
        compiled_s: median seconds of the run's steps after the first, without reading data.
        compiler_s: seconds spent in the compiler.
        steps: that the run has done.
    """

    eager_s: float
    compiled_s: float
    compiler_s: float
    steps: int

    @property
    def ratio(self) -> float:
        """Compiled over eager: below 1 the compiled step is faster."""
        return self.compiled_s / self.eager_s

    @property
    def verdict(self) -> str:
        """ "faster", "slower", or "the same" within noise."""
        return "slower" if self.ratio > 1 + SAME else "faster" if self.ratio < 1 - SAME else "the same"

    @property
    def break_even(self) -> int | None:
        """The first step by which faster steps have made up for the compilation; None if they never do."""
        if self.verdict != "faster":
            return None
        return max(1, math.ceil(self.compiler_s / (self.eager_s - self.compiled_s)))


def compile_gain(records: RunRecords) -> CompileGain | None:
    """The comparison; None where the run did not compile, did not measure an eager step, or has done too few steps."""
    eager, compiled = records.of_kind("eager_step"), records.of_kind("compile")
    eager_s = number(eager[-1].get("seconds")) if eager else None
    compiler_s = number(compiled[-1].get("seconds")) if compiled else None
    if not eager_s or not compiler_s or str(compiled[-1].get("achieved")).startswith(("0 of", "off")):
        return None
    later = [row for row in records.train if (number(row.get("step")) or 0) > 1]
    compiled_s = percentile([spent for row in later if (spent := _without_data(row)) is not None], 0.5)
    if not compiled_s or compiled_s <= 0:
        return None
    return CompileGain(eager_s, compiled_s, compiler_s, int(number(records.train[-1].get("step")) or 0))


def _without_data(row: Row) -> float | None:
    """Seconds of a step: of the row's own, or the median of those since the row before, without reading data."""
    median_ms, own = number(row.get("step_ms_p50")), number(row.get("step_time_s"))
    spent = own if median_ms is None else median_ms / 1000
    return None if spent is None else spent - (number(row.get("data_time_s")) or 0.0)
