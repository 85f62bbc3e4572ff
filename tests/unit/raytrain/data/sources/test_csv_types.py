"""The types of CSV columns: they follow from all files, and codes are no numbers."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from raytrain.config.sections import DataConfig
from raytrain.data.rows.contract import Source
from raytrain.data.sources.open import describe_shapes, describe_source, open_source
from raytrain.errors import InputError
from raytrain.infer.convert import converted
from raytrain.infer.input import InputRows, duplicate_id, input_files


def opened(*paths: Path, kind: str = "csv", **keys: object) -> Source:
    section = {"source": kind, "path": [str(path) for path in paths], "label": "y", "eval_fraction": 0.0, **keys}
    return open_source(DataConfig(**section), context=None)


def written(folder: Path, name: str, *lines: str) -> Path:
    (folder / name).write_bytes("\n".join(lines).encode() + b"\n")
    return folder / name


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["007", "7", "007"], ("007", "7")), (["NA", "EU", "null"], ("EU", "NA", "null")), (["2", "0", "1"], None),
        (["true", "false", "true"], ("false", "true")), (["1" * 20, "1", "1"], ("1", "1" * 20)),
    ],
)  # fmt: skip
def test_codes_and_a_class_called_na_are_classes(
    labels: list[str], names: tuple[str, ...] | None, tmp_path: Path
) -> None:
    path = written(tmp_path, "a.csv", "x,y", *(f"{row},{label}" for row, label in enumerate(labels)))
    source = opened(path)
    assert source.class_names == names and source.classes == (len(names) if names else 3)
    found = source.train.gather(np.arange(3))["labels"].tolist()
    assert found == [names.index(label) if names else int(label) for label in labels]
    assert describe_shapes(DataConfig(source="csv", path=str(path), label="y"))["num_classes"] == source.classes


def test_an_evaluation_file_of_whole_numbers_has_the_names_of_the_training_files_codes(tmp_path: Path) -> None:
    train = written(tmp_path, "a.csv", "x,y", "1,007", "2,7")
    held = written(tmp_path, "b.csv", "x,y", "3,7")
    source = opened(train, eval_path=str(held))
    assert source.class_names == ("007", "7") and source.eval is not None
    assert source.eval.gather(np.arange(1))["labels"].tolist() == [1]
    empty = written(tmp_path, "c.csv", "x,y", "1,a", "2,")
    with pytest.raises(InputError, match="a missing value in column 'y' row 1"):
        opened(empty)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_order_of_files_changes_no_type(order: tuple[int, ...], tmp_path: Path) -> None:
    cells = [["1", "2", "3"], ["NA", "0.5", "true"], ["4", "7", "x"]]  # whole, fractions, texts
    files = [written(tmp_path, f"{n}.csv", "a,b,c,y", f"{','.join(row)},{n}") for n, row in enumerate(cells)]
    inputs = input_files([str(files[at]) for at in order])
    rows = InputRows.at(converted(inputs, str(tmp_path / "out")))
    assert [str(one.type) for one in rows.schema] == ["int64", "double", "string", "int64"]
    found = rows.read(0, 3).to_pydict()
    assert found["c"] == [cells[at][2] for at in order] and found["b"] == [float(cells[at][1]) for at in order]
    source = opened(*(files[at] for at in order), features=["b"])
    assert source.train.gather(np.arange(3))["x"][:, 0].tolist() == found["b"]


def test_a_flag_in_a_later_block_does_not_make_a_number_of_an_earlier_one_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytrain.infer.convert.BLOCK_BYTES", 60)
    path = written(tmp_path, "a.csv", "a,b", *(f"{n},{n % 2}" for n in range(30)), "true,true")
    rows = InputRows.at(converted(input_files(str(path)), str(tmp_path / "out")))
    assert [str(one.type) for one in rows.schema] == ["string", "bool"]
    assert rows.read(29, 2).to_pydict() == {"a": ["29", "true"], "b": [True, True]}


@pytest.mark.parametrize("block", [80, 1 << 20])
def test_carried_columns_are_the_text_of_the_file(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain.infer.convert.BLOCK_BYTES", block)
    cells = ["00123", "12345678901234567890", "1.10", "007", "7", "NA", '"a,""b"""', '"two\nlines"', '""', " x "]
    path = written(tmp_path, "a.csv", "id,note,a", *(f"{cell},,{n}" for n, cell in enumerate(cells)))
    rows = InputRows.at(converted(input_files(str(path)), str(tmp_path / "out"), carried=["id", "note"]))
    found = rows.read(0, len(cells)).to_pydict()
    plain = ["00123", "12345678901234567890", "1.10", "007", "7", "NA", 'a,"b"', "two\nlines", "", " x "]
    assert found["id"] == plain and found["note"] == [None] * len(cells) and found["a"] == list(range(len(cells)))
    assert duplicate_id(rows, "id") is None


