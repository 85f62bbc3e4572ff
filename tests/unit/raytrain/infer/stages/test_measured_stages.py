"""Stages balanced by what their parts take: measured on the input, one stage in memory at a time, and told."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from torch import nn

from jobs.infer import InferResult, infer
from raytrain.config.sections import InferConfig, ModelConfig
from raytrain.infer.input import InputRows, Unit
from raytrain.infer.model import InferenceModel
from raytrain.infer.stages import measure
from raytrain.infer.stages.measure import LEAST_BATCHES, measure_parts
from raytrain.infer.stages.partition import plan_stages
from raytrain.infer.stages.split import StageSplit, skeleton_of
from raytrain.infer.stages.stage import parts_of
from raytrain.infer.worker import Work
from raytrain.models.gpt import gpt
from raytrain.models.weights.stored import export_weights

BATCH = 2
ROWS = BATCH * LEAST_BATCHES
GUEST = """
import torch
from torch import nn


class Slow(nn.Linear):
    \"\"\"As many bytes as the others, hundreds of times their work.\"\"\"

    def forward(self, x):
        for _ in range(2000):
            y = super().forward(x)
        return y


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), Slow(8, 8))

    def forward(self, x):
        if (x > 1e6).any():
            raise ValueError("a bad row")
        return self.net(x)


def build():
    torch.manual_seed(0)
    return Stack()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with equal_bytes.py, its weights and in.parquet."""
    (tmp_path / "equal_bytes.py").write_text(GUEST)
    built: dict[str, Any] = {}
    exec(GUEST, built)
    export_weights(built["build"]().state_dict(), str(tmp_path / "model.safetensors"))
    write(tmp_path, np.random.default_rng(0).normal(size=(ROWS, 8)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: Path, x: np.ndarray) -> None:
    columns = {"x": pa.FixedSizeListArray.from_arrays(pa.array(x.astype(np.float32).ravel()), 8)}
    parquet.write_table(pa.table(columns), folder / "in.parquet")


def run(output: str, *overrides: str) -> tuple[InferResult, dict[str, Any]]:
    """The result of a job, and what its manifest says of the stages."""
    given = ["model.init_from=model.safetensors", f"infer.batch_size={BATCH}", "scale.threads=1", *overrides]
    result = infer("equal_bytes:build", input="in.parquet", output=output, overrides=given, quiet=True)
    return result, json.loads((Path(result.output) / "manifest.json").read_text())["stages"]


@pytest.mark.covers("SRC-13")
def test_a_slow_part_gets_a_stage_of_its_own_and_the_answers_stay(folder: Path) -> None:
    """With `infer.stages`, and with a map in its place, as the original's loader took a `device_map`."""
    whole, none = run("whole")
    split, told = run("split", "infer.stages=2")
    assert none is None
    assert told["stages"] == ["net.0 to net.2, 864 B", "net.3, 288 B"], "by bytes it would be two and two"
    assert told["balance"].startswith("by measured time: a batch takes ")
    assert list(told["part_seconds"]) == ["net.0", "net.1", "net.2", "net.3"] and min(told["part_seconds"].values()) > 0
    assert told["seconds"] == [sum(list(told["part_seconds"].values())[:3]), told["part_seconds"]["net.3"]]
    assert split.summary["stages"]["bytes"] == [864, 288] and split.summary["stages"]["seconds"] == told["seconds"]
    mapped, told = run("mapped", "infer.stage_map=[net.0, net.1-3]")
    assert told["stages"] == ["net.0, 288 B", "net.1 to net.3, 864 B"]
    assert len({Path(one.output, "predictions.parquet").read_bytes() for one in (whole, split, mapped)}) == 1


