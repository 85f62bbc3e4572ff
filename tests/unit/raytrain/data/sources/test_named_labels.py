"""String labels of own datasets, and the generators that a dataset holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import Subset

from raytrain.config.sections import DataConfig
from raytrain.data.prefetch import BatchRequest, LoaderPool
from raytrain.data.rows.map_style import DatasetSplit
from raytrain.data.sources.in_memory import memory_source
from raytrain.data.sources.open import describe_shapes, open_source
from raytrain.errors import InputError

NAMES = ["dog", "cat", "NA", "cat", "ant"]


class Named:
    def __init__(self, names: list[str]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> Any:
        return torch.tensor([float(row)]), self.names[row]


@pytest.mark.parametrize(
    "made",
    [
        Named,
        lambda names: {"x": torch.zeros(len(names), 1), "labels": names},
        lambda names: {"x": torch.zeros(len(names), 1), "labels": np.array(names)},
        lambda names: [{"x": [0.0], "labels": name} for name in names],
        lambda names: pa.table({"x": [[0.0]] * len(names), "labels": names}),
        lambda names: pd.DataFrame({"x": np.zeros(len(names)), "labels": pd.Categorical(names)}),
    ],
)
def test_names_become_the_numbers_of_their_sorted_order_over_both_parts(made: Any) -> None:
    source = memory_source(made(NAMES), made(["bee", "dog"]), fraction=0.0)
    assert source.class_names == ("NA", "ant", "bee", "cat", "dog") and source.classes == 5
    assert source.train.gather(np.arange(5))["labels"].tolist() == [4, 3, 0, 3, 1]
    assert source.eval is not None and source.eval.gather(np.arange(2))["labels"].tolist() == [2, 4]
    held = memory_source(made(NAMES * 4), None, fraction=0.25)
    assert (
        held.eval is not None and len(held.eval) == 5 and held.eval.gather(np.arange(5))["labels"].dtype == torch.int64
    )


def test_a_name_that_was_not_there_at_first_is_refused() -> None:
    data = Named(["a", "b"])
    source = memory_source(data, None, fraction=0.0)
    data.names[1] = "c"
    with pytest.raises(InputError, match="the label 'c', expected one of a, b"):
        source.train.gather(np.arange(2))


def table(rows: int, labels: list[Any]) -> Any:
    return pa.table({"x": [[float(row)] for row in range(rows)], "labels": labels})


@pytest.mark.parametrize("order", ["rows", "groups"])
def test_a_table_without_a_named_label_takes_its_column_of_names(order: str, tmp_path: Path) -> None:
    train, held = table(5, NAMES), table(2, ["bee", "dog"])
    made = [open_source(DataConfig(train=train, eval=held), context=None)]
    for name, one in (("train", train), ("eval", held)):
        parquet.write_table(one, tmp_path / f"{name}.parquet")
    keys = {"path": str(tmp_path / "train.parquet"), "eval_path": str(tmp_path / "eval.parquet"), "order": order}
    data = DataConfig(source="parquet", **keys)  # as a written Ray Dataset is read
    made.append(open_source(data, context=None))
    for source in made:
        assert source.class_names == ("NA", "ant", "bee", "cat", "dog") and source.classes == 5
        assert source.train.gather(np.arange(5))["labels"].tolist() == [4, 3, 0, 3, 1]
        assert source.eval is not None and source.eval.gather(np.arange(2))["labels"].tolist() == [2, 4]
    assert describe_shapes(data).get("num_classes") == (5 if order == "rows" else None)


def test_a_missing_name_of_a_table_is_named() -> None:
    with pytest.raises(InputError, match="a missing value in column 'labels' row 1"):
        memory_source(table(3, ["a", None, "b"]), None, fraction=0.0)


MIXED = {
    "a number among names": (["a", "b", 3], None, "data.train: got 3 in column 'labels' row 2, expected a name"),
    "a name among numbers": ([0, 1, "b"], None, "data.train: got 'b' in column 'labels' row 2, expected a number"),
    "names in the other part": ([0, 1, 2], ["a", "b"], "data.eval: got 'a' in column 'labels' row 0, expected a num"),
    "numbers in the other part": (["a", "b", "c"], [0], "data.eval: got 0 in column 'labels' row 0, expected a name"),
}


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("columns", [True, False])
def test_names_and_numbers_together_are_refused_by_column_and_row(mixed: str, columns: bool) -> None:
    def made(labels: list[Any]) -> Any:
        return {"x": torch.zeros(len(labels), 1), "labels": labels} if columns else Named(labels)

    train, held, words = MIXED[mixed]
    with pytest.raises(InputError, match=re.escape(words)):
        source = memory_source(made(train), held and made(held), fraction=0.0)
        for split in filter(None, (source.train, source.eval)):
            split.gather(np.arange(len(split)))


class Noisy:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"x": torch.tensor(self.rng.random(3))}


@pytest.mark.parametrize("nested", [False, True])
def test_a_datasets_own_generator_draws_anew_for_each_row_in_any_number_of_processes(nested: bool) -> None:
    draws = []
    for workers in (1, 2):
        split = DatasetSplit(Subset(Noisy(), list(range(40))) if nested else Noisy())
        pool = LoaderPool({"train": split}, workers=workers, prefetch=1, seed=3)  # type: ignore[dict-item]
        try:
            reads = [pool.begin(BatchRequest("train", 0, np.arange(at, at + 10))) for at in range(0, 40, 10)]
            draws.append(torch.cat([read.result()["x"] for read in reads]))
        finally:
            pool.close()
    assert torch.equal(*draws) and len(torch.unique(draws[0])) == 120
