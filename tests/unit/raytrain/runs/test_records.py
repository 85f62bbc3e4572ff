"""Rows of metrics and events: exact, JSON for everybody, and whole after a kill."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain.errors import RunError
from raytrain.runs.records import EvalRecord, JsonlWriter, ObjectJsonlWriter, StepRecord, event, plain, rows_of
from raytrain.runs.storage import ObjectStore


def read_rows(path: Path) -> list[dict[str, Any]]:
    return rows_of(path.read_bytes(), origin=str(path))


def test_doubles_survive_bit_for_bit(tmp_path):
    values = [1 / 3, 0.1 + 0.2, 5e-324, 1.7976931348623157e308, -0.0, float(np.float32(0.1))]
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step, value in enumerate(values, start=1):
        writer.write(StepRecord(step=step, epoch=0, loss=value).to_row())
    back = [row["loss"] for row in read_rows(tmp_path / "metrics.jsonl")]
    assert [value.hex() for value in back] == [value.hex() for value in values]


def test_non_finite_numbers_are_strings_in_the_file_and_floats_when_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    record = StepRecord(step=1, epoch=0, loss=math.nan, grad_norm=math.inf, lr=-math.inf)
    JsonlWriter(path).write(record.to_row())

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert (row["loss"], row["grad_norm"], row["lr"]) == ("nan", "inf", "-inf")
    (read,) = read_rows(path)
    assert math.isnan(read["loss"]) and read["grad_norm"] == math.inf and read["lr"] == -math.inf


def test_rows_have_the_columns_of_the_run_folder():
    row = StepRecord(step=7, epoch=1, loss=2.0, extra={"dropped_fraction": 0.0}).to_row()
    assert row["kind"] == "train" and row["dropped_fraction"] == 0.0 and "extra" not in row
    columns = "step epoch loss aux_loss grad_norm lr samples_per_s tokens_per_s step_time_s data_time_s"
    assert " ".join(row).startswith(f"kind {columns} peak_memory_bytes loss_scale mfu ")
    assert EvalRecord(step=7, loss=1.5).to_row() == {"kind": "eval", "step": 7, "loss": 1.5}
    assert EvalRecord(step=7, loss=1.5, accuracy=0.5).to_row()["accuracy"] == 0.5
    assert event("attempt", attempt=2)["attempt"] == 2 and isinstance(event("x")["time"], float)


def test_an_incomplete_last_line_is_ignored_and_fixed_by_the_next_writer(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "a"}\n{"kind": "b", "x": 1.2')
    assert [row["kind"] for row in read_rows(path)] == ["a"]
    JsonlWriter(path).write({"kind": "c"})
    assert [row["kind"] for row in read_rows(path)] == ["a", "c"]


def test_a_row_that_lost_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "a"}\n{"kind": "b"}')
    JsonlWriter(path).write({"kind": "c"})
    assert [row["kind"] for row in read_rows(path)] == ["a", "b", "c"]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "a"}\n{"kind\n{"kind": "c"}\n')
    with pytest.raises(RunError, match=r"events\.jsonl, line 2"):
        read_rows(path)


def test_rows_are_in_the_file_before_the_writer_is_closed(tmp_path):
    writer = JsonlWriter(tmp_path / "rows.jsonl")
    writer.write({"step": 1})
    assert read_rows(tmp_path / "rows.jsonl") == [{"step": 1}]
    writer.close()
    with pytest.raises(ValueError, match="closed"):
        writer.write({"step": 2})


def test_plain_accepts_numpy_scalars_and_refuses_objects():
    assert plain({"a": np.float32(0.5), 3: (np.int64(2), True)}) == {"a": 0.5, "3": [2, True]}
    with pytest.raises(TypeError, match="object"):
        plain({"a": object()})


def test_object_store_rows_of_two_processes_are_merged_not_overwritten(tmp_path):
    store = ObjectStore(f"file://{tmp_path}/run")
    driver = ObjectJsonlWriter(store, "events.jsonl", every_s=3600)
    worker = ObjectJsonlWriter(store, "events.jsonl", every_s=3600)
    driver.write({"who": "driver", "n": 1})
    driver.flush()
    worker.write({"who": "worker", "n": 1})
    worker.flush()
    driver.write({"who": "driver", "n": 2})
    driver.close()
    worker.write({"who": "worker", "n": 2})
    worker.close()
    rows = [(row["who"], row["n"]) for row in read_rows(tmp_path / "run" / "events.jsonl")]
    assert rows == [("driver", 1), ("worker", 1), ("driver", 2), ("worker", 2)]


def test_object_store_rows_go_up_by_themselves(tmp_path):
    class Watched(ObjectStore):
        """Says when an upload is done."""

        def write_bytes(self, name: str, data: bytes) -> None:
            super().write_bytes(name, data)
            uploaded.set()

    import threading

    uploaded = threading.Event()
    writer = ObjectJsonlWriter(Watched(f"file://{tmp_path}/run"), "metrics.jsonl", every_s=0.01)
    writer.write({"step": 1})
    assert uploaded.wait(20)
    assert read_rows(tmp_path / "run" / "metrics.jsonl") == [{"step": 1}]
    writer.close()
