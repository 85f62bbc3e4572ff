"""The memory of a process that loads one stage of a model from sharded safetensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from raytrain.models.gpt import gpt

SIZES: dict[str, Any] = {"layers": 24, "heads": 4, "width": 512, "context": 64, "vocab_size": 256}
STAGES, SHARDS = 3, 4
LOAD = """
import gc, json, sys
import torch
from cluster.telemetry.processes import process_memory, reset_peak
from raytrain.config.sections import ModelConfig
from raytrain.infer.model import InferenceModel
from raytrain.infer.stages.partition import plan_stages
from raytrain.infer.stages.stage import parts_of
from raytrain.infer.stages.split import StageSplit, load_stage, skeleton_of

path, stage, stages, sizes, small = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *map(json.loads, sys.argv[4:6])

def load(path, sizes):
    keys = {**sizes, "builder": "raytrain.models.gpt:gpt", "init_from": path}
    model = InferenceModel(ModelConfig.model_validate(keys), {})
    split = StageSplit(plan_stages(parts_of(skeleton_of(model)), stages), 1)
    return load_stage(model, split, stage, torch.device("cpu"))

load(small["path"], small["sizes"])  # what is imported and started once
gc.collect()
assert reset_peak()
before = process_memory().rss
made = load(path, sizes)
print(json.dumps({"peak": process_memory().peak - before, "bytes": made.bytes_read}))
"""


def write_shards(folder: Path, sizes: dict[str, Any]) -> int:
    """A model's weights in shards with an index, as transformers writes them; their bytes."""
    folder.mkdir()
    state = dict(gpt(**sizes).module.named_parameters())
    names, of = list(state), {}
    for shard in range(SHARDS):
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        held = {key: state[key].detach().clone() for key in names[shard::SHARDS]}
        save_file(held, folder / name)
        of |= dict.fromkeys(held, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": of}))
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], int]:
    """A model of about 300 MB, a small one, and the bytes of the first."""
    folder = tmp_path_factory.mktemp("shards")
    torch.manual_seed(0)
    small = {**SIZES, "layers": STAGES, "width": 32}
    write_shards(folder / "small", small)
    return folder / "large", {"path": str(folder / "small"), "sizes": small}, write_shards(folder / "large", SIZES)


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_needs_no_more_than_a_fifth_beyond_its_own_bytes_to_load(
    stage: int, folders: tuple[Path, dict[str, Any], int]
) -> None:
    path, small, whole = folders
    given = [sys.executable, "-c", LOAD, str(path), str(stage), str(STAGES), json.dumps(SIZES), json.dumps(small)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bytes"] < 0.45 * whole, "a stage reads its own part only"
    assert 0.9 * found["bytes"] < found["peak"] <= 1.2 * found["bytes"], found
