from __future__ import annotations

import json
from typing import Any

import pytest

from experts.config import ExpertsConfig
from raytrain.autotune.found import Signature, differences, make_signature
from raytrain.config.sections import LoopConfig, ModelConfig, OptimConfig, TuneFound


def signature(**changed: Any) -> Signature:
    given: dict[str, Any] = {
        "model": ModelConfig.model_validate({"builder": "raytrain.models.mlp:mlp", "hidden": [32]}),
        "optim": OptimConfig(), "loop": LoopConfig(), "experts": ExpertsConfig(), "parameters": 100, "longest_row": 7,
        "device": "cpu", "device_bytes": 2**30, "threads": 2, "workers": 1, "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    return make_signature(**{**given, **changed})


def test_the_same_facts_have_the_same_hash() -> None:
    assert signature() == signature()
    assert Signature(**json.loads(json.dumps(signature().to_json()))) == signature()
    # what changes neither time nor memory, or is measured for each choice anyway
    assert signature(optim=OptimConfig(lr=0.5)).hash == signature().hash
    assert signature(loop=LoopConfig(max_steps=7)).hash == signature().hash
    assert signature(experts=ExpertsConfig(hosts=0, inflight=2)).hash == signature().hash


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"workers": 2}, "workers: 1 -> 2"),
        ({"longest_row": 9}, "longest_row: 7 -> 9"),
        ({"device": "NVIDIA H100"}, "device: cpu -> NVIDIA H100"),
        ({"device_bytes": 7}, f"device_bytes: {2**30} -> 7"),
        ({"versions": {"torch": "2.14.0"}}, "version.torch: 2.13.0 -> 2.14.0"),
        ({"optim": OptimConfig(name="sgd")}, "optim.name: adamw -> sgd"),
        ({"experts": ExpertsConfig(top_k=1)}, "experts.top_k: 2 -> 1"),
        ({"model": ModelConfig.model_validate({"builder": "a:b"})}, "model.builder: raytrain.models.mlp:mlp -> a:b"),
    ],
)
def test_the_signature_names_what_changed(changed: dict[str, Any], told: str) -> None:
    other = signature(**changed)
    assert other.hash != signature().hash
    assert told in other.differences(signature().facts)


def test_figures_within_a_tenth_are_the_same() -> None:
    found = TuneFound(signature="x", precision="fp32", micro_batch_size=8, step_s=0.1, peak_bytes=1000)
    assert differences(found, step_s=0.109, peak_bytes=910) == []
    assert differences(found, step_s=0.12, peak_bytes=None) == ["a step takes 120 ms, the search found 100 ms"]
    assert differences(found, step_s=None, peak_bytes=1200) == ["its peak is 1.17 KiB, the search found 1000 B"]
