"""Input rows: every format gives the same rows, read by range, and wrong files are refused by name."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from raytrain.errors import InputError
from raytrain.infer.convert import converted
from raytrain.infer.input import InputRows, check_cells, check_columns, input_files
from raytrain.infer.output import _CsvWriter

ROWS = [{"name": f"row {number}", "size": number * 3} for number in range(103)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """The rows in the format that the name says."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=10)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def opened(path: Path, folder: Path, **options: Any) -> InputRows:
    """The rows of a file or folder."""
    return InputRows.at(converted(input_files(str(path)), str(folder / "work"), rows_at_once=7), **options)


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl", "ndjson", "json"])
def test_every_format_gives_the_same_rows_by_range(suffix: str, tmp_path: Path) -> None:
    write(tmp_path / f"in.{suffix}", ROWS)
    rows = opened(tmp_path / f"in.{suffix}", tmp_path)
    assert rows.rows == 103
    assert rows.read(0, 103).to_pylist() == ROWS
    assert rows.read(95, 8).to_pylist() == ROWS[95:] and rows.read(8, 5).to_pylist() == ROWS[8:13]
    assert rows.read(3, 2, ["size"]).to_pylist() == [{"size": 9}, {"size": 12}]


def test_a_nan_in_a_csv_is_a_number_and_an_empty_cell_is_missing(tmp_path: Path) -> None:
    """Its row's message then says what stands there."""
    (tmp_path / "in.csv").write_text("x,name\n1.5,nan\nnan,NaN\n,n/a\nNaN,a\n")
    x, names = zip(*(one.values() for one in opened(tmp_path / "in.csv", tmp_path).read(0, 4).to_pylist()), strict=True)
    assert [None if one is None else str(one) for one in x] == ["1.5", "nan", None, "nan"]
    assert names == ("nan", "NaN", "n/a", "a"), "text is as it was written"


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, part in (("b", ROWS[60:]), ("a", ROWS[:60])):
        write(folder / f"{name}.parquet", part)
    (folder / "_SUCCESS").touch()
    rows = opened(folder, tmp_path)
    assert rows.read(55, 10).to_pylist() == ROWS[55:65] and rows.rows == 103


def test_text_has_one_row_for_each_line_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\n\n \nthree\n\n")
    rows = opened(tmp_path / "in.txt", tmp_path)
    assert rows.rows == 2 and rows.read(0, 2).to_pylist() == [{"text": "one"}, {"text": "three"}]


@pytest.mark.parametrize("name", ["t10k-images-idx3-ubyte.gz", "train-images.idx3-ubyte", "images.idx"])
def test_idx_images_are_rows_of_the_values_that_training_reads(name: str, tmp_path: Path) -> None:
    pixels = np.arange(3 * 2 * 4, dtype=np.uint8).reshape(3, 2, 4)
    data = b"\0\0\x08\x03" + np.array(pixels.shape, ">u4").tobytes() + pixels.tobytes()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    rows = opened(tmp_path / name, tmp_path)
    expected = pixels.reshape(3, 8).astype(np.float32) / np.float32(255.0)
    assert rows.rows == 3 and np.array_equal(np.array(rows.read(0, 3)["x"].to_pylist(), np.float32), expected)


def test_an_idx_file_of_labels_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01\0\0\0\x02ab")
    with pytest.raises(InputError, match="images of 3 or 4 dimensions"):
        opened(tmp_path / "t10k-labels-idx1-ubyte", tmp_path)


def test_the_limit_takes_the_first_rows(tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ROWS)
    assert opened(tmp_path / "in.parquet", tmp_path, limit=12).rows == 12
    assert opened(tmp_path / "in.parquet", tmp_path, limit=1000).rows == 103


