"""float64 columns: which become float32, by what they would lose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from raytrain.data.rows.float64 import Float64Columns, lost_in_float32
from raytrain.data.sources.in_memory import memory_source

DRAW = np.random.default_rng(0)
HELD = {
    "normal": DRAW.standard_normal((300, 3)),
    "large and small": DRAW.random(300) * 1e9 + 0.5,
    "degrees": 36.5 + DRAW.random((40, 1)),
    "years": np.arange(1990.0, 2020.0),
    "a constant": np.full(20, 0.1),
    "zeros": np.zeros((20, 2)),
    "images": DRAW.random((6, 3, 4, 4)),
}
LOST = {
    "seconds of a day": 1.7e9 + DRAW.random(300) * 86400,
    "seconds of five years": 1.5e9 + DRAW.random(300) * 1.6e8,
    "ids": np.arange(2.0**24, 2.0**24 + 300),
    "a feature of a table": np.stack([DRAW.standard_normal(300), 1.7e9 + DRAW.random(300)], axis=1),
    "the same second": np.full(20, 1.7e9 + 0.25),
    "too large": np.array([1e300, 1.0]),
    "too small": np.array([1e-60, 2e-60, 3e-60]),
}


@pytest.mark.parametrize("name", HELD)
def test_what_float32_holds_as_well(name: str) -> None:
    assert lost_in_float32(torch.from_numpy(HELD[name])) is None


@pytest.mark.parametrize("name", LOST)
def test_what_float32_would_lose(name: str) -> None:
    assert "float32 would round" in (lost_in_float32(torch.from_numpy(LOST[name])) or "")


class Items:
    """A dataset whose items are nested, with a label of Python's float."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read += 1
        return {"inside": {"x": np.full(3, index / 7), "time": np.array(1.7e9 + index / 3)}, "labels": index / 2}


def test_columns_of_a_dataset_and_of_nested_batches() -> None:
    items = Items()
    train = memory_source(items, None, fraction=0.0).train
    columns = Float64Columns(train, seed=3)
    batch = columns.narrowed(train.gather(np.arange(4)))
    assert batch["inside"]["x"].dtype is torch.float32 and batch["inside"]["time"].dtype is torch.float64
    assert torch.equal(batch["inside"]["x"], (torch.arange(4, dtype=torch.float64)[:, None] / 7).expand(4, 3).float())
    assert list(columns.kept) == ["inside.time"]
    before = items.read
    columns.narrowed(train.gather(np.arange(8)))
    assert items.read == before + 8, "decided once"


def test_the_decision_does_not_depend_on_the_batch_that_asks() -> None:
    values = np.concatenate([np.arange(9000.0), 2.0**24 + np.arange(1000)])  # ids: the first ones alone would fit
    train = memory_source({"x": values, "y": values / 1e9}, None, fraction=0.0).train
    assert lost_in_float32(train.gather(np.arange(8))["x"]) is None
    for rows in (np.arange(8), np.arange(9990, 10000)):
        batch = Float64Columns(train, seed=0).narrowed(train.gather(rows))
        assert (batch["x"].dtype, batch["y"].dtype) == (torch.float64, torch.float32)


def test_a_batch_without_float64_is_the_same_object() -> None:
    train = memory_source({"x": torch.zeros(8, 2), "n": torch.arange(8)}, None, fraction=0.0).train
    batch = train.gather(np.arange(4))
    assert Float64Columns(train, seed=0).narrowed(batch) is batch


def test_an_error_about_dtypes_names_the_column_and_others_do_not() -> None:
    train = memory_source({"time": LOST["seconds of a day"]}, None, fraction=0.0).train
    columns = Float64Columns(train, seed=0)
    error = RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")
    assert columns.explained(error) is None, "nothing stays float64 yet"
    columns.narrowed(train.gather(np.arange(4)))
    assert "time" in (columns.explained(error) or "") and "astype" in (columns.explained(error) or "")
    assert columns.explained(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
