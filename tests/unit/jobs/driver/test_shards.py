"""What the driver says of a job that cannot be sharded, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.driver.check_job import check_on_driver
from jobs.job.spec import load_spec, refuse_later
from raytrain.errors import InputError

CODE = """
import torch
from torch import nn
from raytrain.trainable import LossOutput, Trainable

class Layer(nn.Linear):
    pass

def build(kind):
    layers = nn.Sequential(Layer(2, 2), Layer(2, 2))
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU()) if kind == "single" else nn.Sequential(layers, Layer(2, 2))
    blocks = {"single": None, "missing": "0", "scalar": ["0", "1"]}[kind]
    if kind == "scalar":
        module.scale = nn.Parameter(torch.ones(()))
    return Trainable(module, lambda *_: LossOutput(torch.zeros(())), blocks=blocks)

def rows():
    return {"train": {"x": torch.zeros(8, 2), "labels": torch.zeros(8)}, "eval": {"x": torch.zeros(2, 2)}}
"""


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("single", "scale.strategy", "does not name blocks"),
        ("missing", "model.builder", "miss parameters of 1 like them: 1.weight, 1.bias"),
        ("scalar", "scale.strategy", "scalar parameters (scale)"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_before_the_start(
    kind: str, key: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shard_guest.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    job = {"model": {"builder": "shard_guest:build", "kind": kind}, "data": {"source": "shard_guest:rows"}}
    spec = load_spec(None, mapping={**job, "scale": {"strategy": "fsdp"}}).spec
    with pytest.raises(InputError) as caught:
        check_on_driver(spec, run_batch=False)
    assert caught.value.key == key and words in str(caught.value)
    alone = load_spec(None, mapping=job).spec
    assert check_on_driver(alone, run_batch=False).model_facts.parameters > 0, "data parallel does without blocks"


def test_a_search_does_not_shard_and_states_it() -> None:
    spec = load_spec(None, ["scale.strategy=fsdp"]).spec
    with pytest.raises(InputError) as caught:
        refuse_later(spec, "tune")
    assert caught.value.key == "scale.strategy"
    refuse_later(spec, "train")
