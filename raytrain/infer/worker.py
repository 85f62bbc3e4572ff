"""One worker of an inference job: loads the model once, then computes units and writes their files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain.config.sections import InferConfig
from raytrain.infer.input import InputRows
from raytrain.infer.model import InferenceModel
from raytrain.infer.output import write_part
from raytrain.infer.runner import TooManyFailures, UnitRunner
from raytrain.infer.units import Unit


@dataclass(frozen=True)
class Work:
    """What every worker of a job gets; can be pickled.

    Attributes:
        parts: the folder of the units' files.
        batch_size: rows of a batch.
        most_failed: failed rows that end the job.
        threads: CPU threads of a worker; None leaves torch's.
    """

    model: InferenceModel
    infer: InferConfig
    rows: InputRows
    parts: str
    batch_size: int
    most_failed: int
    threads: int | None = None


@dataclass(frozen=True)
class UnitReport:
    """What a worker says about a unit that it has written.

    Attributes:
        seconds: to read, compute and write it.
        load_s: seconds that the worker took to load the model.
        begin, end: unix seconds.
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
    error: str | None = None


@dataclass
class InferenceWorker:
    """Computes units; the first call loads the model."""

    work: Work
    name: str
    load_s: float = field(default=0.0, init=False)
    _runner: UnitRunner | None = field(default=None, init=False, repr=False)

    def load(self) -> UnitRunner:
        """The model, ready to run."""
        if self._runner is None:
            began = time.perf_counter()
            work = self.work
            if work.threads is not None:
                torch.set_num_threads(work.threads)
            device = torch.device(work.model.device)
            if device.type == "cuda":  # kernels of a model's own may use the current device
                torch.cuda.set_device(device)
            predictor = work.model.load(work.infer, work.rows.schema)
            self._runner = UnitRunner(predictor, work.rows, work.batch_size, work.most_failed, device)
            self.load_s = time.perf_counter() - began
        return self._runner

    def run(self, unit: Unit) -> UnitReport:
        """Compute a unit and write its file, unless more rows of it fail than the job allows."""
        runner, begin = self.load(), time.time()
        began, shortages = time.perf_counter(), runner.out_of_memory
        infer = self.work.infer
        needed = [*runner.predictor.columns, *kept_columns(infer), *([infer.id_column] if infer.id_column else [])]
        try:
            table, results = runner.run(unit, list(dict.fromkeys(needed)))
        except TooManyFailures as error:
            return UnitReport(
                unit.number, unit.rows, self.work.most_failed + 1, 0, time.perf_counter() - began, self.name,
                self.load_s, runner.out_of_memory - shortages, begin, time.time(), str(error),
            )  # fmt: skip
        ids = ids_of(table, unit, infer.id_column)
        write_part(self.work.parts, unit, table.select(kept_columns(infer)), results, ids=ids, worker=self.name)
        return UnitReport(
            unit.number, unit.rows, sum(result.error is not None for result in results),
            sum(result.tokens for result in results), time.perf_counter() - began, self.name, self.load_s,
            runner.out_of_memory - shortages, begin, time.time(),
        )  # fmt: skip


def kept_columns(infer: InferConfig) -> list[str]:
    """Input columns that are written beside the predictions."""
    return list(dict.fromkeys([*infer.keep, *([infer.label] if infer.label else [])]))


def ids_of(table: Any, unit: Unit, column: str | None) -> Any:
    """The ids of a unit's rows: a column of the input, or their places in it."""
    import pyarrow as pa

    if column is not None:
        return table[column].combine_chunks()
    return pa.array(range(unit.start, unit.start + unit.rows), pa.int64())


def duplicate_id(rows: InputRows, column: str, *, at_once: int = 1 << 20) -> tuple[Any, Sequence[int]] | None:
    """A value of a column that occurs twice or is missing, and the rows where; None if all values are unique."""
    seen: dict[Any, int] = {}
    for start in range(0, rows.rows, at_once):
        count = min(at_once, rows.rows - start)
        for place, value in enumerate(rows.read(start, count, [column])[column].to_pylist(), start=start):
            if value is None:
                return None, (place,)
            if value in seen:
                return value, (seen[value], place)
            seen[value] = place
    return None
