"""What a module's state holds besides weights, and modules whose weights are computed, train and resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import states
from gang import run_gang
from lab import digest

from raytrain.checkpoint.reader import read_weights
from raytrain.models.weights.stored import StartingWeights, StoredTensors
from raytrain.runs.folder import RunFolder
from raytrain.train.job import load_module


@pytest.mark.parametrize("kind", ["counting", "normed"])
@pytest.mark.parametrize(("strategy", "world_size"), [("data_parallel", 1), ("data_parallel", 2), ("fsdp", 2)])
def test_a_resumed_run_has_the_losses_and_the_state_of_the_unbroken_one(
    tmp_path: Path, kind: str, strategy: str, world_size: int
) -> None:
    def run(name: str, *more: Any) -> list[dict[str, Any]]:
        return run_gang(states.life, kind, strategy, str(tmp_path / name), *more, world_size=world_size)

    whole = run("whole")
    assert len(set(whole[0]["losses"])) == states.STEPS
    run("broken", states.BREAK)
    resumed = run("broken", states.STEPS, True)
    begun = resumed[0]["from"]
    assert 3 <= begun < states.STEPS and resumed[0]["losses"] == whole[0]["losses"][begun:]
    assert resumed[0]["state"] == whole[0]["state"]
    fresh = states.made(kind)
    StartingWeights(whole[0]["exported"]).fill(fresh)
    assert digest(fresh.state_dict()) == whole[0]["state"], "an export starts another run with the whole state"
    other = states.made(kind)
    other.load_state_dict(StoredTensors(whole[0]["exported"]).read_all())
    assert digest(other.state_dict()) == whole[0]["state"]
    kept = RunFolder(str(tmp_path / "broken")).checkpoint_dir(begun)
    earlier = states.made(kind)
    load_module(earlier, read_weights(kept).tensors)
    from_checkpoint = states.made(kind)
    StartingWeights(kept).fill(from_checkpoint)
    assert digest(earlier.state_dict()) == digest(from_checkpoint.state_dict()) != whole[0]["state"]
    if kind == "counting":  # each worker runs 4 micro-batches of 2 rows in a step, or half of them
        assert fresh.layers[1].seen == states.STEPS * 4 // world_size  # pyright: ignore
        assert fresh.table.tolist() == [1, 2, 3]  # pyright: ignore
