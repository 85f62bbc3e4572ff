"""Parquet, CSV, JSON lines and Arrow tables."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet

from raytrain.config.sections import DataConfig
from raytrain.data.rows.contract import Source
from raytrain.data.rows.splits import RaggedSplit
from raytrain.data.sources.open import check_label, describe_shapes, describe_source, open_source
from raytrain.errors import InputError
from raytrain.models.sizes import model_facts


def table(rows: int = 50, **columns: Any) -> pa.Table:
    draw = np.random.default_rng(3)
    return pa.table({"a": draw.normal(size=rows), "b": np.arange(rows), "flag": np.arange(rows) % 2 == 0, **columns})


def write(data: pa.Table, path: Path) -> str:
    if path.suffix == ".parquet":
        parquet.write_table(data, path, row_group_size=16)
    elif path.suffix == ".csv":
        csv.write_csv(data, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in data.to_pylist()))
    return str(path)


def opened(**section: Any) -> Source:
    return open_source(DataConfig(**section), context=None)


def full_tensor(source: Source) -> dict[str, torch.Tensor]:
    parts = [split.gather(split.eval_order()) for split in (source.train, source.eval) if split is not None]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_numbers_are_stacked_and_the_label_is_a_class(tmp_path: Path, kind: str) -> None:
    data = table(y=pa.array(np.arange(50) % 3))
    section = {"source": kind, "path": write(data, tmp_path / f"t.{kind}"), "label": "y"}
    source = opened(**section, eval_fraction=0.0)
    batch = full_tensor(source)
    assert batch["x"].shape == (50, 3) and batch["x"].dtype == torch.float32 and source.classes == 3
    assert torch.equal(batch["x"][:, 0], torch.from_numpy(data["a"].to_numpy().astype(np.float32)))
    assert batch["x"][:4, 1:].tolist() == [[0, 1], [1, 0], [2, 1], [3, 0]]
    assert batch["labels"].tolist() == data["y"].to_pylist() and batch["labels"].dtype == torch.int64
    held = opened(**section)
    assert len(held.train) == 45 and len(held.eval) == 5
    facts = describe_source(DataConfig(**section), context=None)
    assert (facts.train_rows, facts.eval_rows, facts.row_bytes) == (45, 5, 20)
    assert facts.total_bytes == held.facts.total_bytes == 50 * 20
    assert describe_shapes(DataConfig(**section)) == {"num_features": 3, "num_classes": 3}


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("labels", [["low", "high"], [True, False], [-100, 4], [0.5, 1.5], [-100, -100]])
def test_classes_are_counted_without_opening_as_training_counts_them(
    tmp_path: Path, kind: str, labels: list[Any]
) -> None:
    path, other = (write(table(y=labels * 25), tmp_path / f"{name}.{kind}") for name in ("t", "e"))
    write(table(y=(labels if isinstance(labels[0], float) else [labels[0], labels[0]]) * 25), tmp_path / f"t.{kind}")
    section = {"source": kind, "path": path, "eval_path": other, "label": "y"}
    assert describe_shapes(DataConfig(**section)).get("num_classes") == opened(**section).classes


def test_classes_that_are_not_counted_are_said_to_be_a_guess(tmp_path: Path) -> None:
    path = write(table(y=np.arange(50) % 3), tmp_path / "t.parquet")
    data = DataConfig(source="parquet", path=path, label="y", order="groups")
    found = model_facts("raytrain.models.mlp:mlp", {"hidden": [8]}, describe_shapes(data))
    assert found is not None and found.parameters == 4 * 8 + 8 + 1
    assert "with one output: the classes of data.label are not counted yet" in found.reason
    values = DataConfig(source="parquet", path=path, label="a", order="groups")
    known = model_facts("raytrain.models.mlp:mlp", {"hidden": [8]}, describe_shapes(values))
    assert known is not None and known.reason == "formula of mlp [3, 8, 1]"


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_label_among_the_features_is_refused_and_the_list_to_write_is_named(tmp_path: Path, kind: str) -> None:
    section = {"source": kind, "path": write(table(y=np.arange(50) % 3), tmp_path / f"t.{kind}"), "label": "y"}
    for features, remedy in ((["a", "y", "b"], "write data.features=[a, b]"), (["y"], "without data.features")):
        data = DataConfig(**section, features=features)
        for refuses in (open_source, describe_source):
            with pytest.raises(InputError) as caught:
                refuses(data, context=None)
            assert caught.value.key == "data.features" and "data.label" in caught.value.got
            assert caught.value.remedy.startswith(remedy)


def test_a_model_of_rows_needs_a_label_of_a_table(tmp_path: Path) -> None:
    mlp, data = "raytrain.models.mlp:mlp", table(y=np.arange(50) % 3)
    for kind in ("parquet", "csv", "jsonl"):
        section = {"source": kind, "path": write(data, tmp_path / f"t.{kind}")}
        for more in ({}, {"features": ["a", "b"]}):
            with pytest.raises(InputError, match="expected the column to predict, one of a, b, flag, y") as caught:
                check_label(DataConfig(**section, **more), builder=mlp)
            assert caught.value.key == "data.label"
        check_label(DataConfig(**section, label="y"), builder=mlp)
        check_label(DataConfig(**section), builder="own:model")
    with pytest.raises(InputError, match=r"data\.label: got null"):
        check_label(DataConfig(train=data.to_pandas()), builder=mlp)
    named = data.append_column("labels", data["y"]).append_column("x", pa.array([[0.0, 1.0]] * 50))
    check_label(DataConfig(train=named), builder=mlp)


def test_chosen_features_come_in_the_order_given(tmp_path: Path) -> None:
    path = write(table(y=np.linspace(0, 1, 50)), tmp_path / "t.parquet")
    source = opened(source="parquet", path=path, features=["flag", "b"], label="y", eval_fraction=0.0)
    batch = full_tensor(source)
    assert batch["x"][:3].tolist() == [[1, 0], [0, 1], [1, 2]]
    assert batch["labels"].dtype == torch.float32 and source.classes is None, "fractions: regression"


def test_string_labels_become_the_numbers_of_their_sorted_names(tmp_path: Path) -> None:
    names = ["dog", "cat", "emu", "cat", "dog"] * 10
    train = write(table(kind=names), tmp_path / "t.csv")
    other = write(table(2, kind=["ant", "emu"]), tmp_path / "e.csv")
    source = opened(source="csv", path=train, eval_path=other, label="kind")
    assert source.class_names == ("ant", "cat", "dog", "emu") and source.classes == 4
    assert source.train.gather(np.arange(5))["labels"].tolist() == [2, 1, 3, 1, 2]
    assert source.eval.gather(np.arange(2))["labels"].tolist() == [0, 3]
    category = table(kind=pa.array(names).dictionary_encode())
    assert opened(train=category, label="kind").class_names == ("cat", "dog", "emu")


@pytest.mark.parametrize("later", ["2024-01-02", "later"])
def test_labels_that_look_like_dates_are_names_whatever_the_other_file_has(later: str, tmp_path: Path) -> None:
    for name, label in (("a", "2024-01-01"), ("b", later)):
        lines = [json.dumps({"x": number, "kind": label}) for number in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    source = opened(source="jsonl", path=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")], label="kind")
    assert source.class_names == ("2024-01-01", later)


def test_files_are_joined_in_the_order_given(tmp_path: Path) -> None:
    paths = [write(table(rows), tmp_path / f"{rows}.parquet") for rows in (7, 3)]
    source = opened(source="parquet", path=paths, eval_fraction=0.0)
    assert full_tensor(source)["b"].tolist() == [*range(7), *range(3)]
    assert describe_source(DataConfig(source="parquet", path=paths, eval_fraction=0.0), context=None).train_rows == 10


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_lists_are_ragged_columns(tmp_path: Path, kind: str) -> None:
    tokens = [[1, 2, 3], [4], [], [5, 6]] * 5
    data = pa.table({"input_ids": tokens, "labels": tokens, "score": [0.5] * 20})
    source = opened(source=kind, path=write(data, tmp_path / f"t.{kind}"), eval_fraction=0.0)
    assert isinstance(source.train, RaggedSplit)
    batch = source.train.gather(np.array([1, 0, 2]))
    assert batch["input_ids"].tolist() == [[4, 0, 0], [1, 2, 3], [0, 0, 0]]
    assert batch["labels"].tolist() == [[4, -100, -100], [1, 2, 3], [-100] * 3]
    assert batch["attention_mask"].tolist() == [[1, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert batch["score"].tolist() == [0.5] * 3 and source.train.weights(np.array([1, 0, 2])) == 4


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_lists_of_lists_are_dense_columns_of_one_shape(tmp_path: Path, kind: str) -> None:
    images = np.arange(120, dtype=np.float32).reshape(10, 2, 3, 2)
    data = pa.table({"image": images.tolist(), "labels": list(range(10))})
    source = opened(source=kind, path=write(data, tmp_path / f"t.{kind}"), eval_fraction=0.0)
    batch = source.train.gather(np.array([3, 1]))
    assert batch["image"].dtype == torch.float32 and batch["image"].tolist() == images[[3, 1]].tolist()
    assert "attention_mask" not in batch and batch["labels"].tolist() == [3, 1]
    for wrong, words in (
        ([[[1.0], [2.0]], [[1.0], [2.0]], [[3.0]]], "lists of other lengths in column 'v' row 2 than in row 0"),
        ([[[1.0, 2.0]], [[1.0]]], "lists of other lengths in column 'v' row 1 than in row 0"),
        ([[[1.0]], [[float("nan")]]], "NaN in column 'v' row 1"),
        ([[[1.0, 2.0]], [[1.0, None]]], "a missing value in column 'v' row 1"),
        ([[[1.0]], [None]], "a missing value in column 'v' row 1"),
        ([[[]], [[]]], "empty lists in column 'v'"),
        ([[], []], "empty lists in column 'v'"),
    ):
        with pytest.raises(InputError, match=words):
            opened(train=pa.table({"v": pa.array(wrong, pa.list_(pa.list_(pa.float32())))}))


def test_without_features_and_label_every_column_keeps_its_name(tmp_path: Path) -> None:
    source = opened(source="parquet", path=write(table(), tmp_path / "t.parquet"))
    batch = source.train.gather(np.array([0]))
    assert {name: column.dtype for name, column in batch.items()} == {
        "a": torch.float32, "b": torch.int64, "flag": torch.int64,
    }  # fmt: skip


def test_fixed_lists_are_dense_and_slices_keep_their_rows() -> None:
    vectors = pa.array([[float(i), i + 0.5] for i in range(6)], type=pa.list_(pa.float64(), 2))
    lists = pa.array([[i] * (i % 3 + 1) for i in range(6)])
    data = pa.table({"x": vectors, "tokens": lists}).slice(2)
    source = opened(train=data, eval_fraction=0.0)
    batch = source.train.gather(np.array([0, 3]))
    assert batch["x"].tolist() == [[2.0, 2.5], [5.0, 5.5]] and batch["tokens"].tolist() == [[2, 2, 2], [5, 5, 5]]


def test_a_table_and_a_data_frame_in_memory() -> None:
    pandas = pytest.importorskip("pandas")
    data = table(y=pa.array(np.arange(50) % 3))
    for train in (data, pandas.DataFrame({name: data[name].to_numpy() for name in data.column_names})):
        source = opened(train=train, features=["a", "b"], label="y")
        assert source.train.columns["x"].shape == (45, 2) and source.classes == 3
        told = describe_source(DataConfig(train=train), context=None)
        assert told is not None and (told.train_rows, told.eval_rows) == (45, 5) and told.row_bytes > 0


def bad(rows: int = 40, **columns: Any) -> pa.Table:
    return table(rows, **{"y": np.arange(rows) % 2, **columns})


def with_value(value: Any, at: int = 17) -> list[Any]:
    return [value if i == at else float(i) for i in range(40)]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize(
    ("value", "seen"),
    [
        (float("nan"), "NaN in column 'a' row 17"),
        (float("inf"), "inf in column 'a' row 17"),
        (1e300, "inf in column 'a' row 17"),
        (None, "a missing value in column 'a' row 17"),
    ],
)
def test_an_invalid_number_is_reported_with_column_and_row(tmp_path: Path, kind: str, value: Any, seen: str) -> None:
    path = write(bad(a=pa.array(with_value(value), type=pa.float64())), tmp_path / f"t.{kind}")
    with pytest.raises(InputError) as caught:
        opened(source=kind, path=path, label="y")
    assert caught.value.key == "data.path"
    expected = "a value in every row" if value is None else "finite numbers"
    assert str(caught.value).startswith(f"data.path: got {seen}, expected {expected}")


def test_nan_inside_lists_and_labels_is_named(tmp_path: Path) -> None:
    lists = [[1.0], [2.0, float("nan")], []]
    with pytest.raises(InputError, match="got NaN in column 'v' row 1"):
        opened(train=pa.table({"v": lists}))
    with pytest.raises(InputError, match="got a missing value in column 'v' row 2"):
        opened(train=pa.table({"v": [[1], [], [None, 2]]}))
    with pytest.raises(InputError, match="got a missing value in column 'y' row 1"):
        opened(train=pa.table({"a": [1.0, 2.0], "y": ["cat", None]}), label="y")
    with pytest.raises(InputError, match=r"data.label: got the class -1 in column 'y' row 0"):
        opened(train=pa.table({"a": [1.0, 2.0], "y": [-1, 1]}), label="y")


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"label": "Y"}, "data.label", "columns among a, b, flag, y"),
        ({"features": ["a", "flagg"], "label": "y"}, "data.features", "did you mean flag?"),
        ({"features": ["y"], "label": "y"}, "data.features", "columns other than the label"),
    ],
)
def test_columns_that_do_not_exist_are_named(tmp_path: Path, keys: dict[str, Any], key: str, words: str) -> None:
    data = DataConfig(source="parquet", path=write(bad(), tmp_path / "t.parquet"), **keys)
    for attempt in (lambda: describe_source(data, context=None), lambda: open_source(data, context=None)):
        with pytest.raises(InputError) as caught:
            attempt()
        assert caught.value.key == key and words in str(caught.value)


def test_non_numeric_columns_are_named(tmp_path: Path) -> None:
    path = write(bad(city=["Rome"] * 40), tmp_path / "t.csv")
    for label, advice in (
        ({"label": "y"}, "list the"),
        ({}, "data.label=city if it is the column to predict; else list the"),
    ):
        with pytest.raises(InputError, match=r"data.features: got column 'city' of type string") as caught:
            opened(source="csv", path=path, **label)
        assert caught.value.remedy == f"{advice} columns to use in data.features"
    assert opened(source="csv", path=path, label="y", features=["a", "b"]).train.columns["x"].shape[1] == 2
    typed = write(bad(city=[*map(str, range(30)), "abc", *map(str, range(9))]), tmp_path / "typed.csv")
    for attempt in (opened, partial(describe_source, context=None)):
        with pytest.raises(InputError, match=r"got column 'city' of type string, with 'abc' in row 30") as caught:
            data = {"source": "csv", "path": typed, "label": "y"}
            attempt(DataConfig(**data)) if isinstance(attempt, partial) else attempt(**data)
        assert "rows are numbered from 0; correct that value" in str(caught.value)
    dated = pa.table({"a": [1.0], "when": pa.array([0], type=pa.timestamp("s"))})
    with pytest.raises(InputError, match=r"data.label: got column 'when' of type timestamp"):
        opened(train=dated, label="when")


def test_a_second_file_must_have_the_columns_of_the_first(tmp_path: Path) -> None:
    path = write(bad(), tmp_path / "t.csv")
    section = {"source": "csv", "path": path, "label": "y"}
    fewer = write(bad().drop_columns(["b"]), tmp_path / "fewer.csv")
    with pytest.raises(InputError, match=r"data.eval_path: got no column 'b'"):
        opened(**section, eval_path=fewer)
    with pytest.raises(InputError, match=r"data.path: got the columns a, flag, y in .*expected a, b, flag, y as in"):
        opened(**{**section, "path": [path, fewer]})
    fractions = write(bad(y=np.linspace(0, 1, 40)), tmp_path / "f.csv")
    with pytest.raises(InputError, match=r"data.eval_path: got 'labels' as float32, expected int64"):
        opened(**section, eval_path=fractions)
    words = write(bad(a=["x"] * 40), tmp_path / "w.csv")
    with pytest.raises(InputError, match=r"data.eval_path: got column 'a' of type string"):
        opened(**section, eval_path=words)


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("parquet", b"no parquet at all", "expected a parquet file"),
        ("jsonl", b'{"a": 1}\n{"a": ', "expected a jsonl file"),
        ("csv", b"a,b\n1,2\n3\n", "expected a csv file"),
        ("csv", b"a,b\n", "0 rows"),
        ("csv", b"", "an empty file"),
        ("csv", b"a,a\n1,2\n", "two columns named 'a'"),
    ],
)
def test_files_of_another_kind_are_named(tmp_path: Path, kind: str, content: bytes, words: str) -> None:
    path = tmp_path / f"t.{kind}"
    path.write_bytes(content)
    data = DataConfig(source=kind, path=str(path))
    for attempt in (lambda: describe_source(data, context=None), lambda: open_source(data, context=None)):
        with pytest.raises(InputError) as caught:
            attempt()
        assert caught.value.key == "data.path" and words in str(caught.value)


def test_a_table_of_another_kind_than_the_source_names_the_source_that_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "houses.csv"
    path.write_text("a,y\n1,2\n")
    with pytest.raises(InputError) as caught:
        describe_source(DataConfig(source="parquet", path=str(path)), context=None)
    assert caught.value.remedy == "data.source=csv reads files of this name"
    assert ".," not in str(caught.value)


def test_an_empty_parquet_file_is_refused(tmp_path: Path) -> None:
    path = write(table(0), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"data.path: got 0 rows"):
        describe_source(DataConfig(source="parquet", path=path), context=None)


def test_a_zipped_csv_and_a_uri_are_read(tmp_path: Path) -> None:
    plain = write(bad(), tmp_path / "t.csv")
    with pa.CompressedOutputStream(str(tmp_path / "t.csv.gz"), "gzip") as out:
        out.write(Path(plain).read_bytes())
    batches = [
        full_tensor(opened(source="csv", path=path, label="y")) for path in (plain, f"{plain}.gz", f"file://{plain}")
    ]
    assert all(torch.equal(batch["x"], batches[0]["x"]) for batch in batches)
