"""What earlier searches have left: of gates only what was held the same way, and had memory enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.devices.inventory import Inventory, Node
from jobs.driver.check_job import check_on_driver
from jobs.job.spec import load_spec
from jobs.tuning.batch_search import find_search
from jobs.tuning.cache import Cache, cache_key, valid_rows
from raytrain.autotune.measurement import Candidate, Measurement, from_json
from raytrain.autotune.precision import GateReport, gate_refusal

BOX = Inventory((Node("box", 8, 16 << 30),), source="a test", cpu_model="c", cpu_flags={"amx_bf16": True})
TIMED = Measurement(Candidate("fp32", 2), "ok", (0.01,) * 3, (0.01,) * 3, peak_bytes=100, floor_bytes=1)


def timed(number: int) -> dict[str, Any]:
    """A line of trials.jsonl."""
    return {"trial": number, "outcome": "ok", "budget_bytes": 1000, "time": number, "measurement": TIMED.to_json()}


def gated(number: int, **report: Any) -> dict[str, Any]:
    """The line of a gate."""
    gate = GateReport("bf16", "fp32", **report).to_json()
    return {"trial": number, "outcome": "ok", "budget_bytes": 1000, "time": number, "gate": gate}


def kept(folder: Path) -> list[int]:
    """Numbers of the trials that a later search finds."""
    return [row["trial"] for row in Cache(str(folder), {}, budget=1000, fresh=False).rows]


def test_a_gate_that_ran_out_of_memory_refuses_only_in_its_own_search(tmp_path: Path) -> None:
    short = gated(2, error="no room", out_of_memory=True)
    assert gate_refusal(from_json(GateReport, short["gate"])) == "no room"
    cache = Cache(str(tmp_path), {}, budget=1000, fresh=False)
    cache.store([timed(1), short, gated(3, error="no kernel")])
    assert kept(tmp_path) == [1, 3]


def key(*overrides: str) -> dict[str, Any]:
    """What measurements and gates depend on, in a job with these overrides."""
    data = {"train": {"x": torch.zeros(64, 12), "labels": torch.zeros(64, dtype=torch.long)}}
    job = {"model": {"builder": "raytrain.models.mlp:mlp"}, "data": data, "loop": {"max_steps": 4000}}
    loaded = load_spec(mapping=job, overrides=list(overrides))
    checked = check_on_driver(loaded.spec, run_batch=False)
    search = find_search(loaded, checked, BOX)
    return cache_key(loaded.spec, search, checked, search.kinds[0])


@pytest.mark.parametrize("changed", ["save.every=3", "loop.global_batch_size=8", "loop.log_every=3"])
def test_keys_that_change_no_measurement_keep_the_cache(changed: str) -> None:
    assert key(changed) == key()


@pytest.mark.parametrize(
    "changed",
    [
        "optim.lr=0.5",
        "optim.weight_decay=0.7",
        "optim.schedule=constant",
        "loop.max_steps=50",
        "seed=7",
        "precision.fp32_layers=[layers.0]",
        "loop.activation_checkpointing=true",
        "optim.name=sgd",
        "model.hidden=[8]",
    ],
)
def test_keys_that_change_weights_or_what_a_step_costs_measure_again(changed: str) -> None:
    assert key(changed) != key()


@pytest.mark.parametrize(("budget", "holds"), [(500, True), (1000, True), (2000, False), (None, False)])
def test_a_size_without_room_is_measured_again_only_where_there_is_more(budget: int | None, holds: bool) -> None:
    measured = {**TIMED.to_json(), "outcome": "out_of_memory"}
    assert len(valid_rows([{**timed(1), "measurement": measured}], budget)) == holds