def test_conversion_happens_once_and_leaves_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    write(path, ROWS)
    (first,) = converted(input_files(str(path)), str(tmp_path / "work"))
    changed = Path(first).stat().st_mtime_ns
    assert converted(input_files(str(path)), str(tmp_path / "work")) == [first]
    assert Path(first).stat().st_mtime_ns == changed
    path.write_text('{"name": "a", "size": 1}\n{"name": "b", "size"\n')
    with pytest.raises(InputError, match=r"line 2.*expected a JSON object on each line"):
        converted(input_files(str(path)), str(tmp_path / "other"), rows_at_once=1)
    assert [entry.name for entry in (tmp_path / "other").iterdir() if entry.suffix == ".parquet"] == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("in.xlsx", "x", "got .*in.xlsx, expected files that end in .parquet, .csv"),
        ("in.jsonl", "[1]\n", "line 1: a list, expected a JSON object"),
        ("in.json", '{"a": 1}', "expected a JSON array of objects"),
        ("in.json", "{", "expected a JSON array of objects"),
        ("in.jsonl", "\n\n", "no rows in .*in.jsonl"),
        ("in.parquet", "PAR1 not", "expected a parquet file"),
        ("in.csv", "a,b\n1,2\n3\n", "expected a csv file"),
    ],
)
def test_unreadable_files_are_refused_by_name(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        opened(tmp_path / name, tmp_path)


def test_missing_and_mixed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no file at .*none.csv"):
        opened(tmp_path / "none.csv", tmp_path)
    for name in ("a.csv", "b.jsonl"):
        write(tmp_path / name, ROWS)
    with pytest.raises(InputError, match=r"b.jsonl beside .*a.csv, expected files of one kind"):
        opened(tmp_path, tmp_path)
    write(tmp_path / "c.parquet", ROWS)
    parquet.write_table(pa.table({"other": [1]}), tmp_path / "d.parquet")
    with pytest.raises(InputError, match=r"the columns other in .*d.parquet, expected name, size"):
        InputRows.at([str(tmp_path / "c.parquet"), str(tmp_path / "d.parquet")])


def test_a_missing_column_is_named_with_its_key(tmp_path: Path) -> None:
    write(tmp_path / "in.parquet", ROWS)
    schema = opened(tmp_path / "in.parquet", tmp_path).schema
    check_columns(schema, {"infer.label": "size", "infer.id_column": None})
    with pytest.raises(InputError, match=r"infer.label: did you mean size\? Got 'sise'.*name, size"):
        check_columns(schema, {"infer.label": "sise"})


def test_columns_that_only_some_rows_have_are_null_in_the_others(tmp_path: Path) -> None:
    lines = [{"q": f"why {row}"} for row in range(10)]
    lines += [{"n": row, "q": f"how {row}"} for row in range(10)] + [{"q": "z", "n": 0.5, "deep": {"a": [1]}}]
    write(tmp_path / "in.jsonl", lines)
    names = {"q": None, "n": None, "deep": None}
    found = opened(tmp_path / "in.jsonl", tmp_path).read(0, 21).to_pylist()
    assert found == [{**names, **line} for line in lines]
    (tmp_path / "in.json").write_text(json.dumps(lines))
    assert opened(tmp_path / "in.json", tmp_path).read(0, 21).to_pylist() == found


def test_files_of_one_folder_may_have_other_columns_where_each_row_names_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.jsonl", [{"q": "one"}, {"q": "two"}])
    write(folder / "b.jsonl", [{"q": "three", "n": 3}])
    rows = opened(folder, tmp_path, join=True)
    assert rows.schema.names == ["q", "n"]
    assert rows.read(1, 2).to_pylist() == [{"q": "two", "n": None}, {"q": "three", "n": 3}]
    assert rows.read(0, 1, ["n"]).to_pylist() == [{"n": None}]
    assert [part.to_pylist() for part in rows.column("q", at_once=2)] == [["one", "two"], ["three"]]


@pytest.mark.parametrize("at", [3, 20])
def test_a_column_of_two_types_is_refused_by_name(at: int, tmp_path: Path) -> None:
    lines = [{"q": "why", "size": row} for row in range(30)]
    lines[at] = {"q": "why", "size": "large"}
    write(tmp_path / "in.jsonl", lines)
    with pytest.raises(InputError, match=r"in.jsonl: .*size.*expected one type a column"):
        opened(tmp_path / "in.jsonl", tmp_path)
    assert list((tmp_path / "work").iterdir()) == []


def test_a_csv_column_gets_a_type_that_all_its_values_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain.infer.convert.BLOCK_BYTES", 100)
    lines = ["id,size,note,whole"] + [f"{row},{row},,{row}" for row in range(50)] + ["A50,0.5,late,50"]
    (tmp_path / "in.csv").write_text("\n".join(lines) + "\n")
    rows = opened(tmp_path / "in.csv", tmp_path)
    assert [str(one.type) for one in rows.schema] == ["string", "double", "string", "int64"]
    assert rows.read(49, 2).to_pylist() == [
        {"id": "49", "size": 49.0, "note": "", "whole": 49}, {"id": "A50", "size": 0.5, "note": "late", "whole": 50},
    ]  # fmt: skip


def test_a_changed_file_is_converted_again(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [{"q": "one"}])
    assert opened(tmp_path / "in.jsonl", tmp_path).read(0, 1).to_pylist() == [{"q": "one"}]
    write(tmp_path / "in.jsonl", [{"q": "two"}])
    assert opened(tmp_path / "in.jsonl", tmp_path).read(0, 1).to_pylist() == [{"q": "two"}]


def test_parquet_files_whose_types_do_not_go_together_are_refused_by_name(tmp_path: Path) -> None:
    for name, value in (("a", 1), ("b", "x")):
        parquet.write_table(pa.table({"size": [value]}), tmp_path / f"{name}.parquet")
    with pytest.raises(InputError, match=r"b.parquet: .*size.*int64 vs string, expected one type a column"):
        InputRows.at([str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")])


def test_carried_cells_are_written_to_csv_as_they_stood_byte_for_byte(tmp_path: Path) -> None:
    lines = (
        b'id,note,code\n007,"a, b",1.10\n7,"says ""no""",NA\nNA,"two\nlines",12345678901234567890\n'
        b'x,"",0x1F\ny,,true\nz, z,1e5\n'
    )
    (tmp_path / "rows.csv").write_bytes(lines)
    (written,) = converted(
        input_files(str(tmp_path / "rows.csv")), str(tmp_path / "made"), carried=("id", "note", "code")
    )
    table = parquet.read_table(written)
    sink = io.BytesIO()
    writer = _CsvWriter(sink, table.schema)
    writer.write_table(table.slice(0, 2))
    writer.write_table(table.slice(2))
    assert sink.getvalue() == lines
    numbers = pa.table({"prediction": [0.5, None, 1e-7], "ok": [True, False, None], "n": [2**63 - 1, -1, 0]})
    sink = io.BytesIO()
    _CsvWriter(sink, numbers.schema).write_table(numbers)
    assert sink.getvalue() == b"prediction,ok,n\n0.5,true,9223372036854775807\n,false,-1\n1e-7,,0\n"


@pytest.mark.parametrize("numbers", [True, False])
def test_csv_files_of_a_folder_may_have_their_columns_in_another_order(numbers: bool, tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.csv").write_text("u,v\n1,x\n")
    (folder / "b.csv").write_text("v,u\ny,2\n")
    written = converted(input_files(str(folder)), str(tmp_path / "made"), numbers=numbers)
    rows = InputRows.at(written)
    expected = {"u": [1, 2], "v": ["x", "y"]} if numbers else {"u": ["1", "2"], "v": ["x", "y"]}
    assert rows.read(0, 2, ["u", "v"]).select(["u", "v"]).to_pydict() == expected


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [('{"k": 18446744073709551616}', '{"k": 1.5}', "k with whole numbers beyond 64 bits and with fractions"),
     ('{"k": 9007199254740993}', '{"k": 1.5}', "k as double in all files together")],
)  # fmt: skip
def test_whole_numbers_that_would_lose_digits_beside_fractions_of_another_file_are_refused(
    first: str, second: str, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "x.jsonl").write_text(first + "\n")
    (folder / "y.jsonl").write_text(second + "\n")
    with pytest.raises(InputError, match=message):
        opened(folder, tmp_path).read(0, 2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("in.csv", "k,x,k\n1,2,3\n", "two columns named 'k'"),
     ("in.jsonl", '{"k": "a"}\n{"k": "\\ud800"}\n', "column k with half of a surrogate pair")],
)  # fmt: skip
def test_oddities_of_a_file_are_one_line(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        opened(tmp_path / name, tmp_path)


def test_a_column_of_lists_is_no_cell_of_a_csv_file() -> None:
    schema = pa.schema([("a", pa.int64()), ("tags", pa.list_(pa.string()))])
    check_cells(schema, {"infer.keep": ["a"], "infer.id_column": [None]}, "csv")
    with pytest.raises(InputError, match=r"infer\.keep: got tags.*infer\.format csv.*jsonl or parquet"):
        check_cells(schema, {"infer.keep": ["a", "tags"]}, "csv")
