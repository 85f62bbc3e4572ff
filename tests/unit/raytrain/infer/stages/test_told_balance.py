"""What stages are balanced by is told, and answers stay the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from cluster.devices.inventory import local_inventory
from jobs.infer import InferResult, infer
from jobs.inference.plan import plan_inference
from jobs.inference.target import open_target
from raytrain.models.weights.stored import export_weights

BATCH = 2
ROWS = 128
GUEST = """
import torch
from torch import nn


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, x):
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
def test_a_map_takes_the_place_of_equal_stages_and_the_answers_stay(folder: Path) -> None:
    """With `infer.stages`, and with a map in its place, as the original's loader took a `device_map`."""
    whole, none = run("whole")
    split, told = run("split", "infer.stages=2")
    assert none is None
    assert told == {"stages": ["net.0 to net.1, 576 B", "net.2 to net.3, 576 B"], "balance": "by bytes"}
    assert split.summary["stages"]["bytes"] == [576, 576] and split.summary["stages"]["balance"] == "by bytes"
    mapped, told = run("mapped", "infer.stage_map=[net.0, net.1-3]")
    assert told["stages"] == ["net.0, 288 B", "net.1 to net.3, 864 B"]
    assert len({Path(one.output, "predictions.parquet").read_bytes() for one in (whole, split, mapped)}) == 1


@pytest.mark.parametrize(
    ("overrides", "stages", "said"),
    [
        (("infer.stages=2",), 2, "by bytes"),
        (("infer.stage_map=[net.0, net.1-3]",), 1, "as infer.stage_map says"),
        (
            ("infer.stages=2", "infer.stage_policy=sequential", "cluster.memory_limit=900"),
            3,
            "filled one after another",
        ),
    ],
)
def test_what_stages_are_balanced_by_is_told(folder: Path, overrides: tuple[str, ...], stages: int, said: str) -> None:
    """`stages`: parts of the first of two stages."""
    given = ["model.init_from=model.safetensors", f"infer.batch_size={BATCH}", "infer.input=in.parquet",
             "scale.threads=1", *overrides]  # fmt: skip
    target = open_target("equal_bytes:build", given, local_inventory())
    split = plan_inference(target, local_inventory(), resume=None).stages.split
    assert split is not None and split.balance.startswith(said) and split.plan.bounds == (0, stages, 4)
