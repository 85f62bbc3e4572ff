"""Computes a unit: batches of the measured size, smaller ones where memory runs out, single rows where one fails.

`worker.py` runs each unit with it; the size of a batch is measured on a few rows before the first unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from raytrain.config.user_code import users_error
from raytrain.errors import InputError, OutOfMemory, RaytrainError, RunError, StateLost, first_line
from raytrain.infer.input import InputRows, Unit, batches_of
from raytrain.infer.predictor import ANSWERS, MODEL_KEY, Answers, ModelOutputError, Predictor
from raytrain.train.memory.device import is_out_of_memory, let_go
from raytrain.trainable import RemoteState

OK, FAILED = "ok", "failed"
#: Rows that tell an error of the model's code from one of a row.
TRIED_ROWS = 8


class TooManyFailures(RunError):
    """More rows failed than `infer.max_failures` allows; the message is the last row's number and error."""


@dataclass
class RowResult:
    prediction: Any = None  # None if the row failed
    error: str | None = None  # why it failed, None if it did not
    seconds: float = 0.0  # of the batch that answered it, or of the attempts that failed
    batch_rows: int = 0  # rows of that batch
    tokens: int = 0  # of its answer, 0 where nothing is generated
    again: bool = False  # whether it was computed in a smaller batch than planned, after an error

    @property
    def status(self) -> str:
        return OK if self.error is None else FAILED


