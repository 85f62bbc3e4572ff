"""`infer.label` is read as the classes of the model, and only columns that are used must have one type."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from jobs.infer import infer
from jobs.inference.compute import InferResult
from raytrain.errors import InputError
from raytrain.infer.worker import InferenceWorker

ROWS = 40
Answer = Callable[..., InferResult]


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Rows as CSV, JSON lines (perhaps packed) or Parquet, by the name."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(columns), path)
    elif path.suffix == ".csv":
        lines = [",".join(map(str, row.values())) for row in rows]
        path.write_text("\n".join([",".join(columns), *lines, ""]))
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if path.suffix.lower() == ".gz" else data)
    return path


def features(rows: int = ROWS) -> list[float]:
    return [row / 4 - 5 for row in range(rows)]


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """`answer(labels, kind, file, *overrides)` answers a file with a model of data with these labels."""
    monkeypatch.chdir(tmp_path)

    def start(labels: list[Any], kind: str, given: Path, *overrides: str, output: str = "out") -> InferResult:
        a = features(len(labels))
        source = {"csv": "csv", "jsonl": "jsonl", "parquet": "parquet"}[kind]
        path = write(tmp_path / f"train.{kind}", {"a": a, "y": labels})
        job = {
            "model": {"builder": "raytrain.models.mlp:mlp", "hidden": [8]}, "precision": {"dtype": "fp32"},
            "data": {"source": source, "path": str(path), "label": "y", "eval_fraction": 0}, "seed": 1,
        }  # fmt: skip
        (tmp_path / "job.yaml").write_text(json.dumps(job))
        return infer("job.yaml", input=str(given), output=output, overrides=[*overrides, "scale.threads=1"], quiet=True)

    return start


NUMBERS = ["1.10", "1.2", "2e3", "beta"]
BOOLS = [False, True]


@pytest.mark.parametrize(
    ("labels", "trained", "kind"),
    [
        (NUMBERS, "csv", "csv"), (["NA", "007", "7", "null"], "csv", "csv"), ([" x ", "x"], "csv", "csv"),
        (BOOLS, "jsonl", "jsonl"), (BOOLS, "parquet", "parquet"), (["false", "true"], "csv", "jsonl"),
        ([10**18, 10**18 + 1], "jsonl", "jsonl"), ([0, 1, 2], "csv", "csv"), ([0, 1], "jsonl", "parquet"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("keep", ["[]", "[y]"])
def test_right_answers_are_right_in_any_subset_of_the_classes(
    labels: list[Any], trained: str, kind: str, keep: str, answer: Answer, tmp_path: Path
) -> None:
    """The labels of the file are the model's own answers, of one class only, so that they may look like numbers."""
    data = [labels[row % len(labels)] for row in range(ROWS)]
    first = answer(data, trained, write(tmp_path / f"in.{kind}", {"a": features()}), output="first")
    names = {str(label): label for label in labels} | {str(number): label for number, label in enumerate(labels)}
    found = [names[str(one)] for one in first.table()["prediction"].to_pylist()]
    if kind == "jsonl" and labels == ["false", "true"]:
        found = [one == "true" for one in found]
    own = [row for row in range(ROWS) if found[row] == found[0]]
    file = write(tmp_path / f"own.{kind}", {"a": [features()[row] for row in own], "y": [found[0]] * len(own)})
    result = answer(data, trained, file, "infer.label=y", f"infer.keep={keep}", "infer.format=csv")
    quality = result.summary["quality"]
    assert (quality["rows"], quality["accuracy"], quality["unknown"]) == (len(own), 1.0, 0)
    if kind == "csv":
        cells = [line.split(",")[1] for line in (tmp_path / "out/predictions.csv").read_text().splitlines()[1:]]
        assert cells == [str(found[0])] * len(own), "the text of the file"


def test_rows_of_a_file_without_labels_and_labels_that_say_there_is_none_are_left_out(
    answer: Answer, tmp_path: Path
) -> None:
    write(tmp_path / "in0.jsonl", {"a": features(3)})
    write(tmp_path / "in1.jsonl", {"a": features(3), "y": [-100, None, 1]})
    result = answer([0, 1], "csv", tmp_path / "in*.jsonl", "infer.label=y")
    assert result.summary["quality"]["rows"] == 1 and result.rows == 6


