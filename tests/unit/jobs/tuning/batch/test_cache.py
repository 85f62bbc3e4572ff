"""What earlier searches have left: of gates only what was held the same way, and had memory enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.devices.inventory import Inventory, Node
from jobs.driver.checks.job import check_on_driver
from jobs.job.spec import load_spec
from jobs.tuning.batch.cache import Cache, cache_key, gate_key, valid_rows
from jobs.tuning.batch.search import find_search
from raytrain.autotune.search.measurement import Candidate, Measurement
from raytrain.autotune.search.precision import GateReport, gate_refusal

BOX = Inventory((Node("box", 8, 16 << 30),), source="a test", cpu_model="c", cpu_flags={"amx_bf16": True})
SLOW, FAST = {"optim": {"lr": 1e-4}}, {"optim": {"lr": 1.0}}
TIMED = Measurement(Candidate("fp32", 2), "ok", (0.01,) * 3, (0.01,) * 3, peak_bytes=100, floor_bytes=1)


def timed(number: int) -> dict[str, Any]:
    """A line of trials.jsonl."""
    return {"trial": number, "outcome": "ok", "budget_bytes": 1000, "time": number, "measurement": TIMED.to_json()}


def gated(number: int, **report: Any) -> dict[str, Any]:
    """The line of a gate."""
    gate = GateReport("bf16", "fp32", **report).to_json()
    return {"trial": number, "outcome": "ok", "budget_bytes": 1000, "time": number, "gate": gate}


def kept(folder: Path, gate: dict[str, Any]) -> list[int]:
    """Numbers of the trials that a search with these settings finds."""
    return [row["trial"] for row in Cache(str(folder), {}, budget=1000, fresh=False, gate=gate).rows]


def test_a_gate_holds_for_the_learning_rate_it_was_run_with_and_times_for_every_one(tmp_path: Path) -> None:
    Cache(str(tmp_path), {}, budget=1000, fresh=False, gate=SLOW).store([timed(1), gated(2)])
    assert kept(tmp_path, SLOW) == [1, 2]
    assert kept(tmp_path, FAST) == [1]
    Cache(str(tmp_path), {}, budget=1000, fresh=False, gate=FAST).store([gated(3, skipped=9)])
    assert (kept(tmp_path, SLOW), kept(tmp_path, FAST)) == ([1, 2], [1, 3])


def test_a_gate_that_ran_out_of_memory_refuses_only_in_its_own_search(tmp_path: Path) -> None:
    short = gated(2, error="no room", out_of_memory=True)
    assert gate_refusal(GateReport.from_json(short["gate"])) == "no room"
    cache = Cache(str(tmp_path), {}, budget=1000, fresh=False, gate=SLOW)
    cache.store([timed(1), short, gated(3, error="no kernel")])
    assert kept(tmp_path, SLOW) == [1, 3]


def keys(*overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What measurements, and what gates depend on, in a job with these overrides."""
    data = {"train": {"x": torch.zeros(64, 12), "labels": torch.zeros(64, dtype=torch.long)}}
    job = {"model": {"builder": "raytrain.models.mlp:mlp"}, "data": data, "loop": {"max_steps": 4000}}
    loaded = load_spec(mapping=job, overrides=list(overrides))
    checked = check_on_driver(loaded.spec, run_batch=False)
    search = find_search(loaded, checked, BOX)
    return cache_key(loaded.spec, search, checked, search.kinds[0]), gate_key(search)


@pytest.mark.parametrize(
    ("changed", "again"),
    [
        ("optim.lr=0.5", True), ("optim.weight_decay=0.7", True), ("optim.schedule=constant", True),
        ("optim.warmup_steps=3", True), ("loop.max_steps=50", True), ("seed=7", True), ("save.every=3", False),
        ("loop.global_batch_size=8", False), ("loop.log_every=3", False),
    ],
)  # fmt: skip
def test_keys_that_change_the_weights_repeat_only_the_gate(changed: str, again: bool) -> None:
    (measured, gate), (later, later_gate) = keys(), keys(changed)
    assert later == measured, "measurements hold"
    assert (later_gate != gate) == again


@pytest.mark.parametrize(
    "changed",
    ["precision.fp32_layers=[layers.0]", "loop.activation_checkpointing=true", "optim.name=sgd", "model.hidden=[8]"],
)
def test_keys_that_change_what_a_step_costs_measure_again(changed: str) -> None:
    assert keys(changed)[0] != keys()[0]


@pytest.mark.parametrize(("budget", "holds"), [(500, True), (1000, True), (2000, False), (None, False)])
def test_a_size_without_room_is_measured_again_only_where_there_is_more(budget: int | None, holds: bool) -> None:
    measured = {**TIMED.to_json(), "outcome": "out_of_memory"}
    assert len(valid_rows([{**timed(1), "measurement": measured}], budget)) == holds