@pytest.mark.parametrize(
    ("overrides", "stages", "said"),
    [
        ((f"infer.max_samples={ROWS - BATCH}",), 2, f"by bytes: {LEAST_BATCHES - 1} batches are too few to measure"),
        (("infer.stage_map=[net.0, net.1-3]",), 1, "as infer.stage_map says"),
        (("infer.stage_policy=sequential", "cluster.memory_limit=900"), 3, "filled one after another"),
        (("cluster.memory_limit=600",), 2, "by measured time"),  # three parts do not fit
    ],
)
def test_what_stages_are_balanced_by_is_told_and_none_is_above_its_memory(
    folder: Path, overrides: tuple[str, ...], stages: int, said: str
) -> None:
    """`stages`: parts of the first of two stages."""
    found = plan_of(*overrides, *(() if "map" in overrides[0] else ("infer.stages=2",)))
    assert found.balance.startswith(said)
    assert found.plan.bounds == (0, stages, 4)


def plan_of(*overrides: str) -> StageSplit:
    """The stages of a job as it would run in this process."""
    from cluster.devices.inventory import local_inventory
    from jobs.inference.layout import rebalanced
    from jobs.inference.plan import plan_inference
    from jobs.inference.target import open_target

    given = ["model.init_from=model.safetensors", f"infer.batch_size={BATCH}", "infer.input=in.parquet",
             "scale.threads=1", *overrides]  # fmt: skip
    target = open_target("equal_bytes:build", given, local_inventory())
    planned = plan_inference(target, local_inventory(), resume=None)
    if planned.measures_stages:
        return rebalanced(target, planned.stages, measure_parts(planned.work(), planned.units[0]))
    assert planned.stages.split is not None
    return planned.stages.split


def test_a_row_that_fails_while_parts_are_timed_fails_alone(folder: Path) -> None:
    x = np.zeros((ROWS, 8))
    x[0] = 1e7
    write(folder, x)
    result, told = run("out", "infer.stages=2", "infer.max_failures=0.1")
    assert (result.rows, result.failed) == (ROWS, 1)
    assert told["balance"] == "by bytes: a batch failed: ValueError: a bad row" and told["seconds"] == []
    assert told["stages"] == ["net.0 to net.1, 576 B", "net.2 to net.3, 576 B"]


def test_an_answer_of_many_tokens_counts_with_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stage at a time is loaded, and every part is called once for each token."""
    tokens = 100
    sizes = {"layers": 3, "heads": 2, "width": 16, "context": 128, "vocab_size": 256}
    torch.manual_seed(0)
    export_weights(gpt(**sizes).module.state_dict(), str(tmp_path / "model.safetensors"))
    keys = {"builder": "raytrain.models.gpt:gpt", "init_from": str(tmp_path / "model.safetensors"), **sizes}
    model = InferenceModel(ModelConfig.model_validate(keys), facts={"vocab_size": 256})
    parquet.write_table(pa.table({"text": ["ab", "abcdef", "abc", "abcd"]}), tmp_path / "in.parquet")
    loaded: list[tuple[int, Any]] = []
    real = measure.load_stage

    def load(*given: Any) -> Any:
        assert all(module() is None for _, module in loaded), "a stage before is still in memory"
        stage = real(*given)
        loaded.append((stage.bytes_read, weakref.ref(stage.module)))
        return stage

    monkeypatch.setattr(measure, "load_stage", load)
    monkeypatch.setattr(measure, "PartClock", Counts)
    plan = plan_stages(parts_of(skeleton_of(model)), 3)
    infer_section = InferConfig(prompt_field="text", max_new_tokens=tokens)
    rows = InputRows.at([str(tmp_path / "in.parquet")])
    found = measure_parts(Work(model, infer_section, rows, "", 2, 0, split=StageSplit(plan, 2)), Unit(0, 0, 4))
    assert found.reason == "" and found.seconds == (float(tokens),) * len(plan.parts)
    assert [read for read, _ in loaded] == plan.bytes


class Counts(measure.PartClock):
    """Every call takes one second."""

    def _end_of(self, place: int) -> Any:
        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._seconds[place] = 1.0

        return end