@pytest.mark.parametrize(
    ("labels", "other", "seen"),
    [
        ([0, 1], ["yes", "no"], "the column y with yes, no, expected classes of the model: 0, 1"),
        (["yes", "no"], [0, 1], "the column y with 0, 1, expected classes of the model: no, yes"),
        (NUMBERS, ["1.1", "2000"], "the column y with 1.1, 2000, expected classes of the model: 1.10, 1.2, 2e3, beta"),
        ([0, 1], [2, 3], "the column y with 2, 3, expected classes of the model: 0, 1"),
    ],
)
def test_labels_none_of_which_is_a_class_are_refused_with_both_before_anything(
    labels: list[Any], other: list[Any], seen: str, answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InferenceWorker, "run", lambda self, unit: pytest.fail("a unit was computed"))
    file = write(tmp_path / "in.csv", {"a": features(), "y": other * (ROWS // 2)})
    with pytest.raises(InputError, match=r"infer\.label: got " + seen):
        answer(labels * (ROWS // len(labels)), "csv", file, "infer.label=y")
    assert not (tmp_path / "out").exists()


def test_the_numbers_of_the_classes_of_a_folder_are_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed (the extra `transformers`)")
    from folders import make_folder

    from raytrain.models.transformers import classifier

    monkeypatch.chdir(tmp_path)
    for kind, names in (("named", ["zeta", "alpha"]), ("unnamed", ["LABEL_0", "LABEL_1"])):
        folder = make_folder(tmp_path / kind, "distilbert", task="masked")
        classifier(path=str(folder), num_labels=2, class_names=names).module.save_pretrained(folder)
        texts = ["the mill", "a rain", "the rain the mill", "rain"]
        first = infer(str(folder), input=str(write(tmp_path / "t.jsonl", {"text": texts})), output=f"{kind}1",
                      overrides=["precision.dtype=fp32"], quiet=True)  # fmt: skip
        answers = first.table()["prediction"].to_pylist()
        assert {*answers} <= {*names}
        for turn, labels in enumerate(([names.index(one) for one in answers], answers)):
            path = write(tmp_path / "t.jsonl", {"text": texts, "y": labels})
            result = infer(str(folder), input=str(path), output=f"{kind}{turn}-y",
                           overrides=["precision.dtype=fp32", "infer.label=y"], quiet=True)  # fmt: skip
            assert result.summary["quality"]["accuracy"] == 1.0


# ---------------------------------------------------------------- columns of other types


def arrow(tmp_path: Path, **columns: Any) -> Path:
    parquet.write_table(pa.table({"a": features(2), **columns}), tmp_path / "in.parquet")
    return tmp_path / "in.parquet"


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        (pa.array([b"\xff\x00", b"ok"]), ["infer.id_column=c", "infer.format=jsonl"]),
        (pa.array([b"\xff\x00", b"ok"]), ["infer.keep=[c]", "infer.format=csv"]),
        (pa.array([b"\xff\x00", b"ok"]), ["infer.keep=[c]", "infer.format=jsonl"]),
        (pa.array([[b"\xff"], []], pa.list_(pa.binary())), ["infer.keep=[c]", "infer.format=jsonl"]),
    ],
)
def test_bytes_are_refused_where_the_format_does_not_hold_them(
    values: Any, keys: list[str], answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InferenceWorker, "run", lambda self, unit: pytest.fail("a unit was computed"))
    with pytest.raises(InputError, match=r"got c, whose values are .*; infer\.format: parquet holds bytes"):
        answer([0, 1], "csv", arrow(tmp_path, c=values), *keys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_times_and_in_parquet_bytes_are_ids(kind: str, answer: Answer, tmp_path: Path) -> None:
    times = arrow(tmp_path, c=pa.array([datetime(2024, 1, 1), datetime(2024, 1, 2)]))
    result = answer([0, 1], "csv", times, "infer.id_column=c", f"infer.format={kind}")
    assert result.summary["slowest"][0]["id"].startswith("2024-01-0")
    if kind == "parquet":
        bytes_ = arrow(tmp_path, c=pa.array([b"\xff\x00", b"ok"]))
        found = answer([0, 1], "csv", bytes_, "infer.id_column=c", output="bytes").table()
        assert found["id"].to_pylist() == [b"\xff\x00", b"ok"]


@pytest.mark.parametrize(
    "kind", [pa.string_view(), pa.large_string(), pa.binary_view(), pa.large_binary()], ids=str
)  # fmt: skip
def test_views_and_large_values_are_kept_and_judged(kind: pa.DataType, answer: Answer, tmp_path: Path) -> None:
    values = ["u", "v"] if kind in (pa.string_view(), pa.large_string()) else [b"u", b"\xff"]
    given = arrow(tmp_path, c=pa.array(values, kind), y=["1.10", "1.2"])
    result = answer(["1.10", "1.2"], "csv", given, "infer.keep=[c]", "infer.label=y")
    assert result.table()["c"].to_pylist() == values and result.failed == 0
    if isinstance(values[0], str):
        given = arrow(tmp_path, y=pa.array(["1.10", "1.2"], kind))
        result = answer(["1.10", "1.2"], "csv", given, "infer.id_column=y", "infer.label=y", output="labels")
        assert result.failed == 0 and result.summary["quality"]["rows"] == 2


MIXED = [{}, [1, 2**70, 0.5], [1, 2], {"c": 1}, True, 1, "text", None, 2.5, {"b": {}}]


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_columns_that_are_not_used_may_hold_anything_and_kept_ones_stay_as_they_are(
    at_once: int, answer: Answer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.inference.plan.converted", _in_blocks(at_once))
    for number in range(2):
        rows = MIXED if number == 0 else MIXED[::-1]
        write(tmp_path / f"in{number}.jsonl", {"a": features(len(MIXED)), "k": rows})
    given = tmp_path / "in*.jsonl"
    assert answer([0, 1], "csv", given).failed == 0
    result = answer([0, 1], "csv", given, "infer.keep=[k]", "infer.format=jsonl", output="kept")
    lines = [json.loads(line) for line in Path(result.predictions).read_text().splitlines()]
    assert [json.dumps(line["k"]) for line in lines] == [json.dumps(one) for one in [*MIXED, *MIXED[::-1]]]
    for key in ("infer.id_column=k", "infer.label=k"):
        with pytest.raises(InputError, match=r"the column k with|types: |Field k has"):
            answer([0, 1], "csv", given, key, output="refused")
    surrogates = write(tmp_path / "s.jsonl", {"a": [0.5], "k": ["\ud83d"]})
    assert answer([0, 1], "csv", surrogates, output="surrogate").failed == 0
    with pytest.raises(InputError, match="half of a surrogate pair"):
        answer([0, 1], "csv", surrogates, "infer.keep=[k]", "infer.format=jsonl", output="refused")
    no_keys = write(tmp_path / "e.jsonl", {"a": [0.5], "k": [{}]})
    table = answer([0, 1], "csv", no_keys, "infer.keep=[k]", "infer.format=jsonl", output="no keys").table()
    assert table["k"].to_pylist() == [{}]
    with pytest.raises(InputError, match=r"the column k with objects without any key.* infer\.format: jsonl"):
        answer([0, 1], "csv", no_keys, "infer.keep=[k]", output="refused")


def _in_blocks(rows: int) -> Callable[..., list[str]]:
    from raytrain.infer.convert import converted

    return lambda *args, **more: converted(*args, **more, rows_at_once=rows)


def test_float32_is_written_in_json_lines_as_the_shortest_number(answer: Answer, tmp_path: Path) -> None:
    lists = pa.array([[0.1], [None, 1e10]], pa.list_(pa.float32()))
    given = arrow(tmp_path, f=pa.array([0.1, None], pa.float32()), l=lists)
    result = answer([0, 1], "csv", given, "infer.keep=[f, l]", "infer.format=jsonl")
    lines = [json.loads(line) for line in Path(result.predictions).read_text().splitlines()]
    assert [(line["f"], line["l"]) for line in lines] == [(0.1, [0.1]), (None, [None, 1e10])]


@pytest.mark.parametrize("name", ["in.JSONL.GZ", "in.jsonl.Gz"])
def test_packed_files_are_unpacked_whatever_the_case_of_their_names(name: str, answer: Answer, tmp_path: Path) -> None:
    assert answer([0, 1], "csv", write(tmp_path / name, {"a": features()})).rows == ROWS


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_template_gets_the_values_of_json_lines_and_the_answers_no_other_columns(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytrain.data.sources.text import ByteVocabulary

    job = {
        "model": {"builder": "raytrain.models.gpt:gpt", "layers": 1, "heads": 2, "width": 16, "context": 32},
        "data": {"source": "stdlib", "max_bytes": 10000}, "precision": {"dtype": "fp32"},
    }  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    seen, encode = set[str](), ByteVocabulary.encode
    monkeypatch.setattr(ByteVocabulary, "encode", lambda self, text: seen.add(text) or encode(self, text))
    path = write(tmp_path / "in.jsonl", {"n": [1, 2.5], "b": [True, False], "other": [1, "x"]})
    keys = ['infer.template="{n} {b}"', "infer.keep=[n]", "infer.max_new_tokens=2", f"infer.format={kind}"]
    result = infer("job.yaml", input=str(path), output="out", overrides=keys, quiet=True)
    assert {"1 true", "2.5 false"} <= seen and result.failed == 0
    assert {*result.table().column_names} == {"id", "n", "prediction", "status", "error"}
