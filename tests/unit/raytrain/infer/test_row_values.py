"""Rows of another length than the model takes fail alone, and no row is padded for a model that takes no mask."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import Tensor, nn

from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.data.sources.tables import ColumnChoice
from raytrain.errors import InputError
from raytrain.infer.input import InputRows, Unit
from raytrain.infer.model import InferenceModel
from raytrain.infer.predictor import RowPredictor
from raytrain.infer.runner import RowResult, UnitRunner

#: Row -> its values: two of each wrong length, between rows of four.
LENGTHS = [4, 3, 4, 4, 5, 4, 3, 4, 4, 5]


def values(row: int) -> list[float]:
    """The values of a row."""
    return [float(row + at) for at in range(LENGTHS[row])]


class FourIn(nn.Module):
    """A linear layer that takes four values and adds them with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.tensor([[1.0, 10.0, 100.0, 1000.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Mean(nn.Module):
    """The mean of rows of any length; `seen` are the shapes that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return x.mean(1) * self.weight


class MaskedMean(Mean):
    """The same for padded rows."""

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.seen.append(tuple(x.shape))
        mask = torch.ones_like(x) if attention_mask is None else attention_mask
        return (x * mask).sum(1) / mask.sum(1)


def answered(
    module: nn.Module, folder: Path, *, batch: int, takes: dict[str, int] | None = None, most_failed: int = 4
) -> list[RowResult]:
    """The results of all rows in batches of `batch`."""
    rows = pa.table({"x": pa.array([values(row) for row in range(len(LENGTHS))], pa.list_(pa.float32()))})
    parquet.write_table(rows, folder / "in.parquet")
    predictor = RowPredictor(module, ColumnChoice((), ("x",), None), regression=True, takes=takes or {})
    runner = UnitRunner(predictor, InputRows.at([str(folder / "in.parquet")]), batch, most_failed=most_failed)
    return runner.run(Unit(0, 0, len(LENGTHS)), ["x"])[1]


@pytest.mark.parametrize("takes", [{"x": 4}, {}], ids=["known", "unknown"])
@pytest.mark.parametrize("batch", [1, 2, 3, 10])
def test_a_row_of_another_length_fails_alone_with_one_sentence_in_any_batch(
    batch: int, takes: dict[str, int], tmp_path: Path
) -> None:
    results = answered(FourIn(), tmp_path, batch=batch, takes=takes)
    for row, (result, length) in enumerate(zip(results, LENGTHS, strict=True)):
        if length == 4:
            assert result.error is None and result.prediction == sum(v * 10**n for n, v in enumerate(values(row)))
        else:
            assert result.prediction is None and result.error == f"x has {length} values, the model takes 4"
    if takes:
        assert not any(result.again for result in results), "known before: no batch of other rows is computed again"


class Sum(Mean):
    """The sum of all values of a row, whatever its shape."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return x.flatten(1).sum(1) * self.weight


def answers_to(table: pa.Table, choice: ColumnChoice, folder: Path, *, batch: int) -> tuple[Sum, list[RowResult]]:
    parquet.write_table(table, folder / "in.parquet")
    predictor = RowPredictor(Sum(), choice, regression=True)
    runner = UnitRunner(predictor, InputRows.at([str(folder / "in.parquet")]), batch, most_failed=table.num_rows)
    return predictor.module, runner.run(Unit(0, 0, table.num_rows), list(predictor.columns))[1]  # type: ignore[return-value]


@pytest.mark.parametrize("batch", [1, 3, 10])
def test_a_value_that_is_no_number_fails_its_row_alone_and_is_named_without_another_row_number(
    batch: int, tmp_path: Path
) -> None:
    """A CSV file with one such value has a column of strings."""
    a = ["1", "2.5", "x", " 4", None, "6", "nan", "1e1"]
    table = pa.table({"a": a, "b": pa.array([10.0, None, 30.0, 40.0, 50.0, float("inf"), 70.0, 80.0])})
    _, results = answers_to(table, ColumnChoice(("a", "b"), (), None), tmp_path, batch=batch)
    assert [result.prediction for result in results] == [11.0, None, None, 44.0, None, None, None, 90.0]
    assert [result.error for result in results] == [
        None, "column 'b' has no value", "column 'a' has no finite number: 'x'", None, "column 'a' has no value",
        "column 'b' has no finite number: inf", "column 'a' has no finite number: 'nan'", None,
    ]  # fmt: skip
    assert not any(result.again for result in results), "no batch of other rows is computed again"


def test_whole_numbers_of_any_size_flags_and_decimals_are_numbers(tmp_path: Path) -> None:
    columns = {"id": [2**60 + 1, 5], "flag": [True, False], "price": [Decimal("1.25"), Decimal("2.50")]}
    _, results = answers_to(pa.table(columns), ColumnChoice(tuple(columns), (), None), tmp_path, batch=2)
    assert [result.prediction for result in results] == [pytest.approx(2.0**60), 7.5]


def test_a_value_in_a_list_that_is_no_number_fails_its_row_alone(tmp_path: Path) -> None:
    lists = pa.array([[1.0, 2.0], [3.0, float("nan")], None, [None, 4.0], [5.0, 6.0]], pa.list_(pa.float32()))
    _, results = answers_to(pa.table({"x": lists}), ColumnChoice((), ("x",), None), tmp_path, batch=5)
    assert [result.prediction for result in results] == [3.0, None, None, None, 11.0]
    assert [result.error for result in results][1:4] == [
        "column 'x' has no finite number: nan", "column 'x' has no value",
        "column 'x' has no finite number: None",
    ]  # fmt: skip


def test_lists_of_lists_reach_the_model_in_their_shape(tmp_path: Path) -> None:
    images = torch.arange(24.0).reshape(4, 1, 2, 3)
    module, results = answers_to(pa.table({"x": images.tolist()}), ColumnChoice((), ("x",), None), tmp_path, batch=4)
    assert module.seen == [(4, 1, 2, 3)]
    assert [result.prediction for result in results] == images.flatten(1).sum(1).tolist()


def test_rows_of_another_length_count_as_failures(tmp_path: Path) -> None:
    from raytrain.infer.runner import TooManyFailures

    for takes in ({"x": 4}, {}):
        with pytest.raises(TooManyFailures, match=r"x has [35] values, the model takes 4"):
            answered(FourIn(), tmp_path, batch=10, takes=takes, most_failed=3)


@pytest.mark.parametrize("batch", [1, 4, 10])
def test_a_model_without_a_mask_is_given_rows_of_equal_lengths_unpadded(batch: int, tmp_path: Path) -> None:
    module = Mean()
    results = answered(module, tmp_path, batch=batch)
    assert [result.prediction for result in results] == [row + (n - 1) / 2 for row, n in enumerate(LENGTHS)]
    assert sum(shape[0] for shape in module.seen) == len(LENGTHS), "each row once"


def test_a_model_with_a_mask_is_given_padded_rows(tmp_path: Path) -> None:
    module = MaskedMean()
    results = answered(module, tmp_path, batch=10)
    assert [result.prediction for result in results] == [row + (n - 1) / 2 for row, n in enumerate(LENGTHS)]
    assert module.seen == [(10, 5)]


def test_an_error_of_the_model_itself_stays_what_it_is(tmp_path: Path) -> None:
    class Broken(FourIn):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] != 4:
                raise RuntimeError("no such row")
            return self.layer(x)

    results = answered(Broken(), tmp_path, batch=10)
    assert [result.error for result in results if result.error] == ["RuntimeError: no such row"] * 4


# ---------------------------------------------------------------- before any row


MLP = {"builder": "raytrain.models.mlp:mlp", "hidden": [8], "num_features": 4, "num_classes": 3}
CNN = {"builder": "raytrain.models.cnn:cnn", "channels": [4], "image_shape": [1, 2, 2], "num_classes": 3}


def fixed(size: int) -> Any:
    """A schema whose rows have `size` values."""
    return pa.schema([("x", pa.list_(pa.float32(), size)), ("note", pa.string())])


@pytest.mark.parametrize("model", [MLP, CNN])
def test_a_file_whose_header_shows_another_number_of_values_is_refused_before_the_model_is_built(
    model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = InferenceModel(ModelConfig(**model))
    monkeypatch.setattr(InferenceModel, "_built", lambda self: pytest.fail("the model was built"))
    made.check_header(InferConfig(), fixed(4))
    with pytest.raises(InputError, match="got the column x with 3 values in each row, expected 4, as the model takes"):
        made.check_header(InferConfig(), fixed(3))
    with pytest.raises(InputError, match=r"infer\.input: got the columns y, z, expected x, which"):
        made.check_header(InferConfig(), pa.schema([("y", pa.float32()), ("z", pa.float32())]))


def test_the_columns_of_the_training_data_and_of_prompts_are_looked_for_in_the_header() -> None:
    own, config = ModelConfig(builder="my:net"), InferConfig()
    trained = InferenceModel(own, facts={"num_features": 2}, reads={"stacked": ["a", "b"]})
    trained.check_header(config, pa.schema([("b", pa.int64()), ("a", pa.int64())]))
    with pytest.raises(InputError) as caught:
        trained.check_header(config, pa.schema([("a", pa.int64()), ("c", pa.int64())]))
    assert str(caught.value) == (
        "infer.input: got the columns a, c, expected a, b, which the model reads: b is missing"
    )
    text = InferenceModel(ModelConfig(builder="raytrain.models.gpt:gpt"), facts={"vocab_size": 256})
    text.check_header(config, pa.schema([("prompt", pa.string())]))
    with pytest.raises(InputError, match=r"infer\.prompt_field"):
        text.check_header(config, pa.schema([("words", pa.string())]))
    with pytest.raises(InputError, match="no value in the column prompt in any row of infer"):
        text.check_header(config, pa.schema([("prompt", pa.null())]))
    InferenceModel(own).check_header(config, pa.schema([("z", pa.int64())]))  # only its forward tells
