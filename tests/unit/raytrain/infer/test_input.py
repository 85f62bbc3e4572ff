"""Input rows: every format gives the same rows, read by range, and wrong files are refused by name."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from raytrain.errors import InputError
from raytrain.infer.input import InputRows, check_columns, converted, input_files

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


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, part in (("b", ROWS[60:]), ("a", ROWS[:60])):
        write(folder / f"{name}.parquet", part)
    (folder / "_SUCCESS").touch()
    rows = opened(folder, tmp_path)
    assert rows.read(55, 10).to_pylist() == ROWS[55:65] and rows.rows == 103


def test_text_has_one_row_for_each_line(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\n\nthree")
    rows = opened(tmp_path / "in.txt", tmp_path)
    assert rows.read(0, 3).to_pylist() == [{"text": "one"}, {"text": ""}, {"text": "three"}]


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
        ("in.parquet", "PAR1 not", "expected a Parquet file"),
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
    with pytest.raises(InputError, match=r"infer.label: got 'sise'.*name, size.*did you mean.*size"):
        check_columns(schema, {"infer.label": "sise"})