@dataclass
class UnitRunner:
    predictor: Predictor
    rows: InputRows
    batch_size: int  # rows of a batch; less once memory was too small for one
    # failed rows that end the job (`infer.max_failures`); a unit with more of them is given up, so that a model that
    # fails for every row is not tried with every one
    most_failed: int
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # called after each batch with the unit and how many of its rows are done
    on_rows: Callable[[Unit, int], None] = field(default=lambda unit, rows: None)
    batches_at_once: int = 1  # computed by as many threads; more than one for a model over stages
    remote: RemoteState = field(default_factory=RemoteState)  # parts of the model that other processes hold
    out_of_memory: int = field(default=0, init=False)  # batches that ran out of memory so far
    _tried: bool = field(default=False, init=False, repr=False)

    def run(self, unit: Unit, columns: Sequence[str] | None = None) -> tuple[Any, list[RowResult]]:
        """The input rows of a unit as an Arrow table, and their results, both in input order."""
        table = self.rows.read(unit.start, unit.rows, columns)
        results = [RowResult() for _ in range(unit.rows)]
        refused = self.predictor.refused(table)
        for row, why in refused.items():
            results[row] = RowResult(error=why)
        if len(refused) > self.most_failed:
            row, why = next(iter(refused.items()))
            raise TooManyFailures(f"row {unit.start + row:,}: {why}")
        left = [row for row in range(table.num_rows) if row not in refused]
        lengths = self.predictor.lengths(table)
        batches = [[left[at] for at in batch] for batch in batches_of([lengths[row] for row in left], self.batch_size)]
        answer = partial(self._answer, table, unit.start, results=results, again=False)
        done = unit.rows - len(left)
        with ThreadPoolExecutor(self.batches_at_once, thread_name_prefix="batch") as pool:
            answered = map(answer, batches) if self.batches_at_once == 1 else pool.map(answer, batches)
            for batch, _ in zip(batches, answered, strict=True):
                done += len(batch)
                self.on_rows(unit, done)
        return table, results

    def _answer(self, table: Any, start: int, batch: list[int], *, results: list[RowResult], again: bool) -> None:
        """Answer the rows `batch` of the unit; halve the batch at an error, until it is about one row."""
        began = time.perf_counter()
        failed: Exception | None = None
        answers = Answers([])
        try:
            answers = self.predict(self.predictor, table.take(batch), [start + row for row in batch])
        except Exception as error:  # of the user's model or of a row: it belongs into the row's result
            failed = error
        seconds = time.perf_counter() - began
        if failed is None:
            self._tried = True  # a model that has answered is no wrong one
            for place, row in enumerate(batch):
                tokens = 0 if answers.tokens is None else answers.tokens[place]
                results[row] = RowResult(answers.values[place], None, seconds, len(batch), tokens, again)
            return
        if isinstance(failed, StateLost):  # no row is the cause: the model is loaded again
            raise failed
        if let_go_of_batch(failed, self.device, [start + row for row in batch]):
            self.out_of_memory += 1
            self.batch_size = min(self.batch_size, max(len(batch) // 2, 1))  # of later units: not to fail in each
        # whether to find out if the error is one of the model's code: no batch was answered yet, and not all rows may
        # fail; of several batches at once each would find out for itself
        explained = isinstance(failed, RaytrainError) and not isinstance(failed, ModelOutputError)
        unknown = not self._tried and self.batches_at_once == 1 and not explained
        if unknown and self.most_failed < self.rows.rows and not is_out_of_memory(failed, device=self.device):
            self._tried = True
            check_model(self)
        if len(batch) == 1:
            named = "" if isinstance(failed, RaytrainError) else f"{type(failed).__name__}: "
            message = named + first_line(failed)
            results[batch[0]] = RowResult(error=message, seconds=seconds, batch_rows=1, again=again)
            if sum(result.error is not None for result in results) > self.most_failed:
                raise TooManyFailures(f"row {start + batch[0]:,}: {message}")
            return
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            self._answer(table, start, half, results=results, again=True)

    def predict(self, predictor: Predictor, table: Any, numbers: Sequence[int]) -> Answers:
        """The answers of a batch; at an error also the other processes of the model are ready for the next one.
        Raises OutOfMemory: one of them ran out of memory, so that its answers are none."""
        try:
            answers = predictor.predict(table, numbers)
        except StateLost:
            raise
        except Exception:
            self.remote.end_passes(short=True)
            self.remote.discard()
            raise
        shortages = self.remote.shortages()
        if shortages:
            self.remote.discard()
            raise OutOfMemory("; ".join(f"{one.who}: {one.error}" for one in shortages))
        return answers


def let_go_of_batch(error: Exception, device: torch.device, rows: Sequence[int]) -> bool:
    """Free what a failed batch holds in the frames of its error; returns whether it ran out of memory. Raises
    RunError: the error ended the GPU's context. Every later call of this process would fail as well, so that no row
    can be distinguished."""
    out_of_memory = is_out_of_memory(error, device=device)
    try:
        if not out_of_memory and isinstance(error, torch.AcceleratorError):
            raise error
        let_go(error, device)
    except torch.AcceleratorError as lost:  # cuBLAS and other libraries report a lost context in their own words
        raise RunError(
            f"one of the rows {min(rows)} to {max(rows)} ended the context of the GPU ({first_line(error)}); "
            "infer.batch_size=1 or scale.mode=cpu tells which"
        ) from lost
    return out_of_memory


# ---------------------------------------------------------------- errors of the model's code


def check_model(runner: UnitRunner) -> None:
    """Answer rows at equal distances over the whole input, each alone, until one of them shows that the model works.
    Raises InputError: every one of them failed at the same place of the model's code, so that no row is the cause."""
    predictor, total = runner.predictor.shortened(1), runner.rows.rows
    first: InputError | None = None
    for row in sorted({at * total // TRIED_ROWS for at in range(TRIED_ROWS)}):
        found = _model_error(runner, predictor, row)
        if found is None or (first is not None and found.remedy != first.remedy):
            return
        first = first or found
    if first is not None:
        raise first


def _model_error(runner: UnitRunner, predictor: Predictor, row: int) -> InputError | None:
    """The error of the model's code for a row; None if it can be answered, or fails for a reason of its own."""
    table = runner.rows.read(row, 1, list(predictor.columns))
    if predictor.refused(table):
        return None
    try:
        runner.predict(predictor, table, [row])
    except ModelOutputError as error:
        return InputError(MODEL_KEY, got=str(error), expected=ANSWERS)
    except RaytrainError:  # a lost state too: the first unit gets it again, and handles it
        return None
    except Exception as error:  # whatever the user's code raises
        raised = users_error(error, key=MODEL_KEY, doing="for every row that was tried")
        return None if let_go_of_batch(error, runner.device, [row]) else raised
    return None
