"""Units of work: ranges of input rows, and the batches of one; pure functions of the input. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Rows of a batch where `infer.batch_size` is auto, for answers of many tokens and for one output a row. A GPU is busy
#: with many rows only; a batch that memory does not hold is halved, and so are those after it.
GENERATED_ROWS, PLAIN_ROWS = 16, 256
GENERATED_ROWS_ON_GPU, PLAIN_ROWS_ON_GPU = 256, 4096

#: `infer.unit_rows: auto` aims at this many units, so that a lost one is a small part of the work.
UNITS = 64
#: Fewest rows of a unit: writing its file takes about as long as some hundred outputs of a small model, and less than
#: one generated answer.
LEAST_GENERATED, LEAST_PLAIN, MOST_ROWS = 16, 512, 4096


@dataclass(frozen=True)
class Unit:
    """The rows `start` to `start + rows` of the input: computed by one worker, written as one file."""

    number: int
    start: int
    rows: int


@dataclass(frozen=True)
class UnitReport:
    """What a worker says about a unit that it has written.

    Attributes:
        seconds: to read, compute and write it; in the unit's file without the time to write that.
        load_s: seconds that the worker took to load the model.
        begin, end: unix seconds.
        stages: `StageTimes` of the unit as JSON; "" for a model that is not divided.
        quantized: `Quantization` of the worker's model as JSON; "" without int8 weights.
        error: why the unit was given up and no file written: more rows failed than the job allows. None otherwise.
    """

    number: int
    rows: int
    failed: int
    tokens: int
    seconds: float
    worker: str
    load_s: float
    out_of_memory: int
    begin: float
    end: float
    stages: str = ""
    quantized: str = ""
    error: str | None = None


def usual_rows(*, generates: bool, on_gpu: bool = False) -> int:
    """Rows of a batch where the user names no number."""
    if on_gpu:
        return GENERATED_ROWS_ON_GPU if generates else PLAIN_ROWS_ON_GPU
    return GENERATED_ROWS if generates else PLAIN_ROWS


def unit_size(rows: int, *, generates: bool) -> int:
    """Rows of a unit by the input and the kind of model alone: the same units for any number of workers."""
    return min(max(-(-rows // UNITS), LEAST_GENERATED if generates else LEAST_PLAIN), MOST_ROWS)


def units_of(rows: int, size: int) -> list[Unit]:
    """All units of `rows` rows; only the last one may be smaller than `size`."""
    return [Unit(number, start, min(size, rows - start)) for number, start in enumerate(range(0, rows, size))]


def batches_of(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The rows of a unit in batches of about equal lengths, at most `size` rows each.

    A product with one row may use another kernel than one with several. A row that would remain alone therefore takes
    the last row of the batch before it along; only a unit of one row is a batch of one.

    Args:
        lengths: of each row; longer rows come first, so that a batch that is too large fails early.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    if size > 2 and len(batches) > 1 and len(batches[-1]) == 1:
        batches[-1].insert(0, batches[-2].pop())
    return batches