def test_packed_files_and_patterns_are_read_as_the_files_themselves(tmp_path: Path) -> None:
    for number in range(3):
        lines = "x,y\n" + "".join(f"{number * 4 + row},{row % 2}\n" for row in range(4))
        (tmp_path / f"p{number}.csv.gz").write_bytes(gzip.compress(lines.encode()))
    pattern = str(tmp_path / "p*.csv.gz")
    source = opened(Path(pattern))
    assert source.train.gather(np.arange(12))["x"][:, 0].tolist() == list(range(12))
    assert (
        describe_source(DataConfig(source="csv", path=pattern, label="y", eval_fraction=0.0), context=None).train_rows
        == 12
    )  # type: ignore[union-attr]
    rows = InputRows.at(converted(input_files(pattern), str(tmp_path / "out")))
    assert rows.read(0, 12)["x"].to_pylist() == list(range(12))
    line = b'{"x": 18446744073709551617, "big": 3}\n{"x": 1, "big": 4}\n'
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress(line))
    rows = InputRows.at(converted(input_files(str(tmp_path / "q*")), str(tmp_path / "out")))
    assert [int(value) for value in rows.read(0, 2)["x"].to_pylist()] == [2**64 + 1, 1]
    with pytest.raises(InputError, match=r"none\*.csv, which no file matches"):
        opened(tmp_path / "none*.csv")


@pytest.mark.parametrize("kind", [pa.uint64(), pa.list_(pa.uint64())])
def test_whole_numbers_beyond_int64_are_refused_by_name_and_others_kept(kind: pa.DataType, tmp_path: Path) -> None:
    for big, name in ((2**63, "hash"), (2**63 - 1, "kept")):
        cells = [big, 1] if kind == pa.uint64() else [[big], [1]]
        parquet.write_table(pa.table({name: pa.array(cells, kind), "y": [0, 1]}), tmp_path / f"{name}.parquet")
    with pytest.raises(InputError, match=f"{2**63} in column 'hash'"):
        opened(tmp_path / "hash.parquet", kind="parquet")
    batch = opened(tmp_path / "kept.parquet", kind="parquet").train.gather(np.arange(1))
    assert float(batch["x" if kind == pa.uint64() else "kept"].double().max()) == pytest.approx(2**63)


LONG = (123456789012345678901, 123456789012345678902)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (LONG, tuple(map(str, LONG))), ((LONG[0], 5), (str(LONG[0]), "5")), ((-LONG[0], 5), (f"-{LONG[0]}", "5")),
        ((10**18, 10**18 + 1), (str(10**18), str(10**18 + 1))), ((10, 9), None),
    ],
)  # fmt: skip
def test_whole_numbers_of_19_digits_are_names_of_classes_in_json_lines_too(
    labels: tuple[int, int], names: tuple[str, ...] | None, tmp_path: Path
) -> None:
    rows = [f'{{"x": {row}.5, "y": {label}}}' for row, label in enumerate(labels)]
    train, held = written(tmp_path, "a.jsonl", *rows, ""), written(tmp_path, "b.jsonl", rows[1])
    source = opened(train, kind="jsonl", eval_path=str(held))
    assert source.class_names == names and source.classes == (11 if names is None else 2)
    expected = [names.index(str(label)) if names else label for label in labels]
    assert source.train.gather(np.arange(2))["labels"].tolist() == expected
    assert source.eval is not None and source.eval.gather(np.arange(1))["labels"].tolist() == expected[1:]


def test_numbers_with_fractions_among_large_ones_stay_values_to_predict(tmp_path: Path) -> None:
    path = written(tmp_path, "a.jsonl", '{"x": 1, "y": 123456789012345678901}', '{"x": 2, "y": 0.5}')
    source = opened(path, kind="jsonl")
    assert source.classes is None and source.train.gather(np.arange(2))["labels"].tolist() == [
        np.float32(123456789012345678901),
        0.5,
    ]
