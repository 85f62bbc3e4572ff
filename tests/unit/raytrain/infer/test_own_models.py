"""A user's own model: what its forward may return without labels, and errors of its code told from those of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import Tensor, nn

from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.data.sources.in_memory import memory_source
from raytrain.data.sources.tables import ColumnChoice
from raytrain.errors import InputError
from raytrain.infer.input import InputRows, Unit
from raytrain.infer.model import InferenceModel
from raytrain.infer.predictor import ModelOutputError, RowPredictor
from raytrain.infer.runner import UnitRunner, check_model
from raytrain.train.job import source_facts

Forward = Callable[[Tensor], Any]


class Own(nn.Module):
    """A module whose forward is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.weight, self._answer = nn.Parameter(torch.ones(())), forward

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is None
        return self._answer(x)


class Output:
    """An object with logits, as transformers' models return."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.loss = logits, None


X = [[1.0, 0.0], [0.0, 2.0], [3.0, 0.5]]
SUMS, CLASSES = [1.0, 2.0, 3.5], [0, 1, 0]


def table() -> Any:
    return pa.table({"x": pa.array(X, pa.list_(pa.float32(), 2))})


def predicted(forward: Forward, **facts: Any) -> list[Any]:
    predictor = RowPredictor(Own(forward), ColumnChoice((), ("x",), None), **facts)
    return predictor.predict(table(), range(3)).values


NAMED = {"classes": ("a", "b"), "num_classes": 2}


@pytest.mark.parametrize(
    ("forward", "facts", "expected"),
    [
        pytest.param(lambda x: {"prediction": x.sum(1)}, {}, SUMS, id="the only tensor of a dict, one value a row"),
        pytest.param(lambda x: {"prediction": x.sum(1), "loss": x.sum()}, {}, SUMS, id="beside a loss"),
        pytest.param(lambda x: {"y": x.sum(1, keepdim=True)}, {}, SUMS, id="(B, 1)"),
        pytest.param(lambda x: x.sum(1), {}, SUMS, id="a tensor"),
        pytest.param(lambda x: x.sum(1, keepdim=True), {}, SUMS, id="a tensor (B, 1)"),
        pytest.param(lambda x: (x.sum(1), x), {}, SUMS, id="the first of a tuple"),
        pytest.param(lambda x: x, {}, CLASSES, id="scores alone"),
        pytest.param(lambda x: {"logits": x, "hidden": x * 2}, {}, CLASSES, id="logits beside others"),
        pytest.param(lambda x: Output(x), {}, CLASSES, id="an object with logits"),
        pytest.param(lambda x: {"logits": x}, NAMED, ["a", "b", "a"], id="logits of named classes"),
        pytest.param(lambda x: {"logits": x}, {"regression": True}, X, id="logits where labels were values"),
        pytest.param(lambda x: {"prediction": x}, {}, X, id="a vector"),
        pytest.param(lambda x: {"scores": x}, NAMED, ["a", "b", "a"], id="as many as there are classes"),
        pytest.param(lambda x: {"prediction": x.argmax(1)}, {}, CLASSES, id="classes"),
        pytest.param(lambda x: {"prediction": x.argmax(1)}, NAMED, ["a", "b", "a"], id="classes with names"),
        pytest.param(lambda x: {"prediction": x[:, 0] > 0}, {}, [1, 0, 1], id="yes or no"),
        pytest.param(lambda x: {"prediction": x.bfloat16().sum(1)}, {}, SUMS, id="half precision"),
    ],
)
def test_what_is_predicted_follows_from_shape_dtype_and_name(
    forward: Forward, facts: dict[str, Any], expected: list[Any]
) -> None:
    found = predicted(forward, **facts)
    assert found == expected and [type(one) for one in found] == [type(one) for one in expected]


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda x: {"a": x, "b": x[:, 0]}, r"Own returned a dict with a \(3, 2\), b \(3,\) for 3 rows"),
        (lambda x: {"loss": x.sum()}, r"a dict with loss \(\) for 3 rows without labels"),
        (lambda x: {}, "a dict with no tensor"),
        (lambda x: None, "returned a NoneType"),
        (lambda x: x.sum(), r"outputs of shape \(\) for 3 rows"),
        (lambda x: {"logits": x[:, :, None].expand(3, 2, 4)}, r"scores of shape \(3, 2, 4\)"),
    ],
)
def test_a_result_without_answers_is_an_error_of_the_model(forward: Forward, says: str) -> None:
    with pytest.raises(ModelOutputError, match=says):
        predicted(forward)


def test_rows_of_images_have_the_shape_of_training() -> None:
    seen: list[tuple[int, ...]] = []

    def forward(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x.flatten(1)

    predicted(forward, image_shape=(1, 2, 1))
    predicted(forward, image_shape=(1, 3, 1))
    assert seen == [(3, 1, 2, 1), (3, 2)], "only where the number of values fits"


# ---------------------------------------------------------------- before the first unit


def runner(forward: Forward, folder: Path, *, count: int = 100) -> UnitRunner:
    values = pa.array([[float(row), 0.0] for row in range(count)], pa.list_(pa.float32(), 2))
    parquet.write_table(pa.table({"x": values}), folder / "in.parquet")
    predictor = RowPredictor(Own(forward), ColumnChoice((), ("x",), None))
    return UnitRunner(predictor, InputRows.at([str(folder / "in.parquet")]), 32, most_failed=1)


def failing(bad: Callable[[float], bool]) -> Forward:
    """A forward that raises if one of its rows is bad."""

    def forward(x: Tensor) -> Tensor:
        if any(bad(row) for row in x[:, 0].tolist()):
            raise KeyError("weights")
        return x.sum(1)

    return forward


def test_an_error_of_every_row_is_one_of_the_model_with_its_own_frames(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        check_model(runner(failing(lambda row: True), tmp_path))
    assert caught.value.key == "model.builder" and "KeyError" in caught.value.got
    assert "every row that was tried" in caught.value.got
    assert "test_own_models.py" in caught.value.remedy and 'raise KeyError("weights")' in caught.value.remedy
    assert "predictor.py" not in caught.value.remedy


@pytest.mark.parametrize(
    "bad",
    [lambda row: False, lambda row: row == 3, lambda row: row < 20, lambda row: row > 0],
    ids=["none", "one", "the first twenty", "all but the first"],
)
def test_an_error_of_some_rows_is_left_to_the_units(bad: Callable[[float], bool], tmp_path: Path) -> None:
    check_model(runner(failing(bad), tmp_path))


def test_a_result_without_answers_is_told_with_what_forward_may_return(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"model\.builder: got Own returned a dict with loss .*alone, as `logits`"):
        check_model(runner(lambda x: {"loss": x.sum()}, tmp_path))


def test_errors_that_name_what_is_wrong_with_a_row_are_none_of_the_model(tmp_path: Path) -> None:
    check_model(runner(lambda x: x.sum(1) * float("nan"), tmp_path))


def counting(shapes: list[int], forward: Forward) -> Forward:
    def counted(x: Tensor) -> Any:
        shapes.append(len(x))
        return forward(x)

    return counted


def test_a_model_that_answers_costs_no_further_pass(tmp_path: Path) -> None:
    shapes: list[int] = []
    runner(counting(shapes, lambda x: x.sum(1)), tmp_path).run(Unit(0, 0, 64), ["x"])
    assert shapes == [32, 32]


def test_the_first_batch_that_fails_shows_an_error_of_the_model_after_a_few_rows(tmp_path: Path) -> None:
    shapes: list[int] = []
    with pytest.raises(InputError, match=r"model\.builder: got KeyError"):
        runner(counting(shapes, failing(lambda row: True)), tmp_path).run(Unit(0, 0, 64), ["x"])
    assert shapes == [32, *[1] * 8]


def test_a_bad_row_costs_one_further_pass(tmp_path: Path) -> None:
    shapes: list[int] = []
    results = runner(counting(shapes, failing(lambda row: row == 40)), tmp_path).run(Unit(0, 0, 64), ["x"])[1]
    assert [row for row, one in enumerate(results) if one.error] == [40] and shapes.count(1) == 2, (
        "halving ends with one"
    )
    shapes.clear()
    results = runner(counting(shapes, failing(lambda row: row == 3)), tmp_path).run(Unit(0, 0, 64), ["x"])[1]
    assert [row for row, one in enumerate(results) if one.error] == [3] and shapes.count(1) == 3


# ---------------------------------------------------------------- a forward that demands its labels


class Demanding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Positional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, features: Tensor) -> Tensor:
        return self.layer(features)


ROWS = {"x": pa.list_(pa.float32(), 2), "labels": pa.int64()}


def loaded(module: nn.Module, columns: list[str], **more: Any) -> Any:
    model = InferenceModel(ModelConfig(builder="my_model:build"), **more)
    schema = pa.schema([(name, ROWS[name]) for name in columns])
    return model.load(InferConfig(), schema, module)


def test_a_forward_that_demands_its_labels_gets_the_column(tmp_path: Path) -> None:
    predictor = loaded(Demanding(), ["x", "labels"], reads={"named": ["x"]}, facts={"num_classes": 3})
    rows = pa.table({"x": pa.array(X, ROWS["x"]), "labels": [0, 1, 2]})
    answers = predictor.predict(rows.select(list(predictor.columns)), range(3)).values
    assert predictor.columns == ("x", "labels") and all(0 <= one < 3 for one in answers)


def test_without_the_column_the_parameter_is_named_before_any_row() -> None:
    with pytest.raises(InputError, match=r"model\.builder: got a forward that demands labels.*write labels=None"):
        loaded(Demanding(), ["x"], reads={"named": ["x"]})


def test_the_first_parameter_may_have_any_name() -> None:
    assert loaded(Positional(), ["x"], reads={"named": ["x"]}).columns == ("x",)


class Typed(nn.Module):
    """Remembers the formats of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(1, 1), dict[str, torch.dtype]()

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        self.seen = {"x": x.dtype, "kind": kind.dtype}
        return self.layer(x.float().reshape(-1, 1))


def test_inputs_have_the_formats_of_training_whatever_numbers_a_file_holds_by_chance() -> None:
    """A column with whole numbers alone, and one of codes that were written as 3.0."""
    source = memory_source({"x": torch.rand(8), "kind": torch.arange(8)}, None, fraction=0.0)
    facts = source_facts(source)
    assert facts["feature_dtypes"] == {"x": "float32", "kind": "int64"}
    module = Typed()
    model = InferenceModel(ModelConfig(builder="my_model:build"), facts=facts)
    rows = pa.table({"x": pa.array([1, 2], pa.int64()), "kind": pa.array([3.0, 4.0], pa.float64())})
    predictor = model.load(InferConfig(), rows.schema, module)
    predictor.predict(rows, range(2))
    assert module.seen == {"x": torch.float32, "kind": torch.int64}
    predictor.predict(rows.set_column(1, "kind", pa.array([3.5, 4.0])), range(2))
    assert module.seen["kind"] == torch.float32
