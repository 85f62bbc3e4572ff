"""The preparation pass: once, told in order with counts and bytes, its seconds kept apart."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raytrain.data import prepare as prepared
from raytrain.data.prepare import DataPlan, prepare_source, read_dataset
from raytrain.data.rows.map_style import DatasetSplit, ItemSplit
from raytrain.data.rows.residency import to_device
from raytrain.data.rows.splits import TensorSplit
from raytrain.data.sources.in_memory import memory_source, object_split
from raytrain.runs.records import account

CPU = torch.device("cpu")


class Slow:
    """Counts how often an item is converted; each conversion draws."""

    def __init__(self, count: int = 30) -> None:
        self.count, self.asked = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked += 1
        return {"x": np.full(4, float(index), dtype=np.float32) + random.random(), "labels": index % 3}


class Told:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __call__(self, kind: str, **fields: Any) -> None:
        assert kind == "preparation"
        self.rows.append(fields)


@pytest.mark.covers("DATA-14", "SRC-07")
def test_start_progress_and_end_are_reported_in_order_with_counts_and_megabytes() -> None:
    source, told = memory_source(Slow(1000), Slow(20), fraction=0.0), Told()
    placed = prepare_source(source, DataPlan("resident", seed=1), device=CPU, report=told)
    phases = [row["phase"] for row in told.rows]
    assert phases == ["start", *["progress"] * (len(phases) - 2), "finished"] and len(phases) > 10
    assert [row["done"] for row in told.rows[1:11]] == list(range(100, 1001, 100)) and told.rows[1]["of"] == 1000
    last = told.rows[-1]
    assert last["megabytes"] == pytest.approx(1020 * (16 + 8) / 1e6) and last["device"] == "cpu" and last["seconds"] > 0
    assert (
        "1,000 rows (train) and 20 rows (eval) prepared in" in last["reason"]
        and "; 23.9 KiB stay on cpu" in last["reason"]
    )
    assert prepare_source(placed, DataPlan("resident"), device=CPU, report=told) is placed
    assert len(told.rows) == len(phases), "once"


@pytest.mark.covers("SRC-07")
@pytest.mark.parametrize(("storage", "megabytes"), [("resident", 40 * 16), ("partial", 8 * 16), ("stream", 0)])
def test_resident_bytes_are_counted(storage: Any, megabytes: int) -> None:
    data = {"x": torch.rand(40, 2), "labels": torch.arange(40)}
    source, told = memory_source(data, None, fraction=0.0), Told()
    prepare_source(source, DataPlan(storage, resident_rows=8), device=CPU, report=told)
    assert told.rows[-1]["megabytes"] == pytest.approx(megabytes / 1e6)


def test_preparing_rows_does_not_advance_the_generators() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    split = DatasetSplit(Slow())
    quiet = {"report": lambda done, of: None}
    first, second = (split.kept(read_dataset(split, seed=3, **quiet)) for _ in range(2))
    assert isinstance(first, TensorSplit) and isinstance(second, TensorSplit)
    assert torch.equal(first.columns["x"], second.columns["x"]), "drawn from (seed, row)"
    other = split.kept(read_dataset(split, seed=4, **quiet))
    assert isinstance(other, TensorSplit) and not torch.equal(first.columns["x"], other.columns["x"])
    assert before[0] == random.getstate() and before[1] == np.random.get_state()[1].tolist()
    assert torch.equal(before[2], torch.get_rng_state())
    odd = [{"x": torch.zeros(2), "name": str(i)} for i in range(3)]
    mixed = DatasetSplit(odd)
    assert isinstance(mixed.kept(read_dataset(mixed, seed=0, **quiet)), ItemSplit)


@pytest.mark.covers("DATA-08")
def test_the_device_is_waited_for_once_after_all_rows_are_uploaded(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(prepared, "place_split", lambda split, *plan, **named: order.append("uploaded") or split)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append("synchronize"))
    data = {"x": torch.rand(40, 2), "labels": torch.arange(40)}
    source, gpu = memory_source(data, data, fraction=0.0), torch.device("cuda")
    prepare_source(source, DataPlan("resident"), device=gpu, report=lambda kind, **told: order.append(told["phase"]))
    assert order == ["start", "uploaded", "progress", "uploaded", "progress", "synchronize", "finished"]


@pytest.mark.covers("MEM-14")
def test_the_copy_on_the_host_is_given_up_after_the_upload() -> None:
    data = {"x": torch.rand(40, 2), "labels": torch.arange(40)}
    source = memory_source(data, None, fraction=0.0)
    assert isinstance(source.train, TensorSplit)
    host = weakref.ref(source.train.columns["x"])
    del data
    source = prepare_source(source, DataPlan("resident"), device=torch.device("meta"), report=Told())
    assert isinstance(source.train, TensorSplit) and source.train.columns["x"].is_meta and host() is None
    batch = object_split({"x": torch.rand(40, 2)}, key="data.train").gather(np.arange(4))
    uploaded = weakref.ref(batch["x"])
    batch = to_device(batch, "meta")
    assert uploaded() is None


@pytest.mark.covers("DATA-15")
def test_its_seconds_are_data_and_not_start_up() -> None:
    rows = [
        {"kind": "driver_start", "time": 0.0, "process_start": 0.0},
        {"kind": "preparation", "time": 10.0, "phase": "start"},
        {"kind": "preparation", "time": 14.0, "phase": "finished", "seconds": 4.0},
        {"kind": "attempt", "time": 15.0, "attempt": 1},
        {"kind": "account", "time": 35.0, "seconds": {"data": 2.0, "compute": 18.0}},
        {"kind": "attempt_end", "time": 35.0},
        {"kind": "driver_end", "time": 36.0},
    ]
    told = account(rows, now=40.0)
    assert told["wall_s"] == 36.0 and told["time"]["startup"] == 11.0 and told["time"]["data"] == 4.0 + 2.0
    assert sum(told["time"].values()) == pytest.approx(36.0)
    without = account([replace_phase(row) for row in rows], now=40.0)
    assert without["time"]["startup"] == 15.0


def replace_phase(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "phase": "start"} if "phase" in row else row


def test_a_plan_is_a_value() -> None:
    assert replace(DataPlan("stream"), prefetch=3) == DataPlan("stream", prefetch=3)
