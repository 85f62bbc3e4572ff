"""What a search over batch size and precision ends with, and the error where nothing can run. Pure, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytrain.autotune.search.measurement import Candidate
from raytrain.autotune.search.space import BatchSpace
from raytrain.autotune.search.speed_curve import SpeedCurve
from raytrain.errors import RunError
from raytrain.plan.choice import Resolved
from raytrain.plan.text import size_text


@dataclass(frozen=True)
class TableRow:
    """One candidate as a person reads it.

    Attributes:
        rows_per_s: of one worker, from medians, with an interval of two standard errors; None where it was not timed.
        predicted_peak, measured_peak: bytes; None where nothing tells.
        note: why it is out, or "".
    """

    precision: str
    micro_batch_size: int
    passes: int
    rows_per_s: float | None
    low: float | None
    high: float | None
    predicted_peak: int | None
    measured_peak: int | None
    note: str = ""


@dataclass(frozen=True)
class BatchDecision:
    """The chosen point with its reasons.

    Attributes:
        rows_per_s: of one worker, throughput (or goodput, where the space asks for it).
        predicted_peak: bytes by the line through the other sizes, or through the reference's where there is none.
        table: every candidate on which anything was spent.
        refusals: precision -> why it was not taken.
        knees: precision -> its own best size.
        steps: precision -> passes spent, warm-ups, memory readings and contests included.
        complete: the search had nothing left to measure.
        contest: the contenders that were measured in turn, and the seconds of their passes; None where none were.
    """

    candidate: Candidate
    precision: Resolved
    micro_batch_size: Resolved
    rows_per_s: float
    predicted_peak: int | None
    measured_peak: int | None
    table: tuple[TableRow, ...]
    refusals: dict[str, str]
    knees: dict[str, int]
    steps: dict[str, int]
    complete: bool
    contest: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain mapping."""
        return asdict(self)


def table_of(curves: Iterable[SpeedCurve]) -> tuple[TableRow, ...]:
    """A row for each candidate, by precision and size."""
    return tuple(_row(curve, size) for curve in curves for size in curve.space.sizes if _spent(curve, size))


def _spent(curve: SpeedCurve, size: int) -> bool:
    return size in curve.seconds or size in curve.peaks or size in curve.broken or size == curve.too_large


def _row(curve: SpeedCurve, size: int) -> TableRow:
    timed = size in curve.seconds
    speed = curve.score(size) if timed else None
    error = 2 * curve.error(size) if timed else 0.0
    line = curve.line_without(size) or curve.line
    note = curve.nonfinite or curve.broken.get(size, "")
    if curve.too_large is not None and size >= curve.too_large:
        note = "out of memory"
    return TableRow(
        precision=curve.precision,
        micro_batch_size=size,
        passes=curve.repeats(size),
        rows_per_s=speed,
        low=None if speed is None else speed * (1 - error),
        high=None if speed is None else speed * (1 + error),
        predicted_peak=None if line is None else line.predict(size),
        measured_peak=curve.peaks.get(size),
        note=note,
    )


def nothing_fits(space: BatchSpace, curves: Sequence[SpeedCurve]) -> RunError:
    """The error of a search without an answer: what failed, in bytes and words, and the key that mends it."""
    failed = [f"{curve.precision}: {why}" for curve in curves for why in [_failure(curve)] if why]
    if space.budget_bytes is not None and any(curve.too_large is not None for curve in curves):
        floors = [floor for curve in curves for floor in curve.floors]
        alone = f"; the process with the model alone takes {size_text(max(floors))}" if floors else ""
        return RunError(
            f"no micro-batch fits into {size_text(space.budget_bytes)} ({'; '.join(failed)}{alone}): "
            "raise cluster.memory_limit or cluster.memory_fraction, or take a smaller model"
        )
    if not failed:
        return RunError("nothing has been measured yet")
    return RunError(f"no candidate of precision.dtype and loop.micro_batch_size can run: {'; '.join(failed)}")


def _failure(curve: SpeedCurve) -> str:
    if curve.nonfinite:
        return curve.nonfinite
    if curve.too_large is not None:
        peak = curve.peaks.get(curve.too_large)
        took = "is out of memory" if peak is None else f"takes {size_text(peak)}"
        return f"{curve.too_large} row{'s' if curve.too_large > 1 else ''} {took}"
    return next((f"at {size} rows {why}" for size, why in curve.broken.items()), "")
