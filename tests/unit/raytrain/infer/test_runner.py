"""Units are answered row by row: a bad row fails alone, memory shortages split batches, and a broken model ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from raytrain.errors import InputError, RunError, StateLost
from raytrain.infer.input import InputRows, Unit, usual_rows
from raytrain.infer.predictor import Answers
from raytrain.infer.runner import TooManyFailures, UnitRunner
from raytrain.train.memory.device import Shortage
from raytrain.trainable import RemoteState


class Doubler:
    """Answers twice the number; `fails` may raise for a batch. Remembers the batches."""

    columns, generates = ("n",), False

    def __init__(self, fails: Callable[[list[int]], None] = lambda rows: None) -> None:
        self.fails, self.batches = fails, list[list[int]]()

    def shortened(self, tokens: int) -> Doubler:
        return self

    def lengths(self, table: Any) -> list[int]:
        return [1] * table.num_rows

    def refused(self, table: Any) -> dict[int, str]:
        return {}

    def predict(self, table: Any, numbers: Sequence[int]) -> Answers:
        values = table["n"].to_pylist()
        assert values == [number + 100 for number in numbers]
        self.batches.append(list(numbers))
        self.fails(list(numbers))
        return Answers([value * 2 for value in values], [1] * len(values))


@pytest.fixture
def rows(tmp_path: Path) -> InputRows:
    """200 rows whose number is their place + 100."""
    parquet.write_table(pa.table({"n": range(100, 300)}), tmp_path / "in.parquet")
    return InputRows.at([str(tmp_path / "in.parquet")])


def test_a_unit_is_answered_in_input_order(rows: InputRows) -> None:
    model = Doubler()
    table, results = UnitRunner(model, rows, 8, most_failed=0).run(Unit(1, 50, 20), ["n"])
    assert [result.prediction for result in results] == [2 * (100 + row) for row in range(50, 70)]
    assert [result.status for result in results] == ["ok"] * 20 and not any(result.again for result in results)
    assert [len(batch) for batch in model.batches] == [8, 8, 4] and table["n"].to_pylist()[0] == 150
    assert {result.batch_rows for result in results} == {8, 4} and min(result.seconds for result in results) > 0


def test_bad_rows_fail_alone_and_keep_their_own_error(rows: InputRows) -> None:
    def fails(numbers: list[int]) -> None:
        for bad in {3, 11} & set(numbers):
            raise ValueError(f"row {bad} is bad")

    model = Doubler(fails)
    _, results = UnitRunner(model, rows, 8, most_failed=2).run(Unit(0, 0, 16))
    assert {row for row, result in enumerate(results) if result.status == "failed"} == {3, 11}
    assert results[3].error == "ValueError: row 3 is bad" and results[11].error == "ValueError: row 11 is bad"
    assert results[3].prediction is None and results[2].prediction == 204
    assert all(result.again for result in results)
    assert len(model.batches) <= 2 * 7 + 1, (
        "each bad row is found by halving its batch; one row more shows that others work"
    )


def test_memory_shortages_split_a_batch_and_are_counted(rows: InputRows) -> None:
    def fails(numbers: list[int]) -> None:
        if len(numbers) > 3:
            raise torch.OutOfMemoryError("no memory")

    runner = UnitRunner(Doubler(fails), rows, 8, most_failed=0)
    _, results = runner.run(Unit(0, 0, 8))
    assert [result.status for result in results] == ["ok"] * 8 and {result.batch_rows for result in results} == {2}
    assert runner.out_of_memory == 3


class Hosts(RemoteState):
    """Processes with a part of the model, which run out of memory above a number of rows; remembers the calls."""

    def __init__(self, model: Doubler, most: int) -> None:
        super().__init__()
        self.model, self.most, self.calls = model, most, list[str]()

    def shortages(self) -> list[Shortage]:
        return [Shortage("expert host 1", "OutOfMemoryError: no memory")] * (len(self.model.batches[-1]) > self.most)

    def discard(self) -> None:
        self.calls.append("discard")

    def end_passes(self, *, short: bool) -> None:
        self.calls.append(f"end_passes {short}")


def test_answers_of_a_batch_for_which_a_host_had_no_memory_are_none(rows: InputRows) -> None:
    model = Doubler()
    hosts = Hosts(model, most=2)
    runner = UnitRunner(model, rows, 8, most_failed=0, remote=hosts)
    _, results = runner.run(Unit(0, 0, 8))
    assert [result.prediction for result in results] == [2 * (100 + row) for row in range(8)]
    assert {result.batch_rows for result in results} == {2} and runner.out_of_memory == 3
    assert hosts.calls == ["discard"] * 3, "each shortage is dropped on all hosts"


def test_a_row_that_fails_leaves_no_exchange_with_hosts_open_and_a_lost_host_is_not_its_fault(rows: InputRows) -> None:
    def fails(numbers: list[int]) -> None:
        if 3 in numbers:
            raise ValueError("row 3 is bad")
        if 5 in numbers:
            raise StateLost("expert host 0 died")

    model = Doubler(fails)
    hosts = Hosts(model, most=8)
    runner = UnitRunner(model, rows, 1, most_failed=1, remote=hosts)
    with pytest.raises(StateLost, match="expert host 0 died"):
        runner.run(Unit(0, 0, 8))
    assert hosts.calls == ["end_passes True", "discard"] and model.batches[-1] == [5]


@pytest.mark.parametrize(
    ("error", "raised", "says"),
    [
        (RuntimeError("broken"), InputError, "model.builder: got RuntimeError: broken, raised for every row"),
        (RunError("no prompt"), TooManyFailures, "row 2: no prompt"),
    ],
    ids=["by the model's code", "by the rows"],
)
def test_a_model_that_fails_for_every_row_is_given_up_early(
    error: Exception, raised: type[Exception], says: str, rows: InputRows
) -> None:
    def fails(numbers: list[int]) -> None:
        raise type(error)(*error.args)

    model = Doubler(fails)
    with pytest.raises(raised, match=says):
        UnitRunner(model, rows, 64, most_failed=2).run(Unit(0, 0, 200))
    assert len(model.batches) < 15


def test_where_all_rows_may_fail_an_error_of_the_model_is_theirs(rows: InputRows) -> None:
    def fails(numbers: list[int]) -> None:
        raise RuntimeError("broken")

    _, results = UnitRunner(Doubler(fails), rows, 64, most_failed=200).run(Unit(0, 0, 200))
    assert {result.error for result in results} == {"RuntimeError: broken"}


def test_an_error_that_ends_the_gpus_context_ends_the_job_at_once(rows: InputRows) -> None:
    """Every later call would fail as well, so that no row could be told apart; a lack of memory is no such error."""

    def fails(numbers: list[int]) -> None:
        error = torch.AcceleratorError("CUDA error: device-side assert triggered\nmore")
        error.error_code = 710 if 40 in numbers else 2  # pyright: ignore[reportAttributeAccessIssue]
        if 40 in numbers or len(numbers) > 4:
            raise error

    model = Doubler(fails)
    runner = UnitRunner(model, rows, 8, most_failed=200)
    with pytest.raises(
        RunError, match=r"one of the rows 40 to 47 ended the context of the GPU \(CUDA error: device-side"
    ):
        runner.run(Unit(0, 32, 16))
    assert [len(batch) for batch in model.batches] == [8, 4, 4, 8] and runner.out_of_memory == 1


def test_a_librarys_error_ends_the_job_where_the_context_is_lost(
    rows: InputRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS has its own words for it; the next call of the CUDA runtime says so."""

    def fails(numbers: list[int]) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`")

    def lost(_error: BaseException | None, _device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("raytrain.infer.runner.let_go", lost)
    model = Doubler(fails)
    with pytest.raises(RunError, match=r"one of the rows 0 to 7 ended the context of the GPU \(CUDA error: CUBLAS_ST"):
        UnitRunner(model, rows, 8, most_failed=200).run(Unit(0, 0, 16))
    assert len(model.batches) == 1


def test_a_batch_that_memory_does_not_hold_is_not_tried_again_in_later_units(rows: InputRows) -> None:
    def fails(numbers: list[int]) -> None:
        if len(numbers) > 4:
            raise MemoryError

    model = Doubler(fails)
    runner = UnitRunner(model, rows, 16, most_failed=0)
    for number in range(2):
        _, results = runner.run(Unit(number, 16 * number, 16))
        assert [result.error for result in results] == [None] * 16
    assert runner.batch_size == 4 and runner.out_of_memory == 3
    assert [len(batch) for batch in model.batches] == [16, 8, 4, 4, 8, 4, 4, 4, 4, 4, 4]


def test_a_gpu_answers_more_rows_at_a_time() -> None:
    assert usual_rows(generates=True) == 16 and usual_rows(generates=False) == 256
    assert usual_rows(generates=True, on_gpu=True) == 256 and usual_rows(generates=False, on_gpu=True) == 4096
